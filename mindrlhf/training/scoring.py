"""Scoring of whole groups by a head with fixed weights, without gradients."""

from collections.abc import Callable, Sequence

import numpy as np
from mindspore import nn

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.parallel.pipeline import WHOLE_MODEL, PipelineAxis
from mindrlhf.training.batch import SequenceGroup, collect, cut, pad
from mindrlhf.training.graphs import LastStageScores, StageForward
from mindrlhf.training.passes import NEXT, Passes


class Scorer(Passes):
    """Pass that returns a head's first output at each response token, on every stage.

    The output is log p(token | prompt, earlier tokens), or the critic's value. axis: the pipeline of which the head's
    decoder is a stage.
    """

    def __init__(self, head: nn.Cell, settings: TrainSettings, axis: PipelineAxis = WHOLE_MODEL):
        super().__init__(head.stage, axis)
        self._settings = settings
        self._graph = LastStageScores(head) if axis.is_last else StageForward(head.stage)

    def __call__(
        self, groups: Sequence[SequenceGroup], progress: Callable[[int], None] = lambda count: None
    ) -> list[tuple[np.ndarray, ...]]:
        """Score each group as G arrays float32[R]; progress gets counts of groups."""
        micros = cut(groups, self._settings.max_tokens_per_micro_batch, self._settings.length_bucket)
        outputs = []
        for micro in micros:
            batch = pad(micro, groups)
            x = self._input(batch)
            arrays = self._arrays(batch)
            if self.axis.is_last:
                outputs.append(self._graph.on_arrays(x, batch.targets, *arrays).asnumpy())
            else:
                self.axis.send(self._graph.on_arrays(x, *arrays)[0].asnumpy(), NEXT)
            progress(len(micro.groups))
        scores: list = [None] * len(groups)
        for micro, output in zip(micros, self.axis.from_last(outputs), strict=True):
            collect(micro, output, groups, scores)
        return scores
