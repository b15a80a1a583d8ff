"""SIGTERM and SIGINT as a wish to stop. Imports no NumPy, which starts threads."""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from mindrlhf.backend.process.msrun import find_msrun

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """Clean end of a saved run; the message says how to go on."""


class StopSignals:
    """Context in which SIGTERM and SIGINT are a wish to stop.

    A second one ends the process at once. Enter it in the main thread, before NumPy is imported: threads that are there
    already have nothing blocked. Both signals are blocked in this thread and in all that it starts, and one thread
    alone waits for them. Handlers would not do: MindSpore sets its own for SIGINT before each run of a graph (it sends
    SIGTERM) and from several threads at once while it compiles kernels; its network threads take SIGINT for themselves;
    and a KeyboardInterrupt while MindSpore is imported makes the interpreter abort when it ends.
    Processes that are started meanwhile inherit the blocked signals. The end of an msrun that waits for its workers is
    a wish to stop too: on signals that it does not handle it dies without telling them. Its scheduler is left alone.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        msrun = find_msrun()
        self._launcher = msrun.pid if msrun and msrun.joins else None
        self._earlier: dict[int, object] = {}
        self._received = self._ended = False

    def __enter__(self) -> "StopSignals":
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            return self
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._earlier = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._thread = threading.Thread(target=self._wait, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._earlier:
            return
        self._ended = True
        signal.pthread_kill(self._thread.ident, signal.SIGTERM)  # for this thread alone: it stops waiting
        self._thread.join()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    @property
    def wanted(self) -> bool:
        if self.reason is None and self._launcher not in (None, os.getppid()):
            self.reason = "msrun has ended"
        return self.reason is not None

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            if self._ended:
                return
            self._note(number)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self._received:
            end_by(number)
        self._received, self.reason = True, f"{signal.Signals(number).name} was received"
        with suppress(OSError):  # a terminal that is gone
            said = f"{self.reason}: saving the state and stopping; again, and it stops at once"
            print(said, file=sys.stderr, flush=True)


def end_by(number: int) -> None:
    """End this process by a signal with its default effect, from any thread."""
    ctypes.CDLL(None).signal(number, None)  # `signal.signal` is for the main thread alone; None is the default
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    signal.pthread_kill(threading.get_ident(), number)
