"""The end of a process that runs a command."""

import atexit
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

STARTS = ("__main__", "runpy")
PACKAGE = __name__.partition(".")[0]


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end this process with the exit code that it returns.

    On a CPU, MindSpore's graphs are left to the system, which frees them at once: to take them apart lasts a second.
    Exit functions are called in any case, since the first one that is registered is the last one called. In somebody
    else's program, which may go on and end with an exit code of its own, this is `sys.exit(main())`.
    """
    codes: list[int] = []
    if _is_the_whole_process(sys._getframe(1)):
        atexit.register(_leave, codes)
    codes.append(main())
    sys.exit(codes[0])


def _is_the_whole_process(frame: FrameType | None) -> bool:
    """Test that a script, or how Python starts one, called this package."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in STARTS and module.partition(".")[0] != PACKAGE:
            return False
        frame = frame.f_back
    return True


def _leave(codes: list[int]) -> None:
    """End the process at once where that is safe.

    Does nothing when `main` returned no exit code, without MindSpore, and on another device.
    """
    mindspore = sys.modules.get("mindspore")
    if not codes or mindspore is None or mindspore.get_context("device_target") != "CPU":
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or nobody reads: Python has its own words and exit code
        return
    os._exit(codes[0])
