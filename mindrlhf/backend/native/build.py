"""Compilation of the C++ operators, for this machine or for kinds of processors."""

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.backend.comm.patience import MESSAGE_LIMIT_S

FOLDER = Path(__file__).parent  # of the sources
FLAGS = (
    *("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
    f"-DMESSAGE_LIMIT_S={MESSAGE_LIMIT_S}",
)
NATIVE = ("-march=native",)


@dataclass(frozen=True)
class Level:
    """Kind of processor that a wheel has operators for.

    flags: of the compiler. needed: names in /proc/cpuinfo that a processor has to have.
    """

    name: str
    flags: tuple[str, ...]
    needed: frozenset[str]


_V3 = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BFLOAT16 = _V4 | frozenset(["avx512_bf16", "avx512_vnni"])
# Without a processor's name, compilers use half of each of AVX-512's registers.
_WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
# Machine, as `platform` calls it -> its levels, the best first.
LEVELS = {
    "x86_64": (
        Level("x86-64-v4-bfloat16", (*_WIDE, "-mavx512bf16", "-mavx512vnni"), _BFLOAT16),
        Level("x86-64-v4", _WIDE, _V4),
        Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Level("armv8-a", ("-march=armv8-a",), frozenset()),),
}


def instructions() -> frozenset[str]:
    """Collect what this processor can, as /proc/cpuinfo names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(word for line in lines if line.startswith(("flags", "Fea")) for word in line.split(":")[1].split())


def fitting_levels() -> Iterator[Level]:
    """List the levels that this processor has, the best first."""
    known = instructions()
    return (level for level in LEVELS.get(platform.machine(), ()) if level.needed <= known)


def sources(folder: Path) -> list[Path]:
    """List what is compiled: one object each."""
    return sorted(folder.glob("*.cpp"))


def digest(folder: Path, *further: str) -> str:
    """Digest sources, flags, and what else a library depends on."""
    texts = [path.read_text() for path in (*sources(folder), *sorted(folder.glob("*.h")))]
    return hashlib.sha256("\0".join((*texts, *FLAGS, *further)).encode()).hexdigest()[:16]


def compile_library(compiler: str, flags: Sequence[str], folder: Path, path: Path) -> str | None:
    """Compile a folder's sources side by side; returns the error, if any.

    path: of the library. Several processes may compile at once.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as work:
        objects = {str(source): Path(work) / f"{source.stem}.o" for source in sources(folder)}
        running = [
            subprocess.Popen(
                [compiler, *FLAGS, *flags, "-c", source, "-o", str(made)], stderr=subprocess.PIPE, text=True
            )
            for source, made in objects.items()
        ]
        errors = [(one.communicate()[1], one.returncode) for one in running]
        if not any(code for _, code in errors):
            made = Path(work) / path.name
            command = [compiler, "-shared", "-fopenmp", *map(str, objects.values()), "-o", str(made), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True)
            errors.append((done.stderr, done.returncode))
        for text, code in errors:
            if code:
                lines = text.splitlines() or ["no message"]
                line = next((one for one in lines if "error" in one and not one.startswith("collect2")), lines[0])
                return f"{Path(compiler).name} failed: {line.strip()}"
        os.replace(made, path)
    return None


def shipped_name(folder: Path, level: Level) -> str:
    """Return the file name of a wheel's library.

    Compiled graphs are known by it, too.
    """
    return f"kernels-{level.name}-{digest(folder, *level.flags)}.so"
