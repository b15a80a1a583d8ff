"""Load of the machine: processor time of this and of other processes, and memory."""

import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mindrlhf.backend.process.msrun import find_msrun

MIB = 1024**2


def busy_seconds() -> float:
    """Return processor seconds of all processes on this machine so far; time stolen by a hypervisor counts too."""
    times = psutil.cpu_times()._asdict()
    return sum(times.values()) - sum(times.get(k, 0.0) for k in ("idle", "iowait", "guest", "guest_nice"))


def own_seconds() -> float:
    """Return processor seconds of this job: this process or msrun, its children, and its own ended children."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = dead.ru_utime + dead.ru_stime
    msrun = find_msrun()
    first = psutil.Process(msrun.pid if msrun else None)
    for process in [first, *first.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@dataclass(frozen=True)
class Moment:
    """A point in time: seconds on the clock, and processor seconds by `busy_seconds` and `own_seconds`."""

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.perf_counter(), busy_seconds(), own_seconds())

    def cores_since(self, start: "Moment") -> tuple[float, float]:
        """Return average (cores used by this process and its children, cores used by others) since `start`."""
        seconds = self.clock - start.clock
        own = self.own - start.own
        return own / seconds, max(0.0, self.busy - start.busy - own) / seconds


def peak_mib() -> tuple[float, float]:
    """Return peak resident memory, in MiB, of (this process, its living descendants)."""
    return _high_water(os.getpid()), sum(_high_water(process.pid) for process in _descendants())


def seconds_since_start() -> float:
    """Return the wall time since the operating system started this process."""
    return time.time() - psutil.Process().create_time()


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _high_water(pid: int) -> float:
    """Return peak memory by Linux's counter; elsewhere the memory resident now."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).memory_info().rss / MIB
    return 0.0
