"""The data-parallel axis in training: splitting a step's items and reducing results."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.errors import UserError


class DataParallel:
    """One rank's place among `group`, the global ranks along the data-parallel axis."""

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        self._collectives = collectives
        self._group = tuple(group)
        self.size = len(self._group)
        self.rank = self._group.index(collectives.world.rank)

    def share(self, items: Sequence) -> list:
        """Select this rank's contiguous block of a step's items, equal on all ranks."""
        count, rest = divmod(len(items), self.size)
        if rest:
            raise UserError(f"a step has {len(items)} groups, which {self.size} data-parallel workers do not divide.")
        return list(items[self.rank * count : (self.rank + 1) * count])

    def united(self, own: Sequence) -> list:
        """Collect all ranks' picklable items in order, which undoes `share`."""
        return [item for part in self.gather(own) for item in part]

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Sum over the axis, the same bits on each rank."""
        return self._collectives.all_reduce_sum(array, self._group)

    def gather(self, value: Any) -> list[Any]:
        """Collect every rank's picklable value, in rank order."""
        return self._collectives.all_gather_object(value, self._group)
