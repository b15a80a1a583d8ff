"""Scoring of whole groups by a head with fixed weights, without gradients."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from mindspore import nn

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.models.layer import Side
from mindrlhf.parallel.pipeline import WHOLE_MODEL, PipelineAxis
from mindrlhf.training.batch import MicroBatch, SequenceGroup, collect, collect_routing, pad
from mindrlhf.training.first_routing import FirstRouting
from mindrlhf.training.graphs import LastStageScores, StageForward
from mindrlhf.training.passes import NEXT, Passes, named


class Scorer(Passes):
    """Pass that returns a head's first output at each response token, on every stage.

    The output is log p(token | prompt, earlier tokens), or the critic's value. axis: the pipeline of which the head's
    decoder is a stage. first: keeps the routing of each call, if the decoder records it; the routers choose then.
    """

    def __init__(
        self,
        head: nn.Cell,
        settings: TrainSettings,
        axis: PipelineAxis = WHOLE_MODEL,
        first: FirstRouting | None = None,
    ):
        super().__init__(head.stage, axis)
        self._settings = settings
        self._graph = LastStageScores(head) if axis.is_last else StageForward(head.stage)
        self._first = first

    def __call__(
        self, groups: Sequence[SequenceGroup], progress: Callable[[int], None] = lambda count: None
    ) -> list[tuple[np.ndarray, ...]]:
        """Score each group as G arrays float32[R]; progress gets counts of groups."""
        if self._first:
            groups = self._first.begin(groups)
        micros = self.cut(groups, self._settings)
        outputs = []
        sides: list[Mapping[Side, np.ndarray]] = []
        for micro in micros:
            batch = pad(micro, groups, vision=self._decoder.vision, routing=self.replayed)
            x = self._input(batch)
            targets = (batch.targets,) if self.axis.is_last else ()
            output, *own = self._graph.on_arrays(x, *targets, *self._arrays(batch))
            if self.axis.is_last:
                outputs.append(output.asnumpy())
            else:
                self.axis.send(output.asnumpy(), NEXT)
            if self._first:
                sides.append(named(self._decoder.sides, own))
            progress(len(micro.groups))
        scores: list = [None] * len(groups)
        for micro, output in zip(micros, self.axis.from_last(outputs), strict=True):
            collect(micro, output, groups, scores)
        if self._first:
            self._first.keep(groups, self._routing(micros, groups, sides))
        return scores

    def _routing(
        self, micros: Sequence[MicroBatch], groups: Sequence[SequenceGroup], sides: list[Mapping[Side, np.ndarray]]
    ) -> list:
        """Collect each group's routing from the side outputs of all stages."""
        found: list = [None] * len(groups)
        for micro, *parts in zip(micros, *self.axis.gather(sides), strict=True):
            every = {side: array for part in parts for side, array in part.items()}
            collect_routing(micro, every, self._decoder.routing, groups, found)
        return found
