"""Ends of the processes that functions begin, in whatever group or session.

On Linux an orphan comes to the nearest ancestor that adopts. A worker adopts, and ends its children with itself. Its
owner looks for the worker's mark in the environments of all processes, which finds the orphans of a worker that has
been killed. Other systems have neither: there, a worker's process group is ended.
"""

import os
import signal
import sys
import time
from collections.abc import Container, Iterator
from contextlib import suppress

from mindrlhf.workers.system_calls import SET_SUBREAPER, prctl

MARK = "MINDRLHF_WORKER"  # variable with a worker's mark
PROCESSES = "/proc"
KILL_TIMEOUT_S = 10.0  # the kernel may hold one longer, in a device for example
LOOK_S = 0.01  # between looks at processes that have been killed


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    with suppress(OSError):
        prctl(SET_SUBREAPER, 1)


def children() -> list[int]:
    """List this process's children, also those that have ended but are not waited for."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"{PROCESSES}/self/task"):
            with open(f"{PROCESSES}/self/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # a kernel without these files
        return [number for number, parent in _parents() if parent == os.getpid()]
    return found


def end_children(keep: Container[int] = ()) -> bool:
    """Kill this process's children, except those to keep; True while some are left.

    It never blocks, and waits for the dead. Children of the killed ones come to this process if it adopts: call it
    until nothing is left.
    """
    others = [number for number in children() if number not in keep]
    for number in others:
        kill(number)
        with suppress(ChildProcessError):
            os.waitpid(number, os.WNOHANG)
    return bool(others)


def collect_dead(most: int) -> None:
    """Wait for children that have been dead for longest.

    most: number of the dead that may be left, because functions may still wait for their own. The others are orphans
    that this process has adopted.
    """
    if sys.platform == "linux" and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        dead = [one for one in children() if os.waitid(os.P_PID, one, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        for number in dead[: max(0, len(dead) - most)]:
            os.waitpid(number, os.WNOHANG)


def end_all_children(most_s: float) -> None:
    """End this process's children and what they leave behind.

    most_s: seconds, after which it gives up, if the kernel does not let one go.
    """
    until = time.monotonic() + most_s
    while end_children() and time.monotonic() < until:
        time.sleep(LOOK_S)


def end_marked(mark: str, name: str = MARK) -> None:
    """Kill the processes with a mark in their environment, and their descendants.

    They are stopped first, so that none of them begins another while it is looked for. Their end is
    waited for, up to `KILL_TIMEOUT_S`. name: variable of the mark.
    """
    until = time.monotonic() + KILL_TIMEOUT_S
    stopped: set[int] = set()
    while found := _marked(f"{name}={mark}".encode(), stopped) - stopped:
        for number in found:
            with suppress(OSError):
                os.kill(number, signal.SIGSTOP)
        stopped |= found
    for number in stopped:
        kill(number)
    while any(map(_runs, stopped)) and time.monotonic() < until:
        time.sleep(LOOK_S)


def kill(number: int) -> None:
    """Kill a process and the group that it leads, if they are there."""
    for end in (os.killpg, os.kill):
        with suppress(OSError):
            end(number, signal.SIGKILL)


def _marked(mark: bytes, known: Container[int]) -> set[int]:
    parents = dict(_parents())
    marked = {number for number in parents if number in known or mark in _environment(number)}
    size = -1
    while size != len(marked):
        size = len(marked)
        marked |= {number for number, parent in parents.items() if parent in marked}
    return marked - {os.getpid()}


def _parents() -> Iterator[tuple[int, int]]:
    """Yield each process of this machine with its parent; none outside of Linux."""
    for name in os.listdir(PROCESSES) if os.path.isdir(PROCESSES) else ():
        if name.isdigit():
            with suppress(OSError):
                yield int(name), int(_state(int(name))[1])


def _runs(number: int) -> bool:
    """Tell whether a process has not ended; one that waits for its parent has."""
    try:
        return _state(number)[0] not in (b"Z", b"X")
    except OSError:
        return False


def _state(number: int) -> list[bytes]:
    """Read a process's state, its parent, and more; OSError without it."""
    with open(f"{PROCESSES}/{number}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _environment(number: int) -> list[bytes]:
    try:
        with open(f"{PROCESSES}/{number}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
