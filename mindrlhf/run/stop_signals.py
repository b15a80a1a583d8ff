"""SIGTERM and SIGINT as requests to stop. Imports no NumPy, which starts threads."""

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


class Stopped(Exception):
    """Clean end of a saved run; the message says how to go on."""


class StopSignals:
    """Context in which SIGTERM and SIGINT are requests to stop.

    A second signal ends the process at once. Enter the context in the main thread, before NumPy is imported: threads
    that exist already do not block the signals. Both signals are blocked in this thread and in all threads that it
    starts; a single thread waits for them. Handlers would not work: MindSpore sets its own for SIGINT before each run
    of a graph (it sends SIGTERM) and from several threads at once while it compiles kernels; its network threads take
    SIGINT for themselves; and a KeyboardInterrupt while MindSpore is imported makes the interpreter abort when it ends.
    Processes started within the context inherit the blocked signals. The end of an msrun that waits for its workers is
    a request to stop too: on signals that it does not handle, it dies without telling the workers. Its scheduler is
    left alone. The context may be entered again, and a request stays in force.
    """

    signals: tuple[int, ...] = SIGNALS

    def __init__(self) -> None:
        self.reason: str | None = None
        msrun = find_msrun()
        self._launcher = msrun.pid if msrun and msrun.joins else None
        self._earlier: dict[int, object] = {}
        self.received: int | None = None  # signal
        self._ended = False

    def __enter__(self) -> "StopSignals":
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            return self
        self._ended = False
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        self._earlier = {number: signal.signal(number, self._note) for number in self.signals}
        self._thread = threading.Thread(target=self._wait, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._earlier:
            return
        self._ended = True
        signal.pthread_kill(self._thread.ident, self.signals[0])  # for that thread only, which then stops waiting
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
            number = signal.sigwait(self.signals)
            if self._ended:
                return
            self._note(number)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self.received is not None:
            end_by(number)
        self.received, self.reason = number, f"{signal.Signals(number).name} was received"
        with suppress(OSError):  # the terminal may have closed
            said = f"{self.reason}: saving the state and stopping; again, and it stops at once"
            print(said, file=sys.stderr, flush=True)


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
        self.received, self._held = None, True

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
