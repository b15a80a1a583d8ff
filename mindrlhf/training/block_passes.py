"""Passes over micro-batches by blocks of a model.

Between the passes only the input of each block is kept (recomputation; Chen et al. 2016, arXiv:1604.06174).

Weights may be gathered when they are needed. All micro-batches then pass a block before the next one is gathered, so
that each block is gathered once for a forward pass and once for a backward pass, whatever the number of micro-batches.
The order is that of Pudipeddi et al. 2020 (arXiv:2002.05645, section 3); the sharing of weights and gradients that of
Rajbhandari et al. 2020 (arXiv:1910.02054, section 5.3).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from mindspore import Tensor, nn

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.layer import Side
from mindrlhf.parallel.pipeline import WHOLE_MODEL, PipelineAxis
from mindrlhf.training.graphs import GradientBuffers, Stage, StageBackward, StageForward
from mindrlhf.training.objective import Objective
from mindrlhf.training.passes import Gradients, MicroResult, Scores, named
from mindrlhf.types import TrainBatch

Arrays = Sequence[np.ndarray | Tensor]
Sides = dict[Side, np.ndarray]


class RunningBlock(GradientBuffers, Protocol):
    """Block of a model.

    gathers: this rank keeps a part of its weights. decoder: over the block's buffers, which other blocks may use.
    sides: names of its side outputs. parameters, gradients: buffers of what trains.
    """

    gathers: bool
    decoder: Decoder
    sides: Sequence[Side]

    def gather(self) -> None:
        """Fill the buffers with the weights; every rank calls it."""

    def give_back(self) -> None:
        """Sum gradients over ranks, and add them to what this rank keeps.

        The buffers are zero afterwards.
        """


def open_scores(head: nn.Cell, axis: PipelineAxis) -> Scores:
    """Open the pass of a head that fits its decoder."""
    return BlockScores(head) if head.decoder.blocks else Scores(head, axis)


def open_gradients(head: nn.Cell, objective: Objective, optimizer: GradientBuffers, axis: PipelineAxis) -> Gradients:
    """Open the pass of a head that fits its decoder."""
    blocks = head.decoder.blocks
    if not blocks:
        return Gradients(head, objective, optimizer, axis)
    return BlockGradients(head, objective) if blocks[0].gathers else LayerGradients(head, objective)


class BlockScores(Scores):
    """Pass by blocks that returns a head's first output, without gradients."""

    def __init__(self, head: nn.Cell):
        super().__init__(head, WHOLE_MODEL)
        *self._before, self._last = head.decoder.blocks
        self._graphs = _by_decoder(self._before, lambda block: StageForward(Stage(block.decoder)))

    def __call__(
        self, batches: Iterable[TrainBatch], done: Callable[[], None]
    ) -> tuple[list[np.ndarray], list[Mapping[Side, np.ndarray]]]:
        """Run all micro-batches; returns their outputs, and no side outputs.

        done: called after each micro-batch of the last block.
        """
        batches = list(batches)
        arrays = [self._arrays(batch) for batch in batches]
        rows = [self._input(batch) for batch in batches]
        sides: list[Sides] = [{} for _ in batches]
        for block in self._before:
            rows = _through(block, self._graphs[id(block.decoder)], rows, arrays, sides)
        self._last.gather()
        return self.end(zip(batches, rows, strict=True), done)


class BlockGradients(Gradients):
    """Pass by blocks that adds the gradients of micro-batches to those that ranks keep.

    between: makes of an output what is kept until the next block runs.
    """

    between = staticmethod(Tensor.asnumpy)

    def __init__(self, head: nn.Cell, objective: Objective):
        *self._before, self._last = head.decoder.blocks
        super().__init__(head, objective, self._last, WHOLE_MODEL)
        self._graphs = _by_decoder(
            self._before,
            lambda block: (
                StageForward(Stage(block.decoder)),
                StageBackward(Stage(block.decoder), objective, block),
            ),
        )

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        """Run all micro-batches.

        done: called after each micro-batch of the last block.
        """
        arrays = [self._arrays(batch) for batch in batches]
        rows = [self._input(batch) for batch in batches]
        inputs: list[Arrays] = []
        sides: list[Sides] = [{} for _ in batches]
        for block in self._before:
            inputs.append(rows)
            forward, _ = self._graphs[id(block.decoder)]
            rows = _through(block, forward, rows, arrays, sides, self.between)
        self._last.gather()
        results: list[MicroResult] = []
        back = []
        for batch, x in zip(batches, rows, strict=True):
            back.append(self.between(self._go_back(batch, x, results)))
            done()
        self._last.give_back()
        for block in reversed(self._before):
            _, backward = self._graphs[id(block.decoder)]
            block.gather()
            given = zip(batches, inputs.pop(), back, arrays, strict=True)
            back = [
                self.between(backward.on_arrays(x, d, np.array(one.weights.sum()), *own)) for one, x, d, own in given
            ]
            block.give_back()
        return self._with_sides(batches, results, sides) if self._decoder.model_sides else results


class LayerGradients(BlockGradients):
    """Pass by blocks of one micro-batch after the other.

    No weights are gathered. Rows stay on the device.
    """

    between = staticmethod(lambda output: output)

    def __call__(self, batches: Sequence[TrainBatch], done: Callable[[], None]) -> list[MicroResult]:
        """Run all micro-batches.

        done: called after each micro-batch of the last block.
        """
        return [result for batch in batches for result in super(LayerGradients, self).__call__([batch], done)]


def _by_decoder(blocks: Sequence[RunningBlock], make: Callable) -> dict[int, Any]:
    """Make the graphs of each decoder once."""
    return {id(block.decoder): make(block) for block in {id(one.decoder): one for one in blocks}.values()}


def _through(
    block: RunningBlock,
    graph: Graph,
    rows: Arrays,
    arrays: Sequence[Arrays],
    sides: Sequence[Sides],
    between: Callable[[Tensor], np.ndarray | Tensor] = Tensor.asnumpy,
) -> list[np.ndarray | Tensor]:
    """Pass micro-batches through a block; adds its side outputs to theirs."""
    block.gather()
    found = []
    for x, given, named_sides in zip(rows, arrays, sides, strict=True):
        output, *own = graph.on_arrays(x, *given)
        found.append(between(output))
        named_sides.update(named(block.sides, own))
    return found
