"""Things of given sizes, one after the other, in groups of limited size. Pure Python."""

from collections.abc import Sequence


def buckets(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive indices grouped so that the sizes of a group add up to at most `limit`, or the group is one index."""
    groups: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += size
    return tuple(tuple(group) for group in groups)
