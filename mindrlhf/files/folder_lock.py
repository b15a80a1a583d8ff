"""Locks that keep folders for one run at a time, until their holder ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mindrlhf.errors import UserError

LOCK_FILE = ".mindrlhf.lock"
PATIENCE_S = 0.2  # time for a holder to write its name, or for an ending holder to end

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_log = logging.getLogger(__name__)


@contextmanager
def lock_folders(folders: Mapping[str, Path]) -> Iterator[None]:
    """Keep other runs out of existing folders until the body ends.

    folders: flag that names the folder -> folder. Raises `UserError` with the process and host that has locked a
    folder; on a file system without locks it only warns.
    """
    flags = {folder.resolve(): flag for flag, folder in reversed(folders.items())}
    with ExitStack() as stack:
        for folder, flag in flags.items():
            file = _lock(folder / LOCK_FILE, flag)
            if file is not None:
                stack.callback(_release, folder / LOCK_FILE, file)
        yield


def _lock(path: Path, flag: str) -> int | None:
    """Lock a file; returns its descriptor, or None without lock support."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            problem = f"{path.parent}: cannot be locked ({error.strerror})"
            raise UserError(f"{problem}; give {flag} a folder that you may write to.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _stands(path, file):
                os.ftruncate(file, 0)
                os.write(file, f"{os.getpid()} {socket.gethostname()}".encode())
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                pid, _, host = os.read(file, 1000).decode(errors="replace").partition(" ")
                os.close(file)
                found = f"{path.parent}: another run is writing there (process {pid} on {host})"
                raise UserError(f"{found}; wait for its end, or give {flag} another folder.") from None
            time.sleep(PATIENCE_S / 10)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            os.close(file)
            _log.warning("%s: its file system has no locks; let no other run write there", path.parent)
            return None
        os.close(file)


def _stands(path: Path, file: int) -> bool:
    """Test that an open file still has its name; its holder removes it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _release(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)  # while it is locked: others that have opened it notice that it is no longer the lock
    os.close(file)
