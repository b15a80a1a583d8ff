"""Check that every rank answers in time; names a rank that fails to."""

import threading
import time
from collections.abc import Callable

import numpy as np

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.errors import UserError


def roll_call(collectives: Collectives, give_up: Callable[[BaseException], None], limit_s: float) -> float:
    """Exchange a message between the first rank and each other; returns this rank's seconds.

    give_up: called, from another thread, with a UserError when a rank has not answered for `limit_s`; it should end the
    process, because waiting for a message cannot be cancelled.
    """
    world = collectives.world
    start = time.monotonic()
    first, *others = collectives.ranks
    if not others:
        return 0.0
    peers = collectives.peers()
    word = np.zeros(1, np.int8)
    is_first = world.rank == first
    for other in others if is_first else (first,):
        if not is_first:
            peers.send(word, first)
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
    if is_first:
        for other in others:
            peers.send(word, other)
    return time.monotonic() - start
