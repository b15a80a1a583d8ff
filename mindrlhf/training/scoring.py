"""Token log-probs of whole groups under one set of weights, without gradients."""

from collections.abc import Sequence

import numpy as np

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.models.transformer import Decoder
from mindrlhf.parallel.pipeline import PipelineAxis
from mindrlhf.training.batch import SequenceGroup, collect, cut, pad
from mindrlhf.training.passes import Scores
from mindrlhf.training.pipeline_passes import PipelineScores


class Scorer:
    """log p(response token | prompt, earlier tokens) at a temperature, for the reference and the old policy.

    axis: the pipeline whose stage `decoder` is, None for a whole model. compile_s: seconds of the last call that went
    into building graphs.
    """

    def __init__(self, decoder: Decoder, temperature: float, settings: TrainSettings, axis: PipelineAxis | None = None):
        self._scores = PipelineScores(decoder, temperature, axis) if axis else Scores(decoder, temperature)
        self._settings = settings
        self.compile_s = 0.0

    def __call__(self, groups: Sequence[SequenceGroup]) -> list[tuple[np.ndarray, ...]]:
        """For each group, G arrays float32[R]."""
        out: list = [None] * len(groups)
        micros = cut(groups, self._settings.max_tokens_per_micro_batch, self._settings.length_bucket)
        for micro, log_probs in zip(micros, self._scores([pad(micro, groups) for micro in micros]), strict=True):
            collect(micro, log_probs, groups, out)
        self.compile_s = self._scores.compile_s()
        return out
