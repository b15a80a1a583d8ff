"""The end of a process that runs a command."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end this process with the exit code that it returns.

    On a CPU, MindSpore's graphs are left to the system, which frees them at once: to take them apart lasts a second.
    Exit functions are called in any case, since the first one that is registered is the last one called.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)
    codes.append(main())
    sys.exit(codes[0])


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
