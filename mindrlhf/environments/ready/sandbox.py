"""Program of a `code_interpreter` process: confines itself, then runs the code that it reads.

The kernel confines it by the mechanisms that its arguments name. In addition Python refuses writing outside of the
working directory, network, other processes and native functions, with an error that says so; code can switch that off.
The caller limits memory and the folder's size. Imports only the standard library.
"""

import _posixsubprocess
import ast
import linecache
import math
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

from mindrlhf.environments.ready.confinement import MECHANISMS, confine
from mindrlhf.workers.system_calls import SET_DEATH_SIGNAL, prctl

FILE_BYTES = 1 << 24  # of one file
LIMITS = {
    resource.RLIMIT_FSIZE: FILE_BYTES,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NAME = "<code>"
PROCESSES = ("subprocess.Popen", "pty.spawn", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn")
NATIVE = ("ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.dlopen")
REFUSED = {
    **dict.fromkeys((*PROCESSES, "os.spawn", "os.kill", "os.killpg"), "other processes"),
    **dict.fromkeys(NATIVE, "native functions"),
}
FILES = ("remove", "rename", "rmdir", "mkdir", "link", "symlink", "truncate", "chmod", "chown", "utime")
CHANGING = {"sqlite3.connect", *(f"os.{change}" for change in FILES)}


def main(parent: str, seconds: str, mechanisms: str) -> None:
    """Run the code from stdin.

    parent: the caller's process, with which this one ends. seconds: of the processor, for all threads. mechanisms:
    names, separated by commas; empty for none.
    """
    code = sys.stdin.buffer.read().decode()
    for which, value in {**LIMITS, resource.RLIMIT_CPU: math.ceil(float(seconds))}.items():
        most = resource.getrlimit(which)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (value, value))
    sys.dont_write_bytecode = True
    folder = os.path.realpath(os.getcwd())
    names = mechanisms.split(",") if mechanisms else []
    with suppress(OSError):
        prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    try:
        confine(names, folder)
    except OSError as error:
        sys.exit(f"The program was not run: {error}.")
    _explain(folder)
    sys.exit(run(code))


def probe() -> None:
    """Print the mechanisms that work here, each tried in a process of its own."""
    folder = os.path.realpath(os.getcwd())
    for name in MECHANISMS:
        child = os.fork()
        if child == 0:
            try:
                confine([name], folder)
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            print(name)


def _explain(folder: str) -> None:
    """Let Python refuse what the kernel refuses, with an error that says why."""

    def refuse(*what: Any) -> None:
        raise PermissionError("the sandbox allows no other processes")

    def outside(path: Any) -> bool:
        if not isinstance(path, str | bytes):
            return False
        real = os.path.realpath(os.fsdecode(path))
        return real != os.devnull and os.path.commonpath((real, folder)) != folder

    def check(event: str, values: tuple[Any, ...]) -> None:
        what = REFUSED.get(event)
        if event.startswith("socket.") and event != "socket.__new__":
            what = "network"
        writes = event in CHANGING or (event == "open" and values[2] & WRITING)
        if writes and any(map(outside, values[:2])):
            what = "writing outside of its folder"
        if what:
            raise PermissionError(f"the sandbox allows no {what}")

    _posixsubprocess.fork_exec = refuse  # it raises no audit event
    sys.addaudithook(check)


def run(code: str) -> int:
    """Run code as a program, and print the value of its last expression."""
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        program = ast.parse(code, NAME)
        last = program.body.pop() if program.body and isinstance(program.body[-1], ast.Expr) else None
        exec(compile(program, NAME, "exec"), scope)
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), scope) if last else None
        if value is not None:
            print(value)
    except Exception as error:
        place = error.__traceback__
        while place and place.tb_frame.f_code.co_filename != NAME:
            place = place.tb_next
        report = traceback.TracebackException(type(error), error, place)
        report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if frame.filename != __file__])
        sys.stdout.write("".join(report.format()))
        return 1
    return 0
