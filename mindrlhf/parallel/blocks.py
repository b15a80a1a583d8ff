"""Blocks of a model, which are computed one by one. Pure Python.

The first block embeds, each further one is a layer, and the last one also has the head. Where weights are gathered,
layers with the same parameters but for their number share buffers, and blocks of such layers share graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mindrlhf.models.parameters import EMBEDDING, HEAD, ParameterSpec
from mindrlhf.parallel.layout import Shape, Slices, box_of, inside
from mindrlhf.parallel.partition import Partition


@dataclass(frozen=True)
class Block:
    """Parameters that are whole at the same time.

    layers: its layer, if any. specs: rows of its parameters. buffers: parameter -> name of the buffer that holds it
    whole; parameters of several blocks may have one. alike: index of the first block with the same graphs.
    """

    layers: range
    specs: tuple[ParameterSpec, ...]
    buffers: Mapping[str, str]
    alike: int

    @property
    def trained(self) -> list[ParameterSpec]:
        """Rows of the parameters that train."""
        return [spec for spec in self.specs if spec.trains]


def cut_blocks(part: Partition) -> list[Block]:
    """Cut a part of one pipeline stage into blocks, in their order."""
    first = tuple(spec for spec in part.specs if spec.place in ("first", "ends"))
    last = tuple(spec for spec in part.specs if spec.place in ("last", "ends"))
    ends = {spec.name: spec.name for spec in (*first, *last)}
    if HEAD in ends and EMBEDDING in ends and whole_shape(part, HEAD) == whole_shape(part, EMBEDDING):
        ends[HEAD] = EMBEDDING  # they are never needed at the same time
    layers = [tuple(spec for spec in part.specs if spec.place == number) for number in part.layers]
    kinds: dict[tuple, int] = {}
    blocks = [Block(range(0), first, _chosen(ends, first), 0)]
    for number, specs in enumerate(layers):
        kind = tuple((_own_name(spec), whole_shape(part, spec.name), spec.trains) for spec in specs)
        example = kinds.setdefault(kind, number)
        names = {spec.name: like.name for spec, like in zip(specs, layers[example], strict=True)}
        is_last = number == len(layers) - 1
        held = (*specs, *last) if is_last else specs
        alike = len(blocks) if is_last else example + 1
        own = part.layers[number]
        blocks.append(Block(range(own, own + 1), held, {**names, **(_chosen(ends, last) if is_last else {})}, alike))
    return blocks


def buffer_shapes(part: Partition, trained: bool = False) -> dict[str, Shape]:
    """Compute the shape of each buffer by name; of those of gradients, if `trained`."""
    rows = ((block, spec) for block in cut_blocks(part) for spec in (block.trained if trained else block.specs))
    return {block.buffers[spec.name]: whole_shape(part, spec.name) for block, spec in rows}


def whole_shape(part: Partition, name: str) -> Shape:
    """Compute the shape of a parameter in the layout in which graphs compute."""
    return (part.gathered or part.layout).shape(part.rank, name)


def kept_slices(part: Partition, name: str) -> Slices:
    """Compute the slices of a buffer that this rank keeps."""
    kept, whole = (box_of(layout.slices(part.rank, name)) for layout in (part.layout, part.gathered))
    return inside(kept, whole)


def _chosen(names: Mapping[str, str], specs: tuple[ParameterSpec, ...]) -> dict[str, str]:
    return {spec.name: names[spec.name] for spec in specs}


def _own_name(spec: ParameterSpec) -> str:
    """Name of a layer's parameter without the layer's number."""
    return spec.name.replace(f".{spec.place}.", ".", 1)
