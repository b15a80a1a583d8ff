"""Check that every rank answers in time; names a rank that fails to."""

import threading
import time
from collections.abc import Callable

import numpy as np

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.errors import UserError


def roll_call(collectives: Collectives, give_up: Callable[[BaseException], None], limit_s: float) -> float:
    """Exchange a message between rank 0 and each other rank; returns this rank's seconds.

    give_up: called, from another thread, with a UserError when a rank has not answered for `limit_s`; it should end the
    process, because waiting for a message cannot be cancelled.
    """
    world, start = collectives.world, time.monotonic()
    if world.size == 1:
        return 0.0
    peers, word = collectives.peers(), np.zeros(1, np.int8)
    for other in range(1, world.size) if world.rank == 0 else (0,):
        if world.rank:
            peers.send(word, 0)
        trouble = UserError(
            f"rank {other} of {world.size} did not answer rank {world.rank} within {limit_s:g} s: see that rank's log, "
            "and whether its host is reachable from here."
        )
        timer = threading.Timer(limit_s, give_up, (trouble,))
        timer.daemon = True
        timer.start()
        try:
            peers.receive(word, other)
        finally:
            timer.cancel()
    if world.rank == 0:
        for other in range(1, world.size):
            peers.send(word, other)
    return time.monotonic() - start
