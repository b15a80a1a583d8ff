"""Early ends of a run, agreed on by all ranks.

The reasons are a signal, msrun's end, or too much memory.
"""

from collections.abc import Callable

import numpy as np

from mindrlhf.checkpoint.finite import first_not_finite
from mindrlhf.checkpoint.training_state import ShardGroup
from mindrlhf.metrics.performance import resident_bytes
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.units import GIB


class Stopped(Exception):
    """Clean end of a run; the message says how to go on.

    Its state is saved.
    """


class Agreement:
    """Decisions that all ranks must take together although one has the reason.

    signals: this rank's. reduce_max: elementwise maximum over all ranks. alone: there is no other rank.
    memory_limit: GiB of this process; None is no limit.
    """

    def __init__(
        self,
        signals: StopSignals,
        reduce_max: Callable[[np.ndarray], np.ndarray],
        alone: bool,
        memory_limit: float | None = None,
    ):
        self._signals, self._reduce_max, self._limit = signals, reduce_max, memory_limit
        self._alone = alone

    def stop(self) -> bool:
        """Test that any rank is to stop; all ranks call it together."""
        return bool(self._reduce_max(np.array([self._signals.wanted], np.float32))[0])

    def stop_now(self) -> bool:
        """Test that this rank may leave a phase half-way.

        Other ranks would wait for it.
        """
        return self._alone and self._signals.wanted

    def first_not_finite(self, group: ShardGroup) -> str | None:
        """Name the first parameter with NaN or infinity on any rank, or None.

        All ranks call it as `stop`.
        """
        return first_not_finite(group.shards, group.layout.placements, self._reduce_max)

    def memory(self) -> float | None:
        """Memory of the largest process in GiB if above the limit, else None.

        All ranks call it at the same place.
        """
        if self._limit is None:
            return None
        used = float(self._reduce_max(np.array([resident_bytes() / GIB], np.float32))[0])
        return used if used > self._limit else None
