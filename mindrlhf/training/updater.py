"""One optimizer update from groups of sequences: micro-batches, gradients, reduction over ranks, AdamW."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.models.transformer import Decoder
from mindrlhf.parallel.pipeline import PipelineAxis
from mindrlhf.training.batch import SequenceGroup, collect, cut, pad
from mindrlhf.training.optimizer import AdamW, UpdateResult
from mindrlhf.training.passes import Gradients
from mindrlhf.training.pipeline_passes import PipelineGradients

Rows = Sequence[Sequence[np.ndarray]]  # per group, per sample: float[R]


@dataclass(frozen=True, eq=False)
class Update:
    """What one update did, seen from this rank.

    loss: this rank's share of the loss; the sum over data-parallel ranks is the loss.
    metrics: name -> per group, G arrays float32[R]: the objective's per-token values, and `entropy`.
    weighted: name -> sum of weights * values of the same metrics: this rank's share, aggregated as the loss is.
    log_probs: per group, G arrays float32[R], of the policy before the update.
    compile_s: seconds that went into building graphs.
    """

    result: UpdateResult
    loss: float
    metrics: dict[str, list[tuple[np.ndarray, ...]]]
    weighted: dict[str, float]
    log_probs: list[tuple[np.ndarray, ...]]
    compile_s: float


class Updater:
    """Minimises one objective over the weights of `decoder` with one optimizer.

    objective: see `training.objective`; temperature: of the policy's distribution; reduce_gradients: sums the gradient
    buffers over ranks in place, or None on a single rank; axis: the pipeline whose stage `decoder` is, None for a whole
    model; least_micro_batches: into how many micro-batches groups are cut at least, if there are as many groups.
    """

    def __init__(
        self,
        decoder: Decoder,
        objective: Callable,
        temperature: float,
        optimizer: AdamW,
        settings: TrainSettings,
        reduce_gradients: Callable[[], None] | None = None,
        axis: PipelineAxis | None = None,
        least_micro_batches: int = 1,
    ):
        self.optimizer, self._settings, self._reduce = optimizer, settings, reduce_gradients
        self._least_micro_batches = least_micro_batches
        if axis:
            self._gradients = PipelineGradients(decoder, temperature, objective, optimizer, axis)
        else:
            self._gradients = Gradients(decoder, temperature, objective, optimizer)
        self._optimizer_ran = False

    def __call__(
        self,
        groups: Sequence[SequenceGroup],
        learning_rate: float,
        *,
        weights: Rows,
        advantages: Rows | None = None,
        old_log_probs: Rows | None = None,
        reference_log_probs: Rows | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> Update:
        """One update from this rank's groups. weights: see `algorithms.aggregation`, with denominators over all
        ranks. progress: told, after each micro-batch, what share of them that was.
        """
        fields = {
            "weights": weights,
            "advantages": advantages,
            "old_log_probs": old_log_probs,
            "reference_log_probs": reference_log_probs,
        }
        settings = self._settings
        micros = cut(groups, settings.max_tokens_per_micro_batch, settings.length_bucket, self._least_micro_batches)
        batches = [pad(micro, groups, **fields) for micro in micros]
        metrics: dict[str, list] = {}
        weighted: dict[str, float] = {}
        log_probs: list = [None] * len(groups)
        loss = 0.0
        results = self._gradients(batches, lambda: progress(1 / len(batches)))
        for micro, batch, result in zip(micros, batches, results, strict=True):
            loss += result.loss
            collect(micro, result.log_probs, groups, log_probs)
            for name, array in {**result.metrics, "entropy": result.entropy}.items():
                collect(micro, array, groups, metrics.setdefault(name, [None] * len(groups)))
                weighted[name] = weighted.get(name, 0.0) + float((batch.weights * array).sum())
        if self._reduce:
            self._reduce()
        start, compile_s = time.perf_counter(), self._gradients.compile_s()
        applied = self.optimizer.step(learning_rate)
        if not self._optimizer_ran:
            self._optimizer_ran = True
            compile_s += time.perf_counter() - start
        return Update(applied, loss, metrics, weighted, log_probs, compile_s)
