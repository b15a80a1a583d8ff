"""Bytes of a rank's part of a model: its numbers, and its optimizer's."""

from collections.abc import Iterable
from math import prod

from mindrlhf.memory.residency import BLOCK_NUMBERS
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.parallel.buckets import buckets
from mindrlhf.parallel.partition import Partition
from mindrlhf.units import FLOAT32


def numbers_bytes(part: Partition, specs: Iterable[ParameterSpec]) -> int:
    """Compute the bytes of some rows of the parameter table on a rank."""
    return sum(prod(part.shape(spec)) for spec in specs) * FLOAT32


def optimizer_bytes(part: Partition, in_blocks: bool) -> tuple[int, list[int]]:
    """Compute bytes of separately updated rows, and of each block of moments."""
    sizes = [prod(part.shape(spec)) for spec in part.trained]
    updated = [prod(part.optimizer_layout.shape(part.rank, spec.name)) for spec in part.trained]
    apart = sum(own for own, size in zip(updated, sizes, strict=True) if own < size)
    blocks = buckets(sizes, BLOCK_NUMBERS if in_blocks else sum(sizes))
    return apart * FLOAT32, [2 * FLOAT32 * sum(updated[index] for index in block) for block in blocks]
