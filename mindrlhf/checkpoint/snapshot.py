"""Arrays of a checkpoint while a thread writes them alongside the training."""

import threading
from collections.abc import Iterator, Mapping

import numpy as np

from mindrlhf.checkpoint.training_state import ShardGroup


class Snapshot:
    """Arrays of a rank, read in place until `settle`, and from copies after it.

    The thread that writes calls `take`, the thread that changes the arrays calls `settle`. An array is released once it
    is written.
    """

    def __init__(self, groups: Mapping[str, ShardGroup]):
        self._arrays = {kind: [_Held(array) for array in group.shards.values()] for kind, group in groups.items()}

    def take(self, kind: str) -> Iterator[np.ndarray]:
        """Yield the arrays of a kind in order.

        Each array stays unchanged until the next one is requested. A reader that stops early has to close the iterator:
        `settle` waits for that.
        """
        for held in self._arrays[kind]:
            with held.lock:
                yield held.array
                held.array = None

    def settle(self) -> None:
        """Copy the arrays that are not written yet; all may change when this returns.

        It copies from the end, while the writer continues from the beginning, and waits for the array where they meet.
        """
        for arrays in reversed(self._arrays.values()):
            for held in reversed(arrays):
                with held.lock:
                    if held.array is not None:
                        held.array = held.array.copy()


class _Held:
    """Array of a snapshot, None once it is written.

    lock: held while it is read or copied.
    """

    def __init__(self, array: np.ndarray):
        self.array: np.ndarray | None = array
        self.lock = threading.Lock()
