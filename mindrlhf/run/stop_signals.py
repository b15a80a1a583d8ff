"""Signals as requests to stop. Imports no NumPy, which starts threads."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mindrlhf.backend.process.msrun import find_msrun

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal's end comes as SIGHUP, often several times: from the kernel, the shell, and the end of its session.
HANGUP = signal.SIGHUP
# Signals of queues before a job's time is over; they end a process unless its settings name them.
QUEUE = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Stopped(Exception):
    """Clean end of a saved run; the message says how to go on."""


class StopSignals:
    """Context in which SIGTERM, SIGINT and SIGHUP are requests to stop.

    A second SIGTERM or SIGINT ends the process at once. SIGHUP has no effect in a process that ignores it (`nohup`).
    asking: names of signals of QUEUE that are requests too; the others have their usual effect. Enter the context in
    the main thread, before NumPy is imported: threads that exist already do not block the signals. The signals are
    blocked in this thread and in all threads that it starts; a single thread waits for them. Handlers would not work:
    MindSpore sets its own for SIGINT before each run of a graph (it sends SIGTERM) and from several threads at once
    while it compiles kernels; its network threads take SIGINT for themselves; and a KeyboardInterrupt while MindSpore
    is imported makes the interpreter abort when it ends. Processes started within the context inherit the blocked
    signals. The end of an msrun that waits for its workers is a request to stop too: on signals that it does not
    handle, it dies without telling the workers. Its scheduler is left alone. The context may be entered again, and a
    request stays in force.
    """

    signals: tuple[int, ...] = (*SIGNALS, HANGUP, *QUEUE)

    def __init__(self) -> None:
        self.reason: str | None = None
        self.asking: tuple[str, ...] = ()
        self._insisted = False  # a signal was received whose repetition ends the process
        msrun = find_msrun()
        self._launcher = msrun.pid if msrun and msrun.joins else None
        self._earlier: dict[int, object] = {}
        self.received: int | None = None  # signal
        self._ended = False

    def __enter__(self) -> "StopSignals":
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            return self
        self._ended = False
        # Signals that the program ignores or handles itself are its own.
        own = {number for number in (HANGUP, *QUEUE) if signal.getsignal(number) != signal.SIG_DFL}
        self._waited = tuple(number for number in self.signals if number not in own)
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self._earlier = {number: signal.signal(number, self._note) for number in self._waited}
        self._thread = threading.Thread(target=self._wait, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._earlier:
            return
        self._ended = True
        signal.pthread_kill(self._thread.ident, self._waited[0])  # for that thread only, which then stops waiting
        self._thread.join()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    def ask(self, reason: str) -> None:
        """Request a stop for a reason other than a signal."""
        self.reason = self.reason or reason

    @property
    def wanted(self) -> bool:
        if self.reason is None and self._launcher not in (None, os.getppid()):
            self.reason = "msrun has ended"
        return self.reason is not None

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(self._waited)
            if self._ended:
                return
            self._note(number)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        name = signal.Signals(number).name
        gentle = number == HANGUP or name in self.asking
        if not gentle:
            if number in QUEUE or self._insisted:
                end_by(number)
            self._insisted = True
        elif self.received is not None:
            return
        self.received = number
        self.reason = f"{name} was received"
        again = "SIGINT or SIGTERM, and it stops at once" if gentle else "again, and it stops at once"
        with suppress(OSError):  # the terminal may have closed
            print(f"{self.reason}: saving the state and stopping; {again}", file=sys.stderr, flush=True)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold signals back until the end of the body.

    Threads that the body starts never take them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, HANGUP, *QUEUE))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupts(StopSignals):
    """Context in which Ctrl-C ends the process, or is held back.

    received: None, or the signal that was held back; a second one ends the process.
    """

    signals = (signal.SIGINT,)

    def __init__(self) -> None:
        super().__init__()
        self._held = False

    def hold(self) -> None:
        """Hold Ctrl-C back until the context `raised` is entered."""
        self.received = None
        self._held = True

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at Ctrl-C, in the main thread."""
        self._held = False
        signal.signal(signal.SIGINT, signal.default_int_handler)  # MindSpore sets its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self.received is not None or not self._held:
            end_by(number)
        self.received = number


def end_by(number: int) -> None:
    """End this process by a signal with its default effect, from any thread."""
    ctypes.CDLL(None).signal(number, None)  # `signal.signal` works in the main thread only; None is the default
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    signal.pthread_kill(threading.get_ident(), number)
