"""Report of the steps of fine-tuning."""

from dataclasses import dataclass

from mindrlhf.metrics.performance import add_performance
from mindrlhf.run.report import Report
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.updater import Update


@dataclass(frozen=True, eq=False)
class TuningResult:
    """Results of a step: this rank's demonstrations, and the update from them."""

    pairs: list[SequenceGroup]
    updates: list[Update]


class TuningReport(Report):
    """Report of the steps of fine-tuning, under verl's names."""

    def write(self, step: int, result: TuningResult, position: int = 0) -> None:
        """Write a step's metrics once its timers are closed; position: pairs drawn."""
        if not self._own_rows:
            result = TuningResult([], [])
        metrics, seconds = self._begin()
        for update in result.updates:
            self._add_update(metrics, update, "actor", "train/loss")
        lengths = [(len(pair.prompt_ids), [len(response) for response in pair.responses]) for pair in result.pairs]
        responses = sum(sum(each) for _, each in lengths)
        tokens = responses + sum(prompt for prompt, _ in lengths)
        add_performance(metrics, seconds, responses, tokens, self._ranks)
        self._utilization.add(metrics, seconds, lengths)
        self._show(step, self._reduce(metrics, step, position))
