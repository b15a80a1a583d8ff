"""Scheduler of a job on CPU.

It introduces the ranks to each other, and notices one that fails or stands still.

`msrun` starts one scheduler process and gives every worker its address (MS_SCHED_HOST, MS_SCHED_PORT). The scheduler
waits for all workers, numbers them, and gives each one the addresses and secrets of all. Each worker then keeps its
connection and says every second which phase it is in (`comm.membership`); the scheduler answers with the phases of all.
A connection that closes without a farewell is a rank that is gone; one that stays silent is a rank that stands still
(stopped, swapping, or on a host that froze). The scheduler tells all ranks, and each ends with one sentence.

Messages are lines of JSON. Whoever sends anything else, or too much, is disconnected. MindSpore's own scheduler and
ports, which a stranger's bytes can block, are not used. Does not import MindSpore.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from mindrlhf.backend.comm.connection import keep_alive
from mindrlhf.backend.comm.tcp import Member
from mindrlhf.errors import UserError

FORMAT = "mindrlhf-2"
TICK_S = 1.0
HELLO_S = 5.0  # for a caller's first line
FAREWELL_S = 15.0  # after a failure, for the ranks to print their sentences
SILENCE_S = 30  # of a rank, after which the others are told, and again after each further time
LINE_BYTES = 1 << 14


@dataclass(eq=False)
class _Caller:
    """A connection of the scheduler.

    wanted, member: from its first line, None before. rank: None until all are there. phase: the last one that it named.
    told: number of times that the others were told of its silence.
    """

    connection: socket.socket
    came: float
    received: bytes = b""
    unsent: bytes = b""
    wanted: int | None = None
    member: Member | None = None
    rank: int | None = None
    phase: str = "start"
    silent_s: float = 0.0
    told: int = 0
    left: bool = False


@dataclass
class Scheduler:
    """Scheduler of `size` workers.

    start_limit_s: for all of them to come. silence_limit_s: a rank that says nothing for longer counts as failed.
    """

    size: int
    start_limit_s: float
    silence_limit_s: float
    _callers: dict[socket.socket, _Caller] = field(default_factory=dict)
    _ranks: list[_Caller] = field(default_factory=list)
    _failed_s: float | None = None  # since the first failure; None while all are well

    def serve(self, server: socket.socket) -> bool:
        """Serve until all workers have left.

        Returns False if one failed, or some never came.
        """
        server.setblocking(False)
        before = next_tick = time.monotonic()
        waited = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not self._finished():
                heard = self._receive(server, selector)
                now = time.monotonic()
                # If this process itself stood still, no rank is to blame: a round counts as two ticks at most.
                seconds = min(now - before, 2 * TICK_S)
                before = now
                waited += seconds
                self._count_silence(heard, seconds)
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._tick()
                if not self._ranks and waited > self.start_limit_s:
                    self._refuse_all()
                    return False
            return self._failed_s is None

    def _finished(self) -> bool:
        all_left = all(caller.left for caller in self._ranks)
        return bool(self._ranks) and (all_left or (self._failed_s or 0.0) > FAREWELL_S)

    def _greeted(self) -> list[_Caller]:
        return [caller for caller in self._callers.values() if caller.member]

    def _receive(self, server: socket.socket, selector: selectors.BaseSelector) -> set[_Caller]:
        """Take what has come within a tick; returns the callers that said something."""
        heard: set[_Caller] = set()
        for key, _ in selector.select(TICK_S):
            if key.fileobj is server:
                self._accept(server, selector)
                continue
            caller = self._callers[key.fileobj]
            if self._read(caller):
                heard.add(caller)
            else:
                self._drop(caller, selector)
        late = time.monotonic() - HELLO_S
        for caller in [one for one in self._callers.values() if one.member is None and one.came < late]:
            self._drop(caller, selector)
        return heard

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):  # it has hung up already, or this process has no file left until others hang up
            connection, _ = server.accept()
            connection.setblocking(False)
            keep_alive(connection)
            self._callers[connection] = _Caller(connection, time.monotonic())
            selector.register(connection, selectors.EVENT_READ)

    def _read(self, caller: _Caller) -> bool:
        """Take a caller's lines; returns False when its connection is to be closed."""
        try:
            content = caller.connection.recv(LINE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, caller.received = (caller.received + content).split(b"\n")
        try:
            for line in lines:
                self._take(caller, json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        return bool(content) and len(caller.received) < LINE_BYTES

    def _take(self, caller: _Caller, message: Mapping[str, Any]) -> None:
        if caller.member is None:
            self._greet(caller, message)
        elif "left" in message:
            caller.left = True
        else:
            caller.phase = str(message["phase"])[:100]

    def _greet(self, caller: _Caller, hello: Mapping[str, Any]) -> None:
        """Take a worker's first line.

        Raises ValueError, TypeError or KeyError if it is not one.
        """
        if hello["format"] != FORMAT:
            raise ValueError("another program")
        wanted = hello["rank"]
        size = int(hello["size"])
        member = hello["member"]
        host = member["host"]
        problem = self._objection(wanted if wanted is None else int(wanted), size)
        if problem:
            self._send(caller, {"refused": problem})
            return
        caller.wanted = wanted
        caller.member = Member(
            address=str(member["address"]),
            port=int(member["port"]),
            secret=str(member["secret"]),
            host=None if host is None else str(host),
        )
        if len(self._greeted()) == self.size:
            self._introduce()

    def _objection(self, wanted: int | None, size: int) -> str | None:
        """Say why a worker does not belong to this job, if so."""
        if self._ranks or size != self.size:
            return f"it belongs to another job, of {self.size} workers: give each job a --master_port of its own"
        if wanted is None:
            return None
        if not 0 <= wanted < self.size:
            return f"rank {wanted} is not below the worker count {self.size}"
        if wanted in [caller.wanted for caller in self._greeted()]:
            return f"rank {wanted} is there already: give each host its own --node_rank, and each job a --master_port"
        return None

    def _introduce(self) -> None:
        """Give each worker its rank and all members.

        The order of addresses numbers those without a wish.
        """
        greeted = sorted(self._greeted(), key=lambda one: (one.member.address, one.member.port))
        taken = {one.wanted for one in greeted}
        free = iter(sorted(set(range(self.size)) - taken))
        for caller in greeted:
            caller.rank = next(free) if caller.wanted is None else caller.wanted
        self._ranks = sorted(greeted, key=lambda one: one.rank)
        members = [asdict(one.member) for one in self._ranks]
        for caller in self._ranks:
            self._send(caller, {"rank": caller.rank, "members": members})

    def _drop(self, caller: _Caller, selector: selectors.BaseSelector) -> None:
        selector.unregister(caller.connection)
        del self._callers[caller.connection]
        caller.connection.close()
        if caller.rank is not None and not caller.left:
            caller.left = True
            self._fail({"gone": caller.rank})

    def _count_silence(self, heard: set[_Caller], seconds: float) -> None:
        if self._failed_s is not None:
            self._failed_s += seconds
            return
        for caller in self._ranks:
            quiet = caller not in heard and not caller.left
            caller.silent_s = caller.silent_s + seconds if quiet else 0.0
            caller.told = min(caller.told, int(caller.silent_s / SILENCE_S))
            if caller.silent_s > self.silence_limit_s:
                self._fail({"silent": caller.rank, "seconds": caller.silent_s, "phase": caller.phase})
                return

    def _fail(self, reason: dict[str, Any]) -> None:
        """Tell all ranks of the first failure."""
        if self._failed_s is None:
            self._failed_s = 0.0
            self._send_all(reason)

    def _tick(self) -> None:
        """Tell each rank the phases of all, and of a silent rank."""
        message: dict[str, Any] = {"phases": [caller.phase for caller in self._ranks]}
        for caller in self._ranks:
            if int(caller.silent_s / SILENCE_S) > caller.told:
                caller.told += 1
                message["quiet"] = [caller.rank, round(caller.silent_s)]
        self._send_all(message, unless_behind=True)

    def _refuse_all(self) -> None:
        greeted = self._greeted()
        missing = sorted(set(range(self.size)) - {caller.wanted for caller in greeted})
        named = f"rank {', '.join(map(str, missing))}" if len(missing) == self.size - len(greeted) else "others"
        problem = (
            f"{named} of {self.size} did not come within {self.start_limit_s:g} s; see the logs of those, and whether "
            "each host was started and reaches this one; MS_TOPO_TIMEOUT sets the limit"
        )
        for caller in greeted:
            self._send(caller, {"refused": problem})

    def _send_all(self, message: dict[str, Any], unless_behind: bool = False) -> None:
        for caller in self._ranks:
            if not caller.left:
                self._send(caller, {} if unless_behind and caller.unsent else message)

    def _send(self, caller: _Caller, message: dict[str, Any]) -> None:
        """Send without waiting; the rest goes with the next message.

        An empty message adds nothing.
        """
        caller.unsent += json.dumps(message).encode() + b"\n" if message else b""
        with suppress(OSError):  # one that is gone is noticed by reading
            caller.unsent = caller.unsent[caller.connection.send(caller.unsent) :]


def run_scheduler(size: int, silence_limit_s: float, start_limit_s: float) -> bool:
    """Be the job's scheduler, at the address that msrun gave.

    Returns False if the job failed. Raises UserError if the port is in use.
    """
    host, port = scheduler_address()
    try:
        server = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"the scheduler cannot listen on {host}:{port} ({error.strerror}): another job may use this port; choose "
            "another one with msrun's --master_port"
        ) from error
    with server:
        return Scheduler(size, start_limit_s, silence_limit_s).serve(server)


def scheduler_address() -> tuple[str, int]:
    """Return host and port of msrun's scheduler."""
    return os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
