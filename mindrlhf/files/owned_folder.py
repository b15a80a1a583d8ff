"""Temporary folders of this process; those of processes that have died are removed."""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

OWNER = "owner"  # file in the folder that its process keeps locked


def owned_folder(prefix: str) -> tempfile.TemporaryDirectory:
    """Make a temporary folder, and remove those of dead processes.

    Only this user's folders of the same prefix are removed. The lock of the file OWNER tells: the kernel gives it up
    with the process. A folder without the file may be another version's, so it stays.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_if_dead(path)
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    new = Path(folder.name, f".{OWNER}")
    folder.owner = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # open as long as the folder
    with suppress(OSError):  # without locks nobody removes it
        fcntl.flock(folder.owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, new.with_name(OWNER))
    return folder


def _remove_if_dead(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    owner = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(owner)
