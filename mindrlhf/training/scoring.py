"""Scores of whole groups by a head under fixed weights, without gradients."""

from collections.abc import Sequence

import numpy as np
from mindspore import nn

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.parallel.pipeline import WHOLE_MODEL, PipelineAxis
from mindrlhf.training.batch import SequenceGroup, collect, cut, pad
from mindrlhf.training.passes import Scores


class Scorer:
    """A head's first output at each response token.

    It is log p(token | prompt, earlier tokens), or the critic's value.
    axis: the pipeline whose stage the head's decoder is.
    """

    def __init__(self, head: nn.Cell, settings: TrainSettings, axis: PipelineAxis = WHOLE_MODEL):
        self._scores = Scores(head, axis)
        self._settings = settings

    def __call__(self, groups: Sequence[SequenceGroup]) -> list[tuple[np.ndarray, ...]]:
        """Score each group; returns G arrays float32[R] for each."""
        out: list = [None] * len(groups)
        micros = cut(groups, self._settings.max_tokens_per_micro_batch, self._settings.length_bucket)
        for micro, output in zip(micros, self._scores([pad(micro, groups) for micro in micros]), strict=True):
            collect(micro, output, groups, out)
        return out
