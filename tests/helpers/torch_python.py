"""A Python that has PyTorch, transformers and PEFT, and programs for it: they need not be where MindSpore is."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

LIBRARIES = ("torch", "transformers", "peft")
VARIABLE = "PYTHON_WITH_TORCH"


@cache
def torch_python() -> str:
    """This Python, or the one that the variable names; skips the test where neither has the libraries."""
    if all(importlib.util.find_spec(name) for name in LIBRARIES):
        return sys.executable
    if other := os.environ.get(VARIABLE):
        return other
    return pytest.skip(f"needs {', '.join(LIBRARIES)}: install them, or name a Python that has them in {VARIABLE}")


def run_with_torch(program: str, request: Any) -> Any:
    """What a program prints as JSON; it gets `request` as JSON on its standard input."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [torch_python(), "-c", program],
        input=json.dumps(request),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
