"""Processes that begin where a new one has imported MindSpore and this package: forks of one that did nothing else.

A new process imports for 3 s of a processor, and the small runs of tests take little more. A fork is alone in its
memory, arguments, environment, folder and output, but shares what Python draws at its start: the order of sets of
texts. So tests of two processes that must agree, and of a start itself, use new ones (`subprocess`).

This file is also the script that imports and forks, one for each process of tests.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Read while modules are imported: an environment with others needs a new process.
FIXED = {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONPATH": str(ROOT)}
PACKAGE = "mindrlhf"
LINE_BYTES = 1 << 20


class WarmProcess:
    """A fork, with what tests need of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket):
        self._lines = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or minus the number of the signal that ended it; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[object], output: int, errors: int, environment: Mapping[str, str], cwd: Path | None = None
) -> WarmProcess | None:
    """Fork `python command`, or None if it needs a new process: an environment with others than `FIXED`.

    command: a script's path, or "-m" and this package; then arguments. output, errors: file descriptors.
    """
    if any(environment.get(name) != value for name, value in FIXED.items()):
        return None
    request = {
        "command": [str(part) for part in command],
        "environment": dict(environment),
        "cwd": str(cwd or os.getcwd()),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(_server())
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "big")], [output, errors])
    connection.sendall(content)
    return WarmProcess(connection)


def run(
    command: Sequence[object], environment: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """As `subprocess.run` with captured text: a fork if it can be one, otherwise a new process."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(command, output.fileno(), errors.fileno(), environment, cwd)
        if process is None:
            return run_new(command, environment, timeout, cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
        return subprocess.CompletedProcess([*command], code, *texts)


def run_new(
    command: Sequence[object], environment: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """As `run`, in a new process."""
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, cwd=cwd)


@functools.cache
def _server() -> str:
    """The address of the process that forks; it ends with this one."""
    folder = tempfile.mkdtemp(prefix="warm-")
    address = os.path.join(folder, "socket")
    process = subprocess.Popen(
        [sys.executable, __file__, address],
        env=os.environ | FIXED,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=False,
    )
    assert process.stdout.readline() == b"ready\n"
    atexit.register(_stop, process, folder)
    return address


def _stop(process: subprocess.Popen, folder: str) -> None:
    process.stdin.close()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)  # its socket is left if a signal has ended the process


def _import_all() -> None:
    """MindSpore, and this package's modules."""
    import mindspore  # noqa: F401

    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        if module.name.rpartition(".")[2] != "__main__":
            importlib.import_module(module.name)


def _serve(address: str) -> list[str]:
    """Fork for each request until the tests end; returns in the forks, with the command."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    os.write(1, b"ready\n")
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a process
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:  # the tests have ended
                os.unlink(address)
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if key.fd != listener.fileno():
                pid, connection = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # nobody waits any more
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()
                continue
            connection, _ = listener.accept()
            size, files, _, _ = socket.recv_fds(connection, 4, 2)
            content = b""
            while len(content) < int.from_bytes(size, "big"):
                content += connection.recv(LINE_BYTES)
            pid = os.fork()
            if pid == 0:
                for own in (listener, connection, selector, *(one for _, one in running.values())):
                    own.close()
                for descriptor in running:
                    os.close(descriptor)
                return _become(json.loads(content), files)
            for file in files:
                os.close(file)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = (pid, connection)
            selector.register(descriptor, selectors.EVENT_READ)
            connection.sendall(f"{pid}\n".encode())


def _become(request: dict, files: list[int]) -> list[str]:
    """Take over the request's output, environment and folder; returns its command."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, file in enumerate(files, 1):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.modules.pop("__mp_main__", None)  # this script, by the name that `multiprocessing` gives it
    gc.unfreeze()
    return request["command"]


def _run(command: list[str]) -> None:
    """As Python runs it: `-m` and a package, or a script."""
    try:
        if command[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(command[0]).resolve().parent)
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    _import_all()
    gc.collect()
    gc.freeze()
    _run(_serve(sys.argv[1]))
