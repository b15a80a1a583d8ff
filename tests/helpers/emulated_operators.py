"""The fused operators built for aarch64 and run by an emulator, in the place of this machine's.

`pytest --emulate armv8-a FILES` runs tests with them. Commands that a test starts have the machine's own.
"""

import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from mindrlhf.backend.native import build, names

SOURCES = Path(__file__).with_name("emulated")
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
SYSTEM = "/usr/aarch64-linux-gnu"  # where cross compilers of Debian and Ubuntu have their C library
KERNELS = build.FOLDER
compile_library = build.compile_library


def missing_programs() -> str:
    """What has to be installed first; empty if all of it is."""
    if shutil.which(COMPILER) and any(map(shutil.which, EMULATORS)):
        return ""
    return f"{COMPILER} and {EMULATORS[0]} (apt-get install g++-aarch64-linux-gnu qemu-user)"


def use_emulated_operators(instructions: str) -> None:
    """Let `native.library` build for a processor with these instructions (`-march`), in this process."""
    if missing := missing_programs():
        raise pytest.UsageError(f"--emulate needs {missing}")
    build.FLAGS = (*build.FLAGS, f"-DEMULATED={instructions}")  # another file in the cache
    build.compile_library = partial(_build, instructions)


def _build(instructions: str, compiler: str, own: Sequence[str], sources: Path, path: Path) -> str | None:
    """Build the operators, a program that runs them, and a library at `path` that calls it."""
    if sources != KERNELS:  # of a test of building
        return compile_library(compiler, own, sources, path)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    product, library, callee = (folder / name for name in ("libdnnl.so.3", "kernels.so", "callee"))
    flags = [f"-march={instructions}", *build.FLAGS, "-shared"]
    _compile(COMPILER, [*flags, SOURCES / "products.cpp"], product)
    _compile(COMPILER, [*flags, *build.sources(sources), "-ldl", "-Wl,-rpath,$ORIGIN"], library)
    _compile(COMPILER, ["-O2", SOURCES / "callee.cpp", "-ldl"], callee)
    variants = names.entry_points().items()
    entries = [name if dtype == "float32" else f"{name}_{dtype}" for name, dtypes in variants for dtype in dtypes]
    words = [next(filter(None, map(shutil.which, EMULATORS))), "-L", SYSTEM, str(callee), str(library)]
    macros = [
        f"-DCOMMAND={', '.join(map(_quoted, words))}",
        f"-DOPERATORS={' '.join(f'FORWARD({name})' for name in entries)}",
    ]
    _compile(compiler, ["-O2", "-fPIC", "-shared", *macros, SOURCES / "caller.cpp"], path)
    return None


def _quoted(text: str) -> str:
    return f'"{text}"'


def _compile(compiler: str, arguments: Sequence[str | Path], to: Path) -> None:
    done = subprocess.run([compiler, *map(str, arguments), "-o", str(to)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
