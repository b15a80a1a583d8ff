"""Standard streams that may be closed or full, or lose their reader."""

import errno
import io
import logging
import os
import select
import signal
import sys
from collections.abc import Callable

from mindrlhf.errors import UserError

_log = logging.getLogger(__name__)


class _Descriptor(io.FileIO):
    """Descriptor of a standard stream, which goes to /dev/null after the first error.

    failed: called with that error.
    """

    def __init__(self, number: int, failed: Callable[[OSError], None]):
        super().__init__(number, "wb", closefd=False)
        self._failed = failed

    def write(self, content) -> int:
        try:
            while (count := super().write(content)) is None:  # another program has made it non-blocking
                select.select((), (self,), ())
            return count
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self._failed(error)
            return len(content)


def guard_streams(lasting: bool) -> None:
    """Make standard streams safe to write to, and open if they are closed.

    lasting: the program goes on without a standard output that fails, and says so once on standard error. Otherwise
    that ends it: quietly without a reader, or with a UserError. Streams that a program has replaced are left alone.
    """
    closed = [number for number in range(3) if not _is_open(number)]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: no other file may get it
    if lasting and 1 in closed:
        _say(OSError(errno.EBADF, "it is closed"))
    for name, failed in (("stdout", _say if lasting else _end), ("stderr", _ignore)):
        stream = getattr(sys, name)
        number = 1 if name == "stdout" else 2
        if number in closed:
            stream = io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), "utf-8", write_through=True)
        if not isinstance(stream, io.TextIOWrapper) or not _is_descriptor(stream, number):
            continue
        buffer = io.BufferedWriter(_Descriptor(number, failed))
        same = {"encoding": stream.encoding, "line_buffering": stream.line_buffering}
        stream.flush()
        # Half of a surrogate pair is shown, and any character on a terminal that is not UTF-8.
        setattr(sys, name, io.TextIOWrapper(buffer, errors="backslashreplace", **same))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _is_descriptor(stream: io.TextIOWrapper, number: int) -> bool:
    try:
        return stream.fileno() == number
    except OSError:
        return False


def _say(error: OSError) -> None:
    _log.warning("standard output cannot be written (%s); the run goes on without it", error.strerror)


def _end(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise SystemExit(128 + signal.SIGPIPE)
    raise UserError(f"standard output cannot be written ({error.strerror}); give it another place.")


def _ignore(error: OSError) -> None:
    """Do nothing: there is nowhere left to say it."""
