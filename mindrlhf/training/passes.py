"""Passes of a whole model over micro-batches; `pipeline_passes` has the same for the stages of a pipeline.

Both give the same results on every rank that shares a micro-batch, so that what is above need not know which it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import nn

from mindrlhf.models.transformer import Decoder
from mindrlhf.training.compiled import Compiled
from mindrlhf.training.graphs import Accumulate, Loss, PolicyLogProbs
from mindrlhf.training.optimizer import AdamW
from mindrlhf.types import TrainBatch


@dataclass(frozen=True, eq=False)
class MicroResult:
    """What one micro-batch gave. loss: its part of the loss; the arrays are float32[N*G, R], metrics by name."""

    loss: float
    log_probs: np.ndarray
    entropy: np.ndarray
    metrics: dict[str, np.ndarray]

    @classmethod
    def of_tensors(cls, loss, log_probs, entropy, metrics) -> "MicroResult":
        """From what `training.graphs.Loss` returns."""
        arrays = {name: values.asnumpy() for name, values in metrics.items()}
        return cls(float(loss.asnumpy()), log_probs.asnumpy(), entropy.asnumpy(), arrays)


class _LogProbsOnly(nn.Cell):
    """Without the entropy, whose computation the compiler then leaves out."""

    def __init__(self, policy: PolicyLogProbs):
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, prefix_ids, prefix_lengths, input_ids, targets):
        return self.policy(prefix_ids, prefix_lengths, input_ids, targets)[0]


class Scores:
    """Token log-probs of micro-batches, without gradients: float32[N*G, R] each."""

    def __init__(self, decoder: Decoder, temperature: float):
        self._graph = Compiled(_LogProbsOnly(PolicyLogProbs(decoder, temperature)))

    def __call__(self, batches: Sequence[TrainBatch]) -> list[np.ndarray]:
        return [self._graph(*token_fields(batch)).asnumpy() for batch in batches]

    def compile_s(self) -> float:
        """Seconds that building graphs took since the last call."""
        return self._graph.collect()


class Gradients:
    """The loss of micro-batches, whose gradients are added to the optimizer's buffers."""

    def __init__(self, decoder: Decoder, temperature: float, objective: Callable, optimizer: AdamW):
        loss = Loss(PolicyLogProbs(decoder, temperature), objective)
        self._graph = Compiled(Accumulate(loss, optimizer.parameters, optimizer.gradients))

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        """done: called after each micro-batch."""
        results = []
        for batch in batches:
            results.append(MicroResult.of_tensors(*self._graph(*loss_fields(batch))))
            done()
        return results

    def compile_s(self) -> float:
        """Seconds that building graphs took since the last call."""
        return self._graph.collect()


def token_fields(batch: TrainBatch) -> tuple[np.ndarray, ...]:
    """The inputs of `PolicyLogProbs`, in order."""
    return batch.prefix_ids, batch.prefix_lengths, batch.input_ids, batch.targets


def loss_fields(batch: TrainBatch) -> tuple[np.ndarray, ...]:
    """The inputs of `Loss`, in order."""
    return (
        *token_fields(batch),
        batch.mask,
        batch.weights,
        batch.advantages,
        batch.old_log_probs,
        batch.reference_log_probs,
    )
