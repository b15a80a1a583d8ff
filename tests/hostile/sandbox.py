"""Run a command of the suite in a forked process, with captured output, limits, and a look at what it left."""

import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TIME_LIMIT_S = 180.0  # a guard against what never ends; no case takes a tenth of it on a quiet machine
MEMORY_LIMIT = 24 << 30  # bytes of addresses, most of which are never touched


@dataclass(frozen=True)
class Outcome:
    """code: exit code, minus the signal's number for a process that a signal ended, None for one that hung."""

    code: int | None
    out: str
    err: str
    seconds: float


class Child:
    """A function in a forked process whose current folder is `folder`; its result is the exit code."""

    def __init__(self, function: Callable[[], int], folder: Path, logs: Path):
        self._logs = [logs.with_suffix(suffix) for suffix in (".out", ".err")]
        self._started = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.setsid()
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where this runs under nohup
                _redirect(self._logs)
                _limit(folder)
                code = function()
            except SystemExit as stopped:
                code = stopped.code if isinstance(stopped.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    try:
                        stream.flush()
                    except Exception:
                        traceback.print_exc()
                os._exit(code or 0)

    def poll(self) -> Outcome | None:
        """What came of it; None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._started
        code = os.waitstatus_to_exitcode(status) if pid else None
        if not pid:
            if seconds < TIME_LIMIT_S:
                return None
            os.kill(self._pid, signal.SIGABRT)  # faulthandler says where it hung
            time.sleep(0.5)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # and the processes that it started
        if not pid:
            os.waitpid(self._pid, 0)
        return Outcome(code, *(log.read_bytes().decode("utf-8", "surrogateescape") for log in self._logs), seconds)

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def wait(self) -> Outcome:
        """What came of it."""
        while (outcome := self.poll()) is None:
            time.sleep(0.02)
        return outcome


def command(argv: Sequence[str]) -> Callable[[], int]:
    """A command of `mindrlhf` as the function of a child."""

    def run() -> int:
        from mindrlhf import cli

        return cli.main(list(argv))

    return run


def _redirect(logs: Sequence[Path]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, log in enumerate(logs, start=1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _limit(folder: Path) -> None:
    import faulthandler

    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    os.environ["HOME"] = str(folder)
    os.chdir(folder)
    _obey_permissions()


def _obey_permissions() -> None:
    """Root without the capabilities that pass over a file's permissions, so that mode 0 means what it says."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) == 0:
        for index in (0, 1):  # effective and permitted of the first 32
            data[index] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.capset(header, data)
