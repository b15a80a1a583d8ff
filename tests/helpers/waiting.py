"""Waiting for what other processes do."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object]) -> None:
    """Return as soon as `holds` does; it is asked for 20 s at least, and has to hold then."""
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.02)
    assert holds()
