"""Owner's side of one reward process: start, calls, non-blocking replies, end."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

import mindrlhf
from mindrlhf.rewards.worker import FLOAT32_MAX

START_TIMEOUT_S = 60.0  # for importing the functions' modules
STOP_TIMEOUT_S = 1.0
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 28  # of one reply; more is not read into the memory of the training
# The modules of this process are found there too, and those of the working directory, as for a script in it.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from mindrlhf.rewards.worker import main; main()"

Sample = tuple[str, str, Mapping[str, str]]


class Call(NamedTuple):
    """Function and sample of a call, both as indices."""

    function: int
    sample: int


@dataclass(frozen=True)
class Reply:
    """Outcome of a call.

    score: finite, or None for an abstention or failure. seconds: wall time inside the function. error: reason of a
    failure. timed_out: it was the time limit.
    """

    score: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


class RewardProcess:
    """Process that runs `worker.main` in a fresh interpreter: a fork would inherit threads.

    It leads a process group, which Ctrl-C does not reach and which is ended as a whole.
    calls: its calls without a reply, in order; the first is under way. ready: its functions are imported.
    needs_ground_truth: for each function, if it fails for a row without one. refusal: sentence of the UserError for a
    function that cannot be resolved. exited: nothing more will come from it. repeated: because it answered a call
    twice, which says nothing against the call under way.
    """

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float):
        """Start the process. functions: (name, args) each. timeout_s: seconds for one call."""
        paths = [*(path or os.getcwd() for path in sys.path), str(Path(mindrlhf.__file__).parents[1]), os.getcwd()]
        command = [sys.executable, "-c", _BOOTSTRAP, *dict.fromkeys(paths)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the cores belong to the training
        # The worker closes stderr first of all, so it holds no more than a failing start.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(command, **pipes, start_new_session=True, env=environment)
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + START_TIMEOUT_S
        self._outbox, self._inbox = memoryview(b""), bytearray()
        self._answered = 0  # calls; a call's number is how many came before it
        self._functions = len(functions)
        self._stray = False  # it sent what is no reply to its call
        self.calls: deque[Call] = deque()
        self.needs_ground_truth: list[bool] = []
        self.refusal: str | None = None
        self.ready = self.exited = self.repeated = False
        self._post({"functions": functions, "timeout_s": timeout_s})

    @property
    def idle(self) -> bool:
        return self.ready and not self.calls

    def alive(self) -> bool:
        """Test that the process runs; output of an idle one is its end."""
        if self.idle:
            self.collect()
        return not self.exited and self._process.poll() is None

    def assign(self, calls: Sequence[Call], samples: Sequence[Sample]) -> None:
        """Hand out calls; the process must be idle."""
        self.calls.extend(calls)
        self._deadline = time.monotonic() + self._timeout_s
        numbered = enumerate(calls, self._answered)
        self._post([(number, function, *samples[sample]) for number, (function, sample) in numbered])

    def collect(self) -> list[tuple[Call, Reply]]:
        """Move data through the pipes; returns the calls answered since."""
        self._write()
        answered = []
        with suppress(BlockingIOError):
            received = os.read(self._process.stdout.fileno(), READ_BYTES)
            self.exited = self.exited or not received
            try:
                for line in self._lines(received):
                    answered += self._receive(orjson.loads(line))
                    self._deadline = time.monotonic() + self._timeout_s
            except ValueError:
                self._stray = self.exited = True
        return answered

    def _lines(self, received: bytes) -> list[bytes]:
        """Split complete lines off `received`, in linear time; an incomplete line waits."""
        self._inbox.extend(received)
        if b"\n" not in received:
            if len(self._inbox) > MAX_LINE_BYTES:
                raise ValueError
            return []
        *lines, rest = bytes(self._inbox).split(b"\n")
        self._inbox = bytearray(rest)
        return lines

    def _receive(self, message: Any) -> list[tuple[Call, Reply]]:
        """Take the first message, or the reply under way; ValueError for others."""
        match message:
            case {"error": str(sentence)} if not self.ready:
                self.refusal, self.exited = sentence, True
                return []
            case {"needs_ground_truth": [*needs]} if not self.ready and len(needs) == self._functions:
                self.needs_ground_truth, self.ready = [bool(needed) for needed in needs], True
                return []
            case [int(number), float() | None as score, dict(components), float(seconds), str() | None as error]:
                self.repeated = 0 <= number < self._answered
                values = [score or 0.0, seconds, *components.values()]
                finite = all(type(value) is float and abs(value) <= FLOAT32_MAX for value in values)
                if finite and self.calls and number == self._answered:
                    self._answered += 1
                    return [(self.calls.popleft(), Reply(score, components, seconds, error))]
        raise ValueError

    def loss(self) -> Reply | None:
        """Make the reply that a hanging or dead process owes; None otherwise."""
        if self.exited:
            return Reply(error=self._end_reason())
        if self.idle or time.monotonic() < self._deadline:
            return None
        if not self.ready:
            return Reply(error=f"importing them takes longer than {START_TIMEOUT_S:g} s")
        return Reply(error=f"it took longer than {self._timeout_s:g} s", seconds=self._timeout_s, timed_out=True)

    def _end_reason(self) -> str:
        if self.refusal or self._stray:
            return self.refusal or "its process sent what is no answer"
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its process stopped answering"
        if code < 0:
            return f"its process died of signal {-code} ({signal.strsignal(-code)})"
        last = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process ended with exit code {code}" + (f" ({last})" if last else "")

    def stop(self) -> None:
        """End the process and its children, at once if it is busy."""
        self._process.stdin.close()
        self._process.stdout.close()
        if self.idle:  # the end of its input lets it leave by itself
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stderr.close()
        self.exited = True

    def _post(self, message: Any) -> None:
        self._outbox = memoryview(json.dumps(message, separators=(",", ":"), default=dict).encode() + b"\n")
        self._write()

    def _write(self) -> None:
        try:
            while self._outbox and not self.exited:
                self._outbox = self._outbox[os.write(self._process.stdin.fileno(), self._outbox) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.exited = True


def wait(processes: Iterable[RewardProcess]) -> None:
    """Sleep until a process, not all idle, answers, accepts input, or is overdue."""
    processes, poll = list(processes), select.poll()
    for process in processes:
        poll.register(process._process.stdout, select.POLLIN)
        if process._outbox:
            poll.register(process._process.stdin, select.POLLOUT)
    deadline = min(process._deadline for process in processes if not process.idle)
    poll.poll(max(0.0, 1000.0 * (deadline - time.monotonic())))
