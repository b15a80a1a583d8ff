"""Python for a model, each call in a fresh, confined process."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from typing import BinaryIO

from mindrlhf.environments.ready.confinement import FOLDER_BYTES, FOLDER_FILES, held
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import PACKAGE
from mindrlhf.files.trees import exceeds, remove_tree

SETTING = "MINDRLHF_SANDBOX"  # variable with the value of rollout.sandbox
REQUIRED = "required"
BEST_EFFORT = "best_effort"
OUTPUT_BYTES = 1 << 24
PIPE_BYTES = 1 << 16
LOOK_S = 0.05  # between looks at the folder's size
CPU_S = 60.0  # of the processor, for a caller without a time limit
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from mindrlhf.environments.ready import sandbox; "
    "arguments = sys.argv[2:]; del sys.path[-1], sys.argv[1:]; sandbox.{}(*arguments)"
)


def code_interpreter(code: str) -> str:
    """Run a Python program and return its output.

    Args:
        code: The program. The value of a last expression is printed too.
            It has no network, and writes files in its folder only.
    """
    mechanisms = required_mechanisms()
    folder = tempfile.mkdtemp()
    try:
        with tempfile.TemporaryFile() as program:
            program.write(code.encode("utf-8", "replace"))
            program.seek(0)
            # The caller's alarm is its own time limit; each processor may be busy for as long.
            seconds = (signal.getitimer(signal.ITIMER_REAL)[0] or CPU_S) * (os.cpu_count() or 1)
            arguments = "main", str(os.getpid()), str(seconds), ",".join(mechanisms)
            with _begin(folder, *arguments, stdin=program) as process:
                try:
                    text, reason = _watch(process, folder)
                finally:
                    process.kill()
    finally:
        remove_tree(folder)
    if reason is None and process.returncode < 0:
        reason = f"signal {-process.returncode} ({signal.strsignal(-process.returncode)})"
    return (text.rstrip("\n") + (f"\nThe program was ended by {reason}." if reason else "")).lstrip("\n")


def required_mechanisms() -> tuple[str, ...]:
    """Return this machine's mechanisms, which hold code or need not.

    UserError if they do not hold it, and the setting asks for that.
    """
    found = mechanisms()
    if not held(found) and os.environ.get(SETTING, REQUIRED) != BEST_EFFORT:
        raise UserError(
            f"tool 'python': this machine cannot hold a model's code (it has {', '.join(found) or 'no mechanism'}, and "
            "needs seccomp and one of Landlock and namespaces of Linux); use another machine or container, or set "
            f"rollout.sandbox: {BEST_EFFORT} for code that you trust."
        )
    return found


@cache
def mechanisms() -> tuple[str, ...]:
    """Find the mechanisms of this machine's kernel; none outside of Linux."""
    if sys.platform != "linux":
        return ()
    with tempfile.TemporaryDirectory() as folder, _begin(folder, "probe", stdin=subprocess.DEVNULL) as process:
        return tuple(process.communicate()[0].decode().splitlines())


def describe() -> str:
    """Say in one line what holds a model's code here."""
    found = mechanisms()
    listed = ", ".join(found) or "nothing"
    return f"held by {listed}" if held(found) else f"not held (there is {listed}), which rollout.sandbox allows"


def _begin(folder: str, function: str, *arguments: str, stdin: BinaryIO | int) -> subprocess.Popen[bytes]:
    variables = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    options = ["-I", "-X", "utf8", "-c", _PROGRAM.format(function), str(PACKAGE.parent)]
    return subprocess.Popen(
        [sys.executable, *options, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=variables | threads,
    )


def _watch(process: subprocess.Popen[bytes], folder: str) -> tuple[str, str | None]:
    """Read a program's output until it ends.

    Returns the text, and the reason if it was ended here, for the size of its output or folder.
    """
    output = bytearray()
    reason = None
    is_open = True
    looked = time.monotonic()
    while reason is None and (is_open or process.poll() is None):
        if not is_open:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        elif select.select([process.stdout], [], [], LOOK_S)[0]:
            received = os.read(process.stdout.fileno(), PIPE_BYTES)
            output += received
            is_open = bool(received)
        if len(output) > OUTPUT_BYTES:
            reason = f"the limit of its output, {OUTPUT_BYTES:,} bytes"
        elif time.monotonic() > looked + LOOK_S:
            looked = time.monotonic()
            if exceeds(folder, FOLDER_BYTES, FOLDER_FILES):
                reason = f"the limits of its folder, {FOLDER_BYTES:,} bytes and {FOLDER_FILES:,} files"
    return output.decode("utf-8", "replace"), reason
