"""One reward process as its owner sees it: start, hand out calls, collect replies without blocking, end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, PollSelector
from typing import Any, NamedTuple

import mindrlhf
from mindrlhf.errors import UserError

START_TIMEOUT_S = 60.0  # for importing the functions' modules
STOP_TIMEOUT_S = 1.0
READ_BYTES = 1 << 16
# The modules of this process are found there too, and those of the working directory, as when a script lies in it.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from mindrlhf.rewards.worker import main; main()"

Sample = tuple[str, str, Mapping[str, str]]


class Call(NamedTuple):
    """Which function for which sample, both as indices."""

    function: int
    sample: int


@dataclass(frozen=True)
class Reply:
    """How a call ended.

    score: finite, or None for an abstention or a failure. seconds: of wall time inside the function.
    error: what went wrong, None when nothing did. timed_out: it was the time limit.
    """

    score: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


class RewardProcess:
    """A process that runs `worker.main`, in a fresh interpreter: this one may have threads, so it cannot be forked.

    It leads a process group of its own, which Ctrl-C does not reach and which is ended as a whole.

    calls: what it has been handed and not yet answered, in order; the first is under way.
    ready: its functions are imported. needs_ground_truth: which of them fail for a row without one.
    exited: nothing more will come from it; see `stop`.
    """

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float):
        """functions: (name, args) each. timeout_s: seconds for one call."""
        paths = [path or os.getcwd() for path in sys.path]
        paths += [str(Path(mindrlhf.__file__).parents[1]), os.getcwd()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *dict.fromkeys(paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # the worker closes it first of all, so it holds no more than a failing start
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # the cores belong to the training
        )
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + START_TIMEOUT_S
        self._outbox, self._inbox = memoryview(b""), b""
        self.calls: deque[Call] = deque()
        self.ready = False
        self.needs_ground_truth: list[bool] = []
        self.exited = False
        self._post({"functions": functions, "timeout_s": timeout_s})

    @property
    def idle(self) -> bool:
        return self.ready and not self.calls

    @property
    def overdue(self) -> bool:
        """The start or the call under way has taken longer than it may."""
        return not self.idle and time.monotonic() >= self._deadline

    def alive(self) -> bool:
        """False once it has ended, expected or not."""
        return not self.exited and self._process.poll() is None

    def assign(self, calls: Sequence[Call], samples: Sequence[Sample]) -> None:
        """Hand out calls; the process must be idle. Their texts travel once for each sample."""
        places = {sample: place for place, sample in enumerate(dict.fromkeys(call.sample for call in calls))}
        texts = [(samples[sample][0], samples[sample][1], dict(samples[sample][2])) for sample in places]
        self.calls.extend(calls)
        self._deadline = time.monotonic() + self._timeout_s
        self._post({"samples": texts, "calls": [(call.function, places[call.sample]) for call in calls]})

    def collect(self) -> list[tuple[Call, Reply]]:
        """Move what the pipes take and give; returns the calls that were answered since.

        An end of the process shows as `exited`. Raises UserError when a function cannot be resolved.
        """
        self._write()
        try:
            received = os.read(self._process.stdout.fileno(), READ_BYTES)
            self.exited = self.exited or not received
        except BlockingIOError:
            return []
        *lines, self._inbox = (self._inbox + received).split(b"\n")
        answered = []
        for line in lines:
            try:
                message = json.loads(line)
                reply = Reply(*message) if self.ready else None
            except (ValueError, TypeError):  # not from the worker: a function found the pipe
                self.exited = True
                break
            if reply:
                answered.append((self.calls.popleft(), reply))
            elif "error" in message:
                raise UserError(message["error"])
            else:
                self.needs_ground_truth = message["needs_ground_truth"]
            self.ready = True
            self._deadline = time.monotonic() + self._timeout_s
        return answered

    def end_reason(self) -> str:
        """Why nothing comes any more, for people."""
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its process stopped answering"
        if code < 0:
            return f"its process died of signal {-code} ({signal.strsignal(-code)})"
        last = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process ended with exit code {code}" + (f" ({last})" if last else "")

    def stop(self) -> None:
        """End the process with all that it has started, at once if it is busy, and leave no zombie."""
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
        self._outbox = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self._write()

    def _write(self) -> None:
        while self._outbox and not self.exited:
            try:
                written = os.write(self._process.stdin.fileno(), self._outbox)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.exited = True
                return
            self._outbox = self._outbox[written:]


def wait(processes: Iterable[RewardProcess]) -> None:
    """Sleep until one of the processes, not all of them idle, says something, takes more input, or is overdue."""
    with PollSelector() as selector:
        deadlines = []
        for process in processes:
            selector.register(process._process.stdout, EVENT_READ)
            if process._outbox:
                selector.register(process._process.stdin, EVENT_WRITE)
            if not process.idle:
                deadlines.append(process._deadline)
        selector.select(max(0.0, min(deadlines) - time.monotonic()))
