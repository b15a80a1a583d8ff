"""Passes of a whole model over micro-batches; `pipeline_passes` has the same for the stages of a pipeline.

Both give the same results on every rank that shares a micro-batch, so that what is above need not know which it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import nn

from mindrlhf.backend.graph import Graph
from mindrlhf.training.compiled import Compiled
from mindrlhf.training.graphs import Accumulate, Loss
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW
from mindrlhf.types import TrainBatch


@dataclass(frozen=True, eq=False)
class MicroResult:
    """What one micro-batch gave.

    loss: its part of the loss. output: the head's first, the policy's log-probs or the critic's values. Arrays are
    float32[N*G, R], metrics by name.
    """

    loss: float
    output: np.ndarray
    metrics: dict[str, np.ndarray]

    @classmethod
    def of_tensors(cls, objective: Objective, loss, output, metrics) -> "MicroResult":
        """From what `training.graphs.Loss` of this objective returns."""
        arrays = {name: values.asnumpy() for name, values in zip(objective.metrics, metrics, strict=True)}
        return cls(float(loss.asnumpy()), output.asnumpy(), arrays)


class _FirstOutput(Graph):
    """Without the entropy, whose computation the compiler then leaves out."""

    def __init__(self, head: nn.Cell):
        super().__init__()
        self.head = head

    def construct(self, prefix_ids, prefix_lengths, input_ids, lengths, targets):
        return self.head(prefix_ids, prefix_lengths, input_ids, lengths, targets)[0]


class Scores:
    """A head's first output for micro-batches, without gradients: float32[N*G, R] each."""

    def __init__(self, head: nn.Cell):
        self._graph = Compiled(_FirstOutput(head))

    def __call__(self, batches: Sequence[TrainBatch]) -> list[np.ndarray]:
        return [self._graph(*token_fields(batch)).asnumpy() for batch in batches]

    def compile_s(self) -> float:
        """Seconds that building graphs took since the last call."""
        return self._graph.collect()


class Gradients:
    """The loss of micro-batches, whose gradients are added to the optimizer's buffers."""

    def __init__(self, head: nn.Cell, objective: Objective, optimizer: AdamW):
        self._objective = objective
        self._graph = Compiled(Accumulate(Loss(head, objective), optimizer.parameters, optimizer.gradients))

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        """done: called after each micro-batch."""
        results = []
        for batch in batches:
            out = self._graph(*loss_fields(batch, self._objective.fields))
            results.append(MicroResult.of_tensors(self._objective, *out))
            done()
        return results

    def compile_s(self) -> float:
        """Seconds that building graphs took since the last call."""
        return self._graph.collect()


def token_fields(batch: TrainBatch) -> tuple[np.ndarray, ...]:
    """The inputs of a head, in order."""
    return batch.prefix_ids, batch.prefix_lengths, batch.input_ids, batch.lengths, batch.targets


def loss_fields(batch: TrainBatch, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """The inputs of `Loss` with an objective of these fields, in order."""
    return (*token_fields(batch), batch.mask, batch.weights, *(batch.fields[name] for name in names))
