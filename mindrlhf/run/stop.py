"""Why a run ends before its last step: a signal, msrun's end, too much memory; agreed on by all ranks."""

from collections.abc import Callable

import numpy as np

from mindrlhf.checkpoint.finite import first_not_finite
from mindrlhf.checkpoint.training_state import ShardGroup
from mindrlhf.metrics.performance import resident_bytes
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.units import GIB


class Stopped(Exception):
    """The run ends here, in good order: its state is saved, and the message says how to go on."""


class Agreement:
    """What all ranks do together although one alone has seen the reason.

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
        """Whether any rank is to stop; called by all ranks at the same place."""
        return bool(self._reduce_max(np.array([self._signals.wanted], np.float32))[0])

    def stop_now(self) -> bool:
        """Whether this rank may leave a phase half-way, which others would wait for."""
        return self._alone and self._signals.wanted

    def first_not_finite(self, group: ShardGroup) -> str | None:
        """Name of the first parameter with NaN or infinity on any rank, else None; called by all ranks as `stop`."""
        return first_not_finite(group.shards, group.layout.placements, self._reduce_max)

    def memory(self) -> float | None:
        """GiB of the largest process when it is above the limit, else None; called by all ranks at the same place."""
        if self._limit is None:
            return None
        used = float(self._reduce_max(np.array([resident_bytes() / GIB], np.float32))[0])
        return used if used > self._limit else None
