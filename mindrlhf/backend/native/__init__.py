"""Fused CPU operators in C++, built on this machine at first use.

`library()` returns the built file, or the reason that it is missing; `operators` makes MindSpore operators of it. If it
cannot be built, the composed operators are used, which are slower and give the same numbers up to rounding.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.backend.comm.patience import MESSAGE_LIMIT_S
from mindrlhf.files.user_cache import user_cache

SOURCE = Path(__file__).with_name("kernels.cpp")  # includes the headers in its folder
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"),
    f"-DMESSAGE_LIMIT_S={MESSAGE_LIMIT_S}",
)


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
    """Build the operators, unless this user has built them on this machine.

    Building takes a few seconds.
    """
    if sys.platform != "linux":
        return Library(None, "they are built on Linux alone")
    compiler = shutil.which("g++")
    if compiler is None:
        return Library(None, "g++ is not installed")
    try:
        source = b"".join(path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))
        path = user_cache() / f"kernels-{_fingerprint(source, compiler)}.so"
        problem = None if path.is_file() else _build(compiler, path)
        if problem:
            return Library(None, problem)
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


def _build(compiler: str, path: Path) -> str | None:
    """Compile to `path`; returns the error, if any.

    Several processes may compile at once.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            return f"g++ failed: {lines[0].strip()}"
        os.replace(made, path)
    return None


def _fingerprint(source: bytes, compiler: str) -> str:
    """Digest of source, flags, compiler, and this machine's instructions."""
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    instructions = {
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Fea"))
    }
    parts = (source, version, " ".join(FLAGS).encode(), "".join(sorted(instructions)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
