"""Where what is built on this machine for this user is kept: operators and graphs."""

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME/mindrlhf, by default ~/.cache/mindrlhf; or /tmp where that is read-only. It exists.

    Raises OSError where neither can be had.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindrlhf"
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        if os.access(chosen, os.W_OK):
            return chosen
    except OSError:
        pass
    shared = Path(tempfile.gettempdir()) / f"mindrlhf-{os.getuid()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    if shared.stat().st_uid != os.getuid():
        raise OSError(f"{shared} belongs to another user")  # who could have put anything there
    return shared
