"""Passes over micro-batches by the stages of a pipeline, each with the layers of its own `Decoder`.

Activations and their gradients travel between neighbours from host to host; what the last stage computes is handed to
all stages at the end. The schedule is 1F1B (`parallel.pipeline`).
"""

from collections.abc import Callable, Sequence

import numpy as np
from mindspore import nn

from mindrlhf.models.transformer import Decoder
from mindrlhf.parallel.pipeline import PipelineAxis, one_forward_one_backward
from mindrlhf.training.compiled import Compiled
from mindrlhf.training.graphs import Loss
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.passes import MicroResult, loss_fields, token_fields
from mindrlhf.training.stage_graphs import (
    LastStageBackward,
    LastStageLoss,
    LastStageScores,
    StageBackward,
    StageForward,
    StageProduct,
)
from mindrlhf.types import TrainBatch

NEXT, BEFORE = 1, -1


class _Stage:
    """What both kinds of pass need: the forward graph of a stage that is not the last, and its neighbours."""

    def __init__(self, decoder: Decoder, axis: PipelineAxis):
        self.axis, self._decoder = axis, decoder
        self._forward = None if axis.is_last else StageForward(decoder)
        self._graphs: list[Compiled] = []

    def compile_s(self) -> float:
        """Seconds that building graphs took since the last call."""
        return sum(graph.collect() for graph in self._graphs)

    def _compiled(self, graph) -> Compiled:
        self._graphs.append(Compiled(graph))
        return self._graphs[-1]

    def _input(self, batch: TrainBatch) -> np.ndarray:
        """[rows, hidden] from the stage before; a placeholder in the first."""
        if self.axis.is_first:
            return np.zeros((1, 1), np.float32)
        return self.axis.receive(self._row_shape(batch), BEFORE)

    def _row_shape(self, batch: TrainBatch) -> tuple[int, int]:
        """Shape of what travels between stages."""
        tokens = batch.prefix_ids.size + batch.input_ids.size
        return tokens // self._decoder.row_shares, self._decoder.hidden_size


class PipelineScores(_Stage):
    """As `passes.Scores`."""

    def __init__(self, head: nn.Cell, axis: PipelineAxis):
        super().__init__(head.decoder, axis)
        graph = LastStageScores(head) if axis.is_last else self._forward
        self._run = self._compiled(graph)

    def __call__(self, batches: Sequence[TrainBatch]) -> list[np.ndarray]:
        outputs = []
        for batch in batches:
            x, fields = self._input(batch), token_fields(batch)
            if self.axis.is_last:
                outputs.append(self._run(x, *fields).asnumpy())
            else:
                self.axis.send(self._run(x, *fields[:-1]).asnumpy(), NEXT)
        return self.axis.from_last(outputs)


class PipelineGradients(_Stage):
    """As `passes.Gradients`."""

    def __init__(self, head: nn.Cell, objective: Objective, optimizer: AdamW, axis: PipelineAxis):
        super().__init__(head.decoder, axis)
        self._objective = objective
        variables = (optimizer.parameters, optimizer.gradients)
        if axis.is_last:
            loss = LastStageLoss(Loss(head, objective))
            self._backward = self._compiled(LastStageBackward(loss, *variables))
        else:
            self._run = self._compiled(self._forward)
            self._backward = self._compiled(StageBackward(StageProduct(self._forward), *variables))

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        run = self._last_stage if self.axis.is_last else self._other_stage
        return self.axis.from_last(run(batches, done))

    def _last_stage(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        results = []
        for batch in batches:  # a backward pass follows each forward pass, so that one graph does both
            d_x, out = self._backward(self._input(batch), *loss_fields(batch, self._objective.fields))
            self.axis.send(d_x.asnumpy(), BEFORE)
            results.append(MicroResult.of_tensors(self._objective, *out))
            done()
        return results

    def _other_stage(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> None:
        inputs: dict[int, np.ndarray] = {}
        for kind, index in one_forward_one_backward(self.axis.stage, self.axis.size, len(batches)):
            fields = token_fields(batches[index])[:-1]
            if kind == "forward":
                inputs[index] = self._input(batches[index])
                self.axis.send(self._run(inputs[index], *fields).asnumpy(), NEXT)
                continue
            d_output = self.axis.receive(self._row_shape(batches[index]), NEXT)
            d_x = self._backward(inputs.pop(index), *fields, d_output).asnumpy()
            if not self.axis.is_first:
                self.axis.send(d_x, BEFORE)
            done()
