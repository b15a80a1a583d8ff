"""Program of a `code_interpreter` process: limits itself, then runs the code that it reads.

Python refuses the code writing outside of the working directory, network, other processes and native functions; if the
system allows, the kernel refuses the first two as well. The pool limits time and memory. This stops code that a model
writes by mistake or to experiment; it does not hold an attacker.
"""

import _posixsubprocess
import ast
import ctypes
import linecache
import os
import resource
import struct
import sys
import traceback
from typing import Any

FILE_BYTES = 1 << 24  # of one file, also of the output
NEW_USERS, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of Linux' unshare
CREATE_RULES, ADD_RULE, RESTRICT, NO_NEW_PRIVILEGES = 444, 445, 446, 38  # of Linux' Landlock; the last of prctl
WRITE_FILE, CHANGE_FILES = 1 << 1, 0x1FF2  # in Landlock's rules; the latter with making and removing files
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


def main() -> None:
    """Run the code from stdin."""
    code = sys.stdin.buffer.read().decode()
    for which, value in ((resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_NOFILE, 256)):
        resource.setrlimit(which, (value, value))
    sys.dont_write_bytecode = True
    folder = os.path.realpath(os.getcwd())
    _ask_the_kernel(folder)

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
    sys.exit(run(code))


def _ask_the_kernel(folder: str) -> None:
    """Let the kernel refuse network and writing; old kernels cannot."""
    system = ctypes.CDLL(None)
    system.unshare(NEW_USERS | NEW_NETWORK)
    rules = system.syscall(CREATE_RULES, ctypes.byref(ctypes.c_uint64(CHANGE_FILES)), ctypes.c_size_t(8), 0)
    if rules < 0:
        return
    for path, access in ((folder, CHANGE_FILES), (os.devnull, WRITE_FILE)):
        rule = struct.pack("=Qi", access, os.open(path, os.O_PATH))
        system.syscall(ADD_RULE, rules, 1, rule, 0)
    system.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system.syscall(RESTRICT, rules, 0)


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


if __name__ == "__main__":
    main()
