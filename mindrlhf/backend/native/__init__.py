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
    try:
        path = _shipped() or _built()
        if isinstance(path, str):
            return Library(None, path)
        ctypes.CDLL(str(_onednn()))  # the operators look it up among loaded libraries; MindSpore may not be one
        built = ctypes.CDLL(str(path))
        if built.usable():
            return Library(None, "MindSpore's oneDNN is not there")
    except OSError as error:
        return Library(None, str(error))
    return Library(path, bfloat16=bool(built.multiplies_bfloat16()))


def _onednn() -> Path:
    """Find MindSpore's library of matrix products without importing MindSpore."""
    return Path(importlib.util.find_spec("mindspore").origin).parent / "lib" / "libdnnl.so.3"


def _shipped() -> Path | None:
    """Find the best library of the wheel that this processor can run."""
    if not SHIPPED.is_dir():
        return None
    found = (SHIPPED / build.shipped_name(build.FOLDER, level) for level in build.fitting_levels())
    return next((path for path in found if path.is_file()), None)


def _built() -> Path | str:
    """Find or build this machine's library; returns the error, if any."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "g++ is not installed"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    name = build.digest(build.FOLDER, version, *build.NATIVE, *sorted(build.instructions()))
    path = user_cache() / f"kernels-{name}.so"
    problem = None if path.is_file() else build.compile_library(compiler, build.NATIVE, build.FOLDER, path)
    return problem or path
