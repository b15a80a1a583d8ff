"""Connection of a rank to its job's scheduler.

Ranks meet through the scheduler (`comm.scheduler`), and learn from it that another one fails. Does not import
MindSpore.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mindrlhf.backend.comm.connection import keep_alive
from mindrlhf.backend.comm.point_to_point import PeerGone, PeerSilent
from mindrlhf.backend.comm.scheduler import FORMAT, HELLO_S, TICK_S, scheduler_address
from mindrlhf.backend.comm.tcp import Channels, Member, connect_channels
from mindrlhf.errors import UserError

REPLY_BYTES = 1 << 26  # of a line of the scheduler, which grows with the number of ranks
RETRY_S = 0.1


class Membership:
    """Connection of one rank to the scheduler.

    phase: what this rank does now, for other ranks' sentences. silence_limit_s: a scheduler that says nothing for
    longer counts as failed.
    """

    def __init__(self, lines: "Lines", rank: int, silence_limit_s: float):
        self._lines = lines
        self._rank = rank
        self._limit_s = silence_limit_s
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self.phase = "start"

    def watch(self, end: Callable[[BaseException], None]) -> None:
        """Keep in touch from a thread.

        It calls `end(error)` when another rank or the scheduler fails.
        """
        self._thread = threading.Thread(target=self._keep_in_touch, args=(end,), name="membership", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say farewell: from now on the end of this process is no failure."""
        self._left.set()
        if self._thread:
            self._thread.join(2 * TICK_S)
        with suppress(OSError):
            self._lines.send({"left": True})
        self._lines.connection.close()

    def _keep_in_touch(self, end: Callable[[BaseException], None]) -> None:
        before = next_tick = time.monotonic()
        silent_s = 0.0
        while not self._left.is_set():
            messages = []
            try:
                if before >= next_tick:
                    next_tick = before + TICK_S
                    self._lines.send({"phase": self.phase})
                messages = self._lines.receive(max(0.01, next_tick - before))
            except TimeoutError:
                pass
            except (OSError, ValueError):
                messages = [{"gone": "msrun's scheduler"}]
            now = time.monotonic()
            silent_s = 0.0 if messages else silent_s + min(now - before, 2 * TICK_S)
            before = now
            if silent_s > self._limit_s:
                messages = [{"silent": "msrun's scheduler", "seconds": silent_s, "phase": "watch"}]
            error = next(filter(None, map(self._understand, messages)), None)
            if error and not self._left.is_set():
                end(error)
                return

    def _understand(self, message: Mapping[str, Any]) -> BaseException | None:
        """Return the error of a message that tells of a failure."""
        if "gone" in message:
            return PeerGone(message["gone"])
        if "silent" in message:
            return PeerSilent(message["silent"], message["phase"], message["seconds"], self.phase)
        if "quiet" in message and self._rank == 0:
            rank, seconds = message["quiet"]
            phase = message["phases"][rank]
            print(f"rank {rank} has said nothing for {seconds} s, in the phase {phase}: waiting", flush=True)
        return None


class Lines:
    """Lines of JSON over a connection."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._rest = b""
        self.pending: list[dict[str, Any]] = []  # received, and not yet understood

    def send(self, message: Mapping[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for content; returns the whole messages in it.

        Raises TimeoutError, ConnectionError at the end, and ValueError for anything but messages.
        """
        if self.pending:
            messages, self.pending = self.pending, []
            return messages
        self.connection.settimeout(timeout_s)
        content = self.connection.recv(1 << 16)
        if not content:
            raise ConnectionError("it has hung up")
        *lines, self._rest = (self._rest + content).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if len(self._rest) > REPLY_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ValueError("it sends something else")
        return messages


def join(
    size: int, rank: int | None, host: str | None, *, start_limit_s: float, silence_limit_s: float
) -> tuple[int, list[Member], Channels, Membership]:
    """Meet the other workers.

    Returns this one's rank, all members in order, and its connections. rank: None if the scheduler is to choose it.
    host: name of this host (`shared_memory.host`). Raises UserError if not all workers come within `start_limit_s`, or
    the scheduler's address is not this job's.
    """
    deadline = time.monotonic() + start_limit_s
    with socket.create_server((_own_address(), 0), backlog=1024) as server:
        address, port = server.getsockname()[:2]
        member = Member(address, port, secrets.token_hex(16), host)
        connection = _call_scheduler(deadline, size, start_limit_s)
        hello = {"format": FORMAT, "size": size, "rank": rank, "member": asdict(member)}
        # The scheduler gives up by itself, and says who is missing: this rank waits a little longer.
        patience_s = max(0.0, deadline - time.monotonic()) + HELLO_S
        try:
            lines = Lines(connection)
            answer = _first_answer(lines, hello, patience_s)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(_absent(size, start_limit_s, f"the scheduler gives no answer: {error}")) from error
        if "refused" in answer:
            raise UserError(f"{_own_name()} cannot join the job: {answer['refused']}")
        members = [Member(**one) for one in answer["members"]]
        channels = connect_channels(answer["rank"], members, server)
    return answer["rank"], members, channels, Membership(lines, answer["rank"], silence_limit_s)


def _first_answer(lines: Lines, hello: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
    lines.send(hello)
    messages: list[dict[str, Any]] = []
    while not messages:
        messages = lines.receive(patience_s)
    answer, *lines.pending = messages
    return answer


def _call_scheduler(deadline: float, size: int, limit_s: float) -> socket.socket:
    """Connect to the scheduler, which may start later than this process."""
    while True:
        try:
            connection = socket.create_connection(scheduler_address(), timeout=HELLO_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(_absent(size, limit_s, f"the scheduler cannot be reached: {error}")) from error
            time.sleep(RETRY_S)
            continue
        keep_alive(connection)
        return connection


def _absent(size: int, limit_s: float, what: str) -> str:
    address, port = scheduler_address()
    return (
        f"the {size} workers did not meet within {limit_s:g} s ({_own_name()} is here; {what}): see the logs of the "
        f"others, whether each host was started, and whether it reaches {address}:{port}; MS_TOPO_TIMEOUT sets the "
        "limit"
    )


def _own_name() -> str:
    return f"worker {os.environ.get('RANK_ID', '')}".rstrip() + f" on {socket.gethostname()}"


def _own_address() -> str:
    """Find this host's address on the network of msrun's scheduler."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it finds the route and sends nothing
        probe.connect(scheduler_address())
        return probe.getsockname()[0]
