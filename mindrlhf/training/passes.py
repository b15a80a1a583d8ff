"""Passes over micro-batches by pipeline stages, each with its layers' `Decoder`.

A whole model is a pipeline of one stage. Neighbouring stages send activations and their gradients through host memory;
at the end all stages get the last stage's results. The schedule is 1F1B (`parallel.pipeline`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from mindspore import Tensor, nn

from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.models.layer import Side
from mindrlhf.models.routing import RoutingForm
from mindrlhf.parallel.pipeline import PipelineAxis, one_forward_one_backward
from mindrlhf.training.batch import MicroBatch, SequenceGroup, cut
from mindrlhf.training.graphs import (
    GradientBuffers,
    LastStageBackward,
    LastStageScores,
    Loss,
    Stage,
    StageBackward,
    StageForward,
)
from mindrlhf.training.objective import Objective
from mindrlhf.types import TrainBatch

NEXT, BEFORE = 1, -1


@dataclass(frozen=True, eq=False)
class MicroResult:
    """Result of one micro-batch.

    loss: its part of the loss. output: the head's first output, log-probs or a critic's values. Arrays are
    float32[N*G, R], metrics by name. sides: the side outputs of all stages' layers and of the head.
    """

    loss: float
    output: np.ndarray
    metrics: dict[str, np.ndarray]
    sides: Mapping[Side, np.ndarray] = field(default_factory=dict)


class Passes:
    """Base of both kinds of pass: messages between stages."""

    def __init__(self, stage: Stage, axis: PipelineAxis):
        self.axis = axis
        self._decoder = stage.decoder

    def cut(self, groups: Sequence[SequenceGroup], settings: TrainSettings, least: int = 1) -> list[MicroBatch]:
        """Cut groups into micro-batches.

        They have equal sizes on the ranks over which experts are spread.
        """
        spread = self._decoder.spread
        largest = spread.largest if spread.size > 1 else None
        return cut(groups, settings.max_tokens_per_micro_batch, settings.length_bucket, least, largest)

    @property
    def replayed(self) -> RoutingForm | None:
        """The form of the routing that the decoder replays."""
        return self._decoder.routing if self._decoder.replays else None

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


class Scores(Passes):
    """Pass that returns a head's first output, without gradients."""

    def __init__(self, head: nn.Cell, axis: PipelineAxis):
        super().__init__(head.stage, axis)
        self._graph = LastStageScores(head) if axis.is_last else StageForward(head.stage)

    def __call__(
        self, batches: Iterable[TrainBatch], done: Callable[[], None]
    ) -> tuple[list[np.ndarray], list[Mapping[Side, np.ndarray]]]:
        """Run all micro-batches; returns their outputs and recorded side outputs, on every stage.

        done: called after each micro-batch.
        """
        return self.end(((batch, self._input(batch)) for batch in batches), done)

    def end(
        self, inputs: Iterable[tuple[TrainBatch, np.ndarray]], done: Callable[[], None]
    ) -> tuple[list[np.ndarray], list[Mapping[Side, np.ndarray]]]:
        """Run micro-batches with their x from this decoder on."""
        outputs: list[np.ndarray] = []
        sides: list[Mapping[Side, np.ndarray]] = []
        for batch, x in inputs:
            targets = (batch.targets,) if self.axis.is_last else ()
            output, *own = self._graph.on_arrays(x, *targets, *self._arrays(batch))
            if self.axis.is_last:
                outputs.append(output.asnumpy())
            else:
                self.axis.send(output.asnumpy(), NEXT)
            sides.append(named(self._decoder.sides, own) if self._decoder.records else {})
            done()
        return self.axis.from_last(outputs), self._of_all_stages(sides) if self._decoder.records else sides

    def _of_all_stages(self, sides: list[Mapping[Side, np.ndarray]]) -> list[Mapping[Side, np.ndarray]]:
        """Join each micro-batch's side outputs of all stages."""
        return [
            {side: array for part in parts for side, array in part.items()}
            for parts in zip(*self.axis.gather(sides), strict=True)
        ]


class Gradients(Passes):
    """Pass that adds the gradients of micro-batches to the optimizer's buffers."""

    def __init__(self, head: nn.Cell, objective: Objective, optimizer: GradientBuffers, axis: PipelineAxis):
        super().__init__(head.stage, axis)
        self._objective = objective
        self._head = head
        if axis.is_last:  # here each forward pass is followed by its backward pass, so one graph does both
            self._backward = LastStageBackward(Loss(head, objective), optimizer).on_arrays
        else:
            self._forward = StageForward(head.stage).on_arrays
            self._backward = StageBackward(head.stage, objective, optimizer).on_arrays

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        """Run all micro-batches; returns the last stage's results on every stage.

        done: called after each micro-batch.
        """
        inputs: dict[int, np.ndarray] = {}
        results: list[MicroResult] = []
        sides: list[Mapping[Side, np.ndarray]] = []
        for kind, index in one_forward_one_backward(self.axis.stage, self.axis.size, len(batches)):
            batch = batches[index]
            if kind == "forward":
                inputs[index] = self._input(batch)
                if not self.axis.is_last:
                    output, *own = self._forward(inputs[index], *self._arrays(batch))
                    self.axis.send(output.asnumpy(), NEXT)
                    sides.append(named(self._decoder.sides, own))
                continue
            d_x = self._go_back(batch, inputs.pop(index), results)
            if not self.axis.is_first:
                self.axis.send(d_x.asnumpy(), BEFORE)
            done()
        results = self.axis.from_last(results)
        if not results:  # of a stage whose last one is not there (`comm.alone`)
            return results
        return self._with_sides(batches, results, sides) if self._decoder.model_sides else results

    def _with_sides(
        self, batches: Sequence[TrainBatch], results: list[MicroResult], sides: list[Mapping[Side, np.ndarray]]
    ) -> list[MicroResult]:
        """Add the earlier stages' side outputs, and their terms of the loss."""
        stages = [stage for stage in self.axis.gather(sides) if stage]
        found = []
        for batch, result, *before in zip(batches, results, *stages, strict=True):
            earlier = {side: array for stage in before for side, array in stage.items()}
            loss = result.loss + sum(self._objective.terms_of(earlier).values()) * float(batch.weights.sum())
            found.append(replace(result, loss=loss, sides={**earlier, **result.sides}))
        return found

    def _go_back(self, batch: TrainBatch, x: np.ndarray, results: list[MicroResult]):
        """Compute the gradient at x; the last stage appends the micro-batch's result."""
        if not self.axis.is_last:
            d_output = self.axis.receive(self._row_shape(batch), NEXT)
            return self._backward(x, d_output, np.array(batch.weights.sum()), *self._arrays(batch))
        fields = [batch.fields[name] for name in self._objective.fields]
        d_x, out = self._backward(x, batch.targets, batch.mask, batch.weights, *self._arrays(batch), *fields)
        metrics = named((*self._objective.metrics, *self._head.sides), out[2])
        sides = {side: metrics.pop(side) for side in self._head.sides}
        results.append(MicroResult(float(out[0].asnumpy()), out[1].asnumpy(), metrics, sides))
        return d_x


def named(names: Sequence, tensors: Sequence[Tensor]) -> dict:
    """Map names to the arrays of tensors."""
    return {name: tensor.asnumpy() for name, tensor in zip(names, tensors, strict=True)}
