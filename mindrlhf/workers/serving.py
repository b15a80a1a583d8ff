"""Worker's side of its pipes: reading requests, sending replies, reasons of failures.

A child process that a function forks has no access to the pipes, and ends when it returns from the function. Imports
only the standard library, so that starting takes milliseconds.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from mindrlhf.errors import UserError
from mindrlhf.files.printable import printable
from mindrlhf.workers.descendants import adopt_orphans, collect_dead, end_all_children

MAX_REASON = 500  # characters of an error's text that are passed on
MAX_NAME = 200  # characters of a name
MAX_DEAD = 64  # children that have ended and are not waited for
EXIT_S = 5.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def open_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move requests and replies away from stdin and stdout, which become /dev/null."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the training blocks signals to stop; functions do not
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # output of functions is dropped, at no cost
        os.dup2(null, descriptor)
    for pipe in pipes:
        close_in_children(pipe.fileno())
    sys.argv[1:] = []
    adopt_orphans()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is to end, not the training
    return pipes


def close_in_children(descriptor: int) -> None:
    """Close a descriptor in every child process that is forked from now on."""
    os.register_at_fork(after_in_child=partial(os.closerange, descriptor, descriptor + 1))


def greet(replies: BinaryIO, prepare: Callable[[], tuple[Any, Any]]) -> Any:
    """Send the greeting that `prepare` returns, or its UserError; returns its other result."""
    own = os.getpid()
    result = None
    try:
        result, greeting = prepare()
        message = {"greeting": greeting}
    except UserError as error:
        message = {"error": printable(str(error))}
    end_child(own)
    send(replies, message)
    return result


def serve(requests: BinaryIO, replies: BinaryIO, timeout_s: float, call: Callable[..., list[Any]]) -> None:
    """Answer requests until they end, and end all processes that functions have begun.

    A line [[number, value, ...], ...] is answered by lines [number, *call(value, ...)], one for each call.
    """
    own = os.getpid()
    # The other side ends a call that takes too long; if it has died itself, the kernel does so, by the alarm signal.
    for line in requests:
        for number, *values in json.loads(line):
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + EXIT_S)
            reply = call(*values)
            end_child(own)
            send(replies, [number, *reply])
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(ChildProcessError):  # it has no children
            collect_dead(MAX_DEAD)
    signal.setitimer(signal.ITIMER_REAL, EXIT_S)  # for threads that a function left behind
    end_all_children(EXIT_S / 2)


def end_child(own: int) -> None:
    """End this process if a function forked it from process `own`."""
    if os.getpid() != own:
        os._exit(0)


def send(replies: BinaryIO, message: Any) -> None:
    """Write a message as a line."""
    line = memoryview(_ENCODER.encode(message).encode() + b"\n")
    while line:
        line = line[replies.write(line) :]


def reason(error: BaseException, *own_files: str) -> str:
    """Format `ValueError: message (file.py, line 3)`, with the innermost line outside of `own_files`."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [f" ({os.path.basename(file)}, line {line})" for file, line in places if file not in own_files]
    try:
        message = str(error)
    except BaseException as second:
        message = f"(its text fails with {type(second).__name__})"
    return printable(f"{type(error).__name__[:MAX_NAME]}: {message[:MAX_REASON]}{places[-1] if places else ''}")
