"""Runs a tree's `grpo_step.py` step by step: each step waits until the caller says so.

python benchmarks/gated_step.py TREE/benchmarks/grpo_step.py --steps 8

Before each step, and after the last one, it writes a line to its output and waits for a line of input. So two revisions
that are both ready take turns, a step each (`guard.py`).
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def gated(function: Callable[..., Any], output: int) -> Callable[..., Any]:
    """Return a function that waits for its turn first. output: a file to write to, whatever `sys.stdout` is then."""

    def wait(*arguments: Any) -> Any:
        os.write(output, b"ready\n")
        if not sys.stdin.readline():
            sys.exit("the caller has gone")
        return function(*arguments)

    return wait


def main() -> int:
    script = Path(sys.argv[1])
    sys.path.insert(0, str(script.parent))
    tree = import_module(script.stem)
    output = os.dup(1)
    for name in ("one_step", "peak_mib"):  # the second one follows the last step
        setattr(tree, name, gated(getattr(tree, name), output))
    return tree.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
