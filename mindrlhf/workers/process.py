"""Owner's side of one worker process: start, greeting, end."""

import os
import signal
import subprocess
import sys
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mindrlhf.files.shipped import PACKAGE
from mindrlhf.workers.descendants import KILL_TIMEOUT_S, MARK, end_marked
from mindrlhf.workers.peer import Loss, Peer

START_TIMEOUT_S = 60.0  # for importing the functions' modules
STOP_TIMEOUT_S = 1.0
# The worker finds the modules of this process and, like a script, the modules of the working directory.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"


class WorkerProcess(Peer):
    """Fresh interpreter that runs `main` of a module.

    A fork would inherit threads. Ctrl-C does not reach its process group. What it begins is ended with it.
    ready: it has answered its setup with a greeting. refusal: message of the UserError that it sent instead.
    """

    def __init__(
        self,
        worker: str,
        setup: Any,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ):
        """Start the process and send it `setup`.

        worker: the module. timeout_s: seconds for one call. inherited: descriptors that it keeps, under their numbers.
        """
        paths = [*(path or os.getcwd() for path in sys.path), str(PACKAGE.parent), os.getcwd()]
        command = [sys.executable, "-c", _BOOTSTRAP.format(worker), *dict.fromkeys(paths)]
        threads = {"OMP_NUM_THREADS": "1"}  # the cores belong to the training
        variables = {**os.environ, **threads, MARK: uuid.uuid4().hex, **(environment or {})}
        # The worker closes stderr first of all, so that stderr holds only errors of a failing start.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(
            command, **pipes, start_new_session=True, env=variables, pass_fds=tuple(inherited)
        )
        super().__init__(self._process.stdout.fileno(), self._process.stdin.fileno(), timeout_s, START_TIMEOUT_S)
        self._mark = variables[MARK]
        self.refusal: str | None = None
        self.ready = False
        self._post(setup)

    @property
    def idle(self) -> bool:
        return self.ready and not self.calls

    def alive(self) -> bool:
        """Test that the process runs; an idle one that sends output counts as ended."""
        if self.idle:
            self.collect()
        return not self.exited and self._process.poll() is None

    def loss(self) -> Loss | None:
        """Explain why a hanging or dead process gives no greeting or reply; None otherwise."""
        if self.refusal:
            return Loss(self.refusal)
        loss = super().loss()
        if loss and loss.timed_out and not self.ready:
            return Loss(f"importing them takes longer than {START_TIMEOUT_S:g} s")
        return loss

    def stop(self) -> None:
        """End the process and all that it has begun.

        A busy process is ended at once; an idle one may leave by itself.
        """
        self._process.stdin.close()
        self._process.stdout.close()
        if self.idle:  # the end of its input lets it leave by itself
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        end_marked(self._mark)
        self.leave()

    def kill(self) -> None:
        """Kill the process group; `stop` has to follow."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def leave(self) -> None:
        """End the process, without what has left its group."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            pipe.close()
        self.exited = True

    @abstractmethod
    def _greet(self, greeting: Any) -> None:
        """Take the worker's answer to its setup; ValueError for an invalid one."""

    def _receive(self, message: Any) -> list[tuple[Any, Any]]:
        if self.ready:
            return super()._receive(message)
        match message:
            case {"error": str(sentence)}:
                self.refusal = sentence
                self.exited = True
            case {"greeting": greeting}:
                self._greet(greeting)
                self.ready = True
            case _:
                raise ValueError
        return []

    def _end_reason(self) -> str:
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its process stopped answering"
        if code < 0:
            return f"its process died of signal {-code} ({signal.strsignal(-code)})"
        last = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process ended with exit code {code}" + (f" ({last})" if last else "")
