"""Buckets of consecutive items with a bounded total size. Pure Python."""

from collections.abc import Sequence


def buckets(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Group consecutive indices into buckets of at most `limit`, or one item."""
    groups: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += size
    return tuple(tuple(group) for group in groups)
