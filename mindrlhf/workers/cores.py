"""Cores of this machine. Imports only the standard library."""

import os
import sys


def usable_cores() -> frozenset[int]:
    """List the cores that this process may use; outside of Linux, all of them."""
    if sys.platform != "linux":
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))
