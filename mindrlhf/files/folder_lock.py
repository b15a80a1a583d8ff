"""Locks that keep folders for one run at a time, until their holder ends."""

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mindrlhf.errors import UserError

LOCK_FILE = ".mindrlhf.lock"
PATIENCE_S = 0.2  # time for a holder to write its name, or for an ending holder to end
MOST_BYTES = 1000  # of a lock file; a larger file is somebody's

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
        file = _opened(path, flag)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _stands(path, file):
                os.ftruncate(file, 0)
                os.write(file, f"{os.getpid()} {socket.gethostname()}".encode())
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                pid, _, host = os.read(file, MOST_BYTES).decode(errors="replace").partition(" ")
                os.close(file)
                found = f"{path.parent}: another run is writing there (process {pid} on {host})"
                raise UserError(f"{found}; wait for its end, or give {flag} another folder.") from None
            time.sleep(PATIENCE_S / 10)
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise _refusal(path, flag, error) from error
            _log.warning("%s: its file system has no locks; let no other run write there", path.parent)
            return None
        os.close(file)


def _refusal(path: Path, flag: str, error: OSError) -> UserError:
    problem = f"{path.parent}: cannot be locked ({error.strerror})"
    return UserError(f"{problem}; give {flag} a folder that you may write to.")


def _opened(path: Path, flag: str) -> int:
    """Open a lock file; a UserError for a link or another file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if path.is_symlink():
            raise UserError(f"{path}: is a link, and a run would write through it; remove it.") from None
        raise _refusal(path, flag, error) from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > MOST_BYTES:
        os.close(file)
        raise UserError(f"{path}: is not the lock of a run but another file; move it away.")
    return file


def _stands(path: Path, file: int) -> bool:
    """Test that an open file still has its name; its holder removes it."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _release(path: Path, file: int) -> None:
    with suppress(OSError):  # a file that stays is no lock
        path.unlink()  # while it is locked: others that have opened it notice that it is no longer the lock
    os.close(file)
