"""Scoring of whole groups by a head with fixed weights, without gradients."""

from collections.abc import Callable, Sequence

import numpy as np
from mindspore import nn

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.parallel.pipeline import WHOLE_MODEL, PipelineAxis
from mindrlhf.training.batch import SequenceGroup, collect, collect_routing, pad
from mindrlhf.training.block_passes import open_scores
from mindrlhf.training.first_routing import FirstRouting


class Scorer:
    """Scorer that returns a head's first output at each response token, on every stage.

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
        self._decoder = head.decoder
        self._settings = settings
        self._scores = open_scores(head, axis)
        self._first = first

    def __call__(
        self, groups: Sequence[SequenceGroup], progress: Callable[[int], None] = lambda count: None
    ) -> list[tuple[np.ndarray, ...]]:
        """Score each group as G arrays float32[R]; progress gets counts of groups."""
        if self._first:
            groups = self._first.begin(groups)
        micros = self._scores.cut(groups, self._settings)
        batches = (pad(one, groups, pictures=self._decoder.pictures, routing=self._scores.replayed) for one in micros)
        counts = iter([len(micro.groups) for micro in micros])
        outputs, sides = self._scores(batches, lambda: progress(next(counts)))
        scores: list = [None] * len(groups)
        for micro, output in zip(micros, outputs, strict=True):
            collect(micro, output, groups, scores)
        if self._first:
            found: list = [None] * len(groups)
            for micro, every in zip(micros, sides, strict=True):
                collect_routing(micro, every, self._decoder.routing, groups, found)
            self._first.keep(groups, found)
        return scores

    def rehearse(self, groups: Sequence[SequenceGroup]) -> None:
        """Run each graph once, on the groups' first micro-batch."""
        micro = self._scores.cut(groups, self._settings)[0]
        self._scores([pad(micro, groups, pictures=self._decoder.pictures, routing=self._scores.replayed)], lambda: None)
