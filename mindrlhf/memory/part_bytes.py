"""Bytes of a rank's part of a model: its numbers, and its optimizer's."""

from collections.abc import Iterable, Mapping
from math import prod

from mindrlhf.backend.native.packing import row_words
from mindrlhf.memory.residency import BLOCK_NUMBERS
from mindrlhf.model_roles import POLICY_GROUPS
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.optimizer_state import State, moment_bytes
from mindrlhf.parallel.blocks import buffer_shapes, cut_blocks
from mindrlhf.parallel.buckets import buckets
from mindrlhf.parallel.layout import Shape
from mindrlhf.parallel.partition import Partition
from mindrlhf.units import FLOAT32


def numbers_bytes(part: Partition, specs: Iterable[ParameterSpec]) -> int:
    """Compute the bytes of some rows of the parameter table on a rank."""
    return sum(prod(part.shape(spec)) for spec in specs) * FLOAT32


def gathered_bytes(part: Partition, trained: bool = False) -> dict[tuple[str, Shape], int]:
    """Compute the bytes of each buffer of gathered weights, or of gradients.

    They are by name and shape; none on a rank that keeps its part whole.
    """
    shapes = buffer_shapes(part, trained) if part.gathered else {}
    return {(name, shape): prod(shape) * FLOAT32 for name, shape in shapes.items()}


def gradient_bytes(part: Partition) -> int:
    """Compute the bytes of a part's gradients, with buffers that are summed over ranks."""
    return numbers_bytes(part, part.trained) + sum(gathered_bytes(part, trained=True).values())


def graph_layers(part: Partition) -> int:
    """Count layers with graphs of their own; blocks that are alike have one."""
    return len({block.alike for block in cut_blocks(part)[1:]}) if part.gathered else len(part.layers)


def optimizer_bytes(part: Partition, in_blocks: bool, state: State) -> tuple[int, list[int]]:
    """Compute bytes of separately updated rows, and of each block of moments.

    state: see `optimizer.state`.
    """
    sizes = [prod(part.shape(spec)) for spec in part.trained]
    shapes = [part.optimizer_layout.shape(part.rank, spec.name) for spec in part.trained]
    apart = sum(prod(shape) for shape, size in zip(shapes, sizes, strict=True) if prod(shape) < size)
    blocks = buckets(sizes, BLOCK_NUMBERS if in_blocks else sum(sizes))
    return apart * FLOAT32, [2 * sum(moment_bytes(state, shapes[index]) for index in block) for block in blocks]


def policy_bytes(
    train: Partition | None, infer: Partition | None, apart: int, packed: Mapping[bool, int]
) -> dict[str, list[int]]:
    """Compute the bytes of the policy's parameters in both layouts, by role.

    train, infer: None on a rank without the layout. apart: bytes of separately updated rows. packed: bytes of packed
    weights, by whether they train.
    """
    roles = {}
    kept_apart = {True: apart, False: 0}
    for trains, (shared, training, generating) in POLICY_GROUPS.items():
        mine, theirs = (_rows(part, trains) for part in (train, infer))
        both = numbers_bytes(train, [spec for spec in theirs if train and train.slices(spec) == infer.slices(spec)])
        roles |= {shared: [both], training: [numbers_bytes(train, mine) - both + kept_apart[trains]]}
        roles |= {generating: [numbers_bytes(infer, theirs) - both + packed[trains]]}
    return roles


def _rows(part: Partition | None, trains: bool) -> list[ParameterSpec]:
    return [spec for spec in part.specs if spec.trains == trains] if part else []


def packed_bytes(infer: Partition | None, specs: Iterable[ParameterSpec], weights: str) -> dict[bool, int]:
    """Compute the bytes of packed weights on a rank, by whether they train.

    specs: rows of the weights. weights: `rollout.weights`.
    """
    total = {True: 0, False: 0}
    for spec in specs if infer else ():
        *stack, inputs = infer.shape(spec)
        outputs = prod(stack)
        if spec.kind != "matrix":
            outputs = infer.model.vocab_size // infer.mesh.tp
        total[spec.trains] += outputs * row_words(weights, inputs) * FLOAT32
    return total
