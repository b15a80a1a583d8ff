"""Python for a model, each call in a fresh process and folder."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def code_interpreter(code: str) -> str:
    """Run a Python program and return its output.

    Args:
        code: The program. The value of a last expression is printed too.
            It has no network, and writes files in its folder only.
    """
    command = [sys.executable, "-I", "-X", "utf8", str(Path(__file__).with_name("sandbox.py"))]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        variables = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        ended = subprocess.run(
            command,
            input=code.encode("utf-8", "replace"),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=variables | threads,
        )
        output.seek(0)
        text = output.read().decode("utf-8", "replace").rstrip("\n")
    if ended.returncode < 0:
        text += f"\nThe program was ended by signal {-ended.returncode} ({signal.strsignal(-ended.returncode)})."
    return text.lstrip("\n")
