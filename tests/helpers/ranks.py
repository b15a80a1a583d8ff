"""Ranks as threads of this process, talking over real sockets: seconds cheaper than workers under msrun."""

import socket
import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any

from mindrlhf.backend.comm.tcp import SocketPeers

PATIENCE_S = 20


def run_threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """`function(rank)` on a thread for each rank. Returns the results by rank, or raises the error that came first."""
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"ranks still wait after {PATIENCE_S} s"
    return results


def run_ranks(size: int, function: Callable[[int, SocketPeers], Any], one_host: bool = False) -> list[Any]:
    """`function(rank, peers)` on a thread for each rank; its connections close when it returns, as a process's do.

    one_host: large messages go through memory.
    """
    channels, credits = ([{} for _ in range(size)] for _ in range(2))
    for kind in (channels, credits) if one_host else (channels,):
        for first, second in combinations(range(size), 2):
            kind[first][second], kind[second][first] = socket.socketpair()

    def run(rank):
        try:
            return function(rank, SocketPeers(channels[rank], credits[rank]))
        finally:
            for connection in (*channels[rank].values(), *credits[rank].values()):
                connection.close()

    return run_threads(size, run)
