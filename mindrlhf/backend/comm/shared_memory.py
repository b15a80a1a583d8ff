"""Shared memory of one host's ranks, for sums in compiled graphs (`native/shared_sum.h`).

The memory has no name in any file system: the first rank of a group creates it, the others open it as a file of that
process, and it is freed when the last of them has ended for any reason. Linux only. Does not import MindSpore.
"""

import ctypes
import functools
import os
from pathlib import Path

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.native import library


def host() -> str | None:
    """Name this process's host; None if unknown.

    Processes with equal names can share memory. The name is the boot id with the process and network namespaces: two
    network namespaces of one machine count as two hosts.
    """
    try:
        spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net")]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {spaces}"
    except OSError:
        return None


@functools.cache
def share_memory(world, group: tuple[int, ...]) -> bool:
    """Set up a group's shared memory for sums, once.

    All ranks of the group call it together. Returns False on all of them if they are on several hosts
    (`launch.World.hosts`), the C++ operators could not be built, or the system refuses.
    """
    if not world.hosts or len({world.hosts[rank] for rank in group}) > 1:
        return False
    collectives = Collectives(world)
    path = library().path
    native = ctypes.CDLL(str(path)) if path else None
    file = _new_file(native, len(group)) if path and world.rank == group[0] else None
    told = collectives.all_gather_object((path, os.getpid(), file), group)
    same_library = len({one[0] for one in told}) == 1
    _, process, first_file = told[0]
    joined = same_library and first_file is not None and _join(native, group, world.rank, process, first_file)
    all_joined = all(collectives.all_gather_object(joined, group))
    if file is not None:
        os.close(file)
    return all_joined


def _new_file(native: ctypes.CDLL, size: int) -> int | None:
    """Make a file in memory for `size` ranks; None if the system refuses."""
    native.shared_group_bytes.restype = ctypes.c_int64
    file = None
    try:
        file = os.memfd_create("mindrlhf")
        os.posix_fallocate(file, 0, native.shared_group_bytes(size))
    except OSError:
        if file is not None:
            os.close(file)
        return None
    return file


def _join(native: ctypes.CDLL, group: tuple[int, ...], rank: int, process: int, file: int) -> bool:
    """Map a file of another process, or of this one."""
    try:
        own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    ranks = (ctypes.c_int32 * len(group))(*group)
    problem = native.join_shared_group(ranks, len(group), group.index(rank), own)
    os.close(own)
    return problem == 0
