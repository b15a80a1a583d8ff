"""Passes over micro-batches by pipeline stages, each with its layers' `Decoder`.

A whole model is a pipeline of one stage. Neighbouring stages send activations and their gradients through host memory;
at the end all stages get the last stage's results. The schedule is 1F1B (`parallel.pipeline`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import nn

from mindrlhf.parallel.pipeline import PipelineAxis, one_forward_one_backward
from mindrlhf.training.graphs import LastStageBackward, Loss, Stage, StageBackward, StageForward
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW
from mindrlhf.types import TrainBatch

NEXT, BEFORE = 1, -1


@dataclass(frozen=True, eq=False)
class MicroResult:
    """Result of one micro-batch.

    loss: its part of the loss. output: the head's first output, log-probs or a critic's values. Arrays are
    float32[N*G, R], metrics by name.
    """

    loss: float
    output: np.ndarray
    metrics: dict[str, np.ndarray]


class Passes:
    """Base of both kinds of pass: messages between stages."""

    def __init__(self, stage: Stage, axis: PipelineAxis):
        self.axis, self._decoder = axis, stage.decoder

    def _input(self, batch: TrainBatch) -> np.ndarray:
        """Receive [rows, hidden] from the previous stage; a placeholder in the first stage."""
        if self.axis.is_first:
            return np.zeros((1, 1), np.float32)
        return self.axis.receive(self._row_shape(batch), BEFORE)

    def _arrays(self, batch: TrainBatch) -> list[np.ndarray]:
        """List the arrays that the decoder's graphs take, in order."""
        arrays = batch.model_inputs
        return [arrays[name] for name in self._decoder.inputs]

    def _row_shape(self, batch: TrainBatch) -> tuple[int, int]:
        """Shape of the messages between stages."""
        tokens = batch.prefix_ids.size + batch.input_ids.size
        return tokens // self._decoder.row_shares, self._decoder.hidden_size


class Gradients(Passes):
    """Pass that adds the gradients of micro-batches to the optimizer's buffers."""

    def __init__(self, head: nn.Cell, objective: Objective, optimizer: AdamW, axis: PipelineAxis):
        super().__init__(head.stage, axis)
        self._objective = objective
        if axis.is_last:  # here each forward pass is followed by its backward pass, so one graph does both
            self._backward = LastStageBackward(Loss(head, objective), optimizer).on_arrays
        else:
            self._forward = StageForward(head.stage).on_arrays
            self._backward = StageBackward(head.stage, optimizer).on_arrays

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        """Run all micro-batches; returns the last stage's results on every stage.

        done: called after each micro-batch.
        """
        inputs: dict[int, np.ndarray] = {}
        results: list[MicroResult] = []
        for kind, index in one_forward_one_backward(self.axis.stage, self.axis.size, len(batches)):
            batch = batches[index]
            if kind == "forward":
                inputs[index] = self._input(batch)
                if not self.axis.is_last:
                    self.axis.send(self._forward(inputs[index], *self._arrays(batch)).asnumpy(), NEXT)
                continue
            d_x = self._go_back(batch, inputs.pop(index), results)
            if not self.axis.is_first:
                self.axis.send(d_x.asnumpy(), BEFORE)
            done()
        return self.axis.from_last(results)

    def _go_back(self, batch: TrainBatch, x: np.ndarray, results: list[MicroResult]):
        """Compute the gradient at x; the last stage appends the micro-batch's result."""
        if not self.axis.is_last:
            d_output = self.axis.receive(self._row_shape(batch), NEXT)
            return self._backward(x, d_output, *self._arrays(batch))
        fields = [batch.fields[name] for name in self._objective.fields]
        d_x, out = self._backward(x, batch.targets, batch.mask, batch.weights, *self._arrays(batch), *fields)
        metrics = {name: one.asnumpy() for name, one in zip(self._objective.metrics, out[2], strict=True)}
        results.append(MicroResult(float(out[0].asnumpy()), out[1].asnumpy(), metrics))
        return d_x
