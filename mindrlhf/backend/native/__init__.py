"""Fused CPU operators in C++, shipped in a wheel or built at first use.

`library()` returns the built file, or the reason that it is missing; `operators` makes MindSpore operators of it. If it
cannot be built, the composed operators are used, which are slower and give the same numbers up to rounding.
"""

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.backend.native import build
from mindrlhf.files.user_cache import user_cache

SHIPPED = build.FOLDER / "built"  # what a wheel has; a checkout has none


@dataclass(frozen=True)
class Library:
    """Built file, or the reason that it is missing.

    path: None without a file. problem: the reason, empty with a file. bfloat16: the processor has instructions for
    bfloat16 products.
    """

    path: Path | None
    problem: str = ""
    bfloat16: bool = False


@functools.cache
def library() -> Library:
    """Find the operators, or build them.

    A wheel's are taken first, then what this user has built on this machine. Building takes half a minute.
    """
    if sys.platform != "linux":
        return Library(None, "they are built on Linux alone")
