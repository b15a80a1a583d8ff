"""Blocks of a part, which are computed one by one.

Their weights are gathered (`optimizer_level: level3`), or this rank keeps them whole (`recompute_config`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from mindspore import Parameter, Tensor

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.memory.residency import Residency
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.layer import Side, side_outputs
from mindrlhf.parallel.blocks import Block, buffer_shapes, cut_blocks, kept_slices, whole_shape
from mindrlhf.parallel.gradients import ReduceGradients
from mindrlhf.parallel.layout import Shape, Slices
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import GATHERED
from mindrlhf.reshard.online import OnlineReshard
from mindrlhf.reshard.plan import plan

Parameters = Mapping[str, Parameter]
# Parameters, layers, number of a stage, number of stages -> decoder.
MakeDecoder = Callable[[Parameters, range, int, int], Decoder]


@dataclass(frozen=True, eq=False)
class Workspace:
    """Buffers of gathered weights, which all parts of a rank share.

    One part computes at a time.
    """

    weights: dict[tuple[str, Shape], Parameter] = field(default_factory=dict)
    registered: set[tuple[str, Shape]] = field(default_factory=set)

    def buffer(self, name: str, shape: Shape) -> Parameter:
        """Return the buffer with this name and shape."""
        if (name, shape) not in self.weights:
            self.weights[name, shape] = zero(f"gathered.{name}", shape)
        return self.weights[name, shape]

    def register(self, residency: Residency) -> None:
        """Let the buffers that are new since the last time leave memory."""
        new = self.weights.keys() - self.registered
        if new:
            parameters = [parameter for key, parameter in self.weights.items() if key in new]
            residency.add(f"{GATHERED}.{len(self.registered)}", parameters, True)
            self.registered.update(new)


class KeptBlock:
    """Block of a part that this rank keeps whole; see `training.block_passes.RunningBlock`."""

    gathers = False
    parameters: Sequence[Parameter] = ()
    gradients: Sequence[Parameter] = ()

    def __init__(self, block: Block, decoder: Decoder):
        self.block = block
        self.sides: Sequence[Side] = decoder.sides
        self.decoder = decoder

    def add_to(self, gradients: Parameters, parameters: Parameters) -> None:
        """Let backward passes add to the gradients of these parameters."""
        names = [spec.name for spec in self.block.trained]
        self.parameters = [parameters[name] for name in names]
        self.gradients = [gradients[name] for name in names]

    def gather(self) -> None:
        """Do nothing: the weights are there."""

    def give_back(self) -> None:
        """Do nothing: the gradients are where they belong."""


class GatheredBlock(KeptBlock):
    """Block whose weights ranks share, with its buffers."""

    gathers = True

    def __init__(
        self,
        block: Block,
        part: Partition,
        collectives: Collectives,
        held: Parameters,
        buffers: Parameters,
        decoder: Decoder,
    ):
        super().__init__(block, decoder)
        self.sides = side_outputs(part.model, block.layers)  # the decoder may be that of other layers
        self._part = part
        names = [spec.name for spec in block.specs]
        moves = plan(part.layout.only(names), part.gathered.only(names))
        source = {name: held[name] for name in names}
        self._gather = OnlineReshard(moves, collectives, source, buffers)
        self._buffers = buffers
        self._kept: Parameters = {}
        self._slices: Sequence[Slices] = ()
        self._reduce: Callable[[], None] | None = None

    def collect(self, kept: Parameters, gradients: Parameters, reduce: Callable[[], None] | None) -> None:
        """Let backward passes give gradients back.

        kept: gradients of this rank's part by parameter. gradients: buffers, by their names. reduce: sums these over
        ranks; None if nothing is summed.
        """
        specs = self.block.trained
        self.parameters = [self._buffers[spec.name] for spec in specs]
        self.gradients = [gradients[self.block.buffers[spec.name]] for spec in specs]
        self._kept = {spec.name: kept[spec.name] for spec in specs}
        self._slices = [kept_slices(self._part, spec.name) for spec in specs]
        self._reduce = reduce

    def gather(self) -> None:
        self._gather.run()

    def give_back(self) -> None:
        if self._reduce:
            self._reduce()
        with backend.rewriting(self._kept) as kept:
            for name, buffer, own in zip(kept, self.gradients, self._slices, strict=True):
                kept[name] += backend.read(buffer)[own]
        for buffer in self.gradients:
            backend.write(buffer, 0.0)


def open_blocks(
    part: Partition, collectives: Collectives, held: Parameters, workspace: Workspace, make: MakeDecoder
) -> tuple[GatheredBlock, ...]:
    """Open the blocks of a part; those that are alike have one decoder.

    held: the parameters that this rank keeps.
    """
    cut = cut_blocks(part)
    blocks: list[GatheredBlock] = []
    for number, block in enumerate(cut):
        buffers = {
            spec.name: workspace.buffer(block.buffers[spec.name], whole_shape(part, spec.name)) for spec in block.specs
        }
        is_new = block.alike == number
        decoder = make(buffers, block.layers, number, len(cut)) if is_new else blocks[block.alike].decoder
        blocks.append(GatheredBlock(block, part, collectives, held, buffers, decoder))
    return tuple(blocks)


def keep_blocks(part: Partition, held: Parameters, make: MakeDecoder) -> tuple[KeptBlock, ...]:
    """Open the blocks of a part that this rank keeps whole.

    Each has its own decoder. held: the part's parameters.
    """
    cut = cut_blocks(part)
    return tuple(KeptBlock(one, make(held, one.layers, i, len(cut))) for i, one in enumerate(cut))


def collect_in_blocks(
    blocks: Sequence[GatheredBlock],
    part: Partition,
    collectives: Collectives,
    kept: Parameters,
    aggregation_groups: int,
) -> list[Parameter]:
    """Let backward passes give gradients back; returns their buffers.

    kept: gradients of this rank's part by parameter. aggregation_groups: see `ReduceGradients`.
    """
    gradients = {name: zero(f"gathered.gradient.{name}", shape) for name, shape in buffer_shapes(part, True).items()}
    reductions: list[ReduceGradients | None] = []
    for number, running in enumerate(blocks):
        block = running.block
        if block.alike == number:
            own = [gradients[block.buffers[spec.name]] for spec in block.trained]
            groups = part.gradient_groups(block.trained)
            reductions.append(ReduceGradients(own, groups, collectives, aggregation_groups) if groups else None)
        else:
            reductions.append(reductions[block.alike])
        running.collect(kept, gradients, reductions[number])
    return list(gradients.values())


def zero(name: str, shape: Shape) -> Parameter:
    """Make a parameter of zeros."""
    return Parameter(Tensor(np.zeros(shape, np.float32)), name=name, requires_grad=False)
