"""What the machine did meanwhile: processor time of this and of other processes, and memory."""

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
    """Processor seconds that everything on this machine has used so far; time stolen by a hypervisor counts too."""
    times = psutil.cpu_times()._asdict()
    return sum(times.values()) - sum(times.get(k, 0.0) for k in ("idle", "iowait", "guest", "guest_nice"))


def own_seconds() -> float:
    """Of this job's processes: this one or msrun, what it has started, and the dead that this one has waited for."""
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
    """A point in time: seconds on the clock, and processor seconds as above."""

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.perf_counter(), busy_seconds(), own_seconds())

    def cores_since(self, start: "Moment") -> tuple[float, float]:
        """(cores that this process and its children used, cores that others used) on average since `start`."""
        seconds = self.clock - start.clock
        own = self.own - start.own
        return own / seconds, max(0.0, self.busy - start.busy - own) / seconds


def peak_mib() -> tuple[float, float]:
    """(of this process, of the processes that it has started and that live), the most that was ever resident."""
    return _high_water(os.getpid()), sum(_high_water(process.pid) for process in _descendants())


def seconds_since_start() -> float:
    """Wall time since the operating system started this process."""
    return time.time() - psutil.Process().create_time()


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _high_water(pid: int) -> float:
    """Linux's own counter; elsewhere what is resident now."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).memory_info().rss / MIB
    return 0.0
