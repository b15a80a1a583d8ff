"""Communication of a rank whose job has no other processes, for dry runs.

Results have the shapes and dtypes of the job, and numbers without a meaning: the other ranks seem to hold the values of
this one, and send zeros. Sums in graphs are the job's own with a library; over sockets they are this rank's terms.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.point_to_point import Messages, Peers


class AbsentPeers:
    """Peers (`point_to_point.Peers`) that take all messages and send zeros."""

    def send(self, array: np.ndarray, to: int) -> None:
        """Drop a message."""

    def receive(self, into: np.ndarray, source: int) -> np.ndarray:
        into[...] = 0
        return into

    def exchange(self, outgoing: Messages, incoming: Messages) -> None:
        for source, arrays in incoming.items():
            for array in arrays:
                self.receive(array, source)


class AloneCollectives(Collectives):
    """Collective operations of one rank of a job whose other ranks are not there.

    Broadcasts return the value of this rank, whose form need not be that of the root's.
    """

    def all_gather(self, array: np.ndarray, group: Sequence[int] | None = None) -> np.ndarray:
        return np.stack([array] * len(self._ranks(group)))

    def all_gather_object(self, value: Any, group: Sequence[int] | None = None) -> list[Any]:
        return [value] * len(self._ranks(group))

    def broadcast_object(self, value: Any, root: int, group: Sequence[int] | None = None) -> Any:
        return value

    def peers(self) -> Peers:
        return AbsentPeers()
