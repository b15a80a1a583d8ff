"""Private cache folder of this user and machine, for operators and graphs.

Its files are loaded as code, so nobody else may be able to write there.
"""

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


class Unsafe(OSError):
    """Folder that users other than this one may write to or exchange."""


def user_cache() -> Path:
    """Find or make the cache folder, writable by this user only.

    It is $XDG_CACHE_HOME/mindrlhf (by default ~/.cache/mindrlhf), else /tmp/mindrlhf-UID, else a temporary one.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindrlhf"
    for folder in (chosen, Path(tempfile.gettempdir()) / f"mindrlhf-{os.getuid()}"):
        try:
            return private_folder(folder)
        except Unsafe as problem:
            _log.warning("%s; another folder is used for what is built on this machine", problem)
        except OSError:
            continue
    return Path(_of_this_process().name)


def private_folder(path: Path) -> Path:
    """Make or check a private folder; raises `Unsafe` or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    above = path.parent.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise Unsafe(f"{path} is a link, and no folder")
    if found.st_uid != os.getuid():
        raise Unsafe(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unsafe(f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}); remove it")
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise Unsafe(f"{path} can be exchanged by other users (mode {stat.S_IMODE(above.st_mode):o} of {path.parent})")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
    return path


@functools.cache
def _of_this_process() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mindrlhf-")
