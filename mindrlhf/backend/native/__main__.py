"""Command that compiles the operators for a wheel.

`python -m mindrlhf.backend.native FOLDER` makes all levels of this machine's kind of processor, and `scripts/wheel.sh`
puts what it makes into a wheel.
"""

import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.backend.native.build import FOLDER, LEVELS, compile_library, shipped_name


def main(arguments: Sequence[str]) -> None:
    """Compile the operators for all levels into the folder that is named."""
    (target,) = map(Path, arguments)
    target.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("g++")
    levels = LEVELS.get(platform.machine(), ())
    if compiler is None or not levels:
        problem = "g++ is not installed" if levels else f"no level is known for processors of {platform.machine()}"
        sys.exit(f"build: {problem}; the operators are not compiled")
    for level in levels:
        path = target / shipped_name(FOLDER, level)
        problem = compile_library(compiler, level.flags, FOLDER, path)
        if problem:
            sys.exit(f"build: {level.name}: {problem}")
        print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
