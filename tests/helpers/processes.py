"""Ranks as processes that know each other by sockets, without MindSpore: a second where workers under msrun take ten.

`run_processes(3, __file__, "check", n=5)` calls `check(world, n=5)` of that file on three ranks, which have
`SocketCollectives` in place of MindSpore's. This file is also the script that the ranks run.
"""

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.backend.comm.point_to_point import Peers
from mindrlhf.backend.comm.tcp import SocketPeers
from mindrlhf.backend.process.launch import World

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60


class SocketCollectives:
    """What a test needs of `Collectives`, over `peers`, which is one for the process."""

    peers: Peers

    def __init__(self, world: World):
        self.world = world

    def all_gather_object(self, value: Any, group: Sequence[int]) -> list[Any]:
        """Messages of 1,000 bytes, between all pairs."""
        message = np.frombuffer(pickle.dumps(value).ljust(1000, b"\0"), np.uint8)
        others = [rank for rank in group if rank != self.world.rank]
        for other in others:
            self.peers.send(message, other)
        found = {other: self.peers.receive(np.empty(1000, np.uint8), other).tobytes() for other in others}
        return [value if rank == self.world.rank else pickle.loads(found[rank]) for rank in group]


def run_processes(size: int, file: str, function: str, **arguments: Any) -> list[tuple[int, Any]]:
    """Each rank's (exit code, what `function(world, **arguments)` returned), None for one that did not."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for first, second in combinations(range(size), 2):
        sockets[first][second], sockets[second][first] = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder:
        running, results = [], [Path(folder, f"{rank}") for rank in range(size)]
        for rank, own in enumerate(sockets):
            files = {other: connection.fileno() for other, connection in own.items()}
            task = pickle.dumps(
                (World(rank, size, "CPU", (0,) * size), files, file, function, arguments, results[rank])
            )
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, task.hex()]
            running.append(subprocess.Popen(command, env=environment, pass_fds=files.values()))
        for own in sockets:
            for connection in own.values():
                connection.close()
        codes = [process.wait(PATIENCE_S) for process in running]
        values = [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]
        return list(zip(codes, values, strict=True))


def _run(task: bytes) -> None:
    world, files, file, function, arguments, result = pickle.loads(task)
    SocketCollectives.peers = SocketPeers({other: socket.socket(fileno=number) for other, number in files.items()})
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = getattr(module, function)(world, **arguments)
    result.write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    _run(bytes.fromhex(sys.argv[1]))
