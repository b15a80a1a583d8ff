"""The sandbox against programs that try to leave it, with all mechanisms of the kernel and with fewer."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sandbox_escapes import FLOODS, NAMES, OFF, STAY, programs
from waiting import wait_until

from mindrlhf.configs.grpo import RolloutSettings
from mindrlhf.environments.open import sandbox_note
from mindrlhf.environments.pool import EnvironmentPool
from mindrlhf.environments.protocol import READY
from mindrlhf.environments.ready import code_interpreter
from mindrlhf.environments.ready.confinement import held, readable
from mindrlhf.errors import UserError
from mindrlhf.workers.system_calls import call

SECRET = "correct horse battery staple"
SEVERAL = {
    "all": ("namespaces", "Landlock", "seccomp"),
    "no namespaces": ("Landlock", "seccomp"),
    "no Landlock": ("namespaces", "seccomp"),
}


class Outside:
    """What programs aim at, and its state."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / "file"
        self.file.write_text(f"the answers: {SECRET}")
        self.secret = folder / ".ssh" / "id_rsa"
        self.secret.parent.mkdir(mode=0o700)
        self.secret.write_text(SECRET)
        self.process = subprocess.Popen(["sleep", "1000"], env={"TOKEN": SECRET, "PATH": os.environ["PATH"]})
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.segment = call("shmget", 0, 4096, 0o1600)
        self.messages = call("msgget", 0, 0o1600)
        self.semaphores = call("semget", 0, 1, 0o1600)

    def aims(self) -> dict[str, object]:
        return {
            "process": self.process.pid,
            "file": str(self.file),
            "folder": str(self.folder),
            "secret": str(self.secret),
            "segment": self.segment,
            "messages": self.messages,
            "semaphores": self.semaphores,
            "port": self.listener.getsockname()[1],
        }

    def state(self) -> dict[str, object]:
        """Describe everything that a program must not change; its processor time and the like are left out."""
        process = psutil.Process(self.process.pid)
        files = {path.name: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in self.folder.rglob("*")}
        library = os.stat(os.__file__)
        return {
            "running": self.process.poll(),
            "stopped": process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP),
            "nice": process.nice(),
            "cores": process.cpu_affinity(),
            "limits": process.rlimit(psutil.RLIMIT_NOFILE),
            "own nice": os.getpriority(os.PRIO_PGRP, 0),
            "files": files,
            "text": self.file.read_text(),
            "attributes": os.listxattr(self.file),
            "library": (library.st_ctime_ns, os.listxattr(os.__file__)),
            "shared": sorted(path.name for path in Path("/dev/shm").glob("mindrlhf-escape*")),
            "ipc": [Path(f"/proc/sysvipc/{kind}").read_text().count("\n") for kind in ("shm", "msg", "sem")],
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()
        call("shmctl", self.segment, 0, 0)
        call("msgctl", self.messages, 0, 0)
        call("semctl", self.semaphores, 0, 0, 0)


@pytest.fixture(scope="module")
def found():
    """The machine's mechanisms."""
    return code_interpreter.mechanisms()


@pytest.fixture(scope="module", params=SEVERAL)
def several(request, found, tmp_path_factory):
    """What all programs print with some mechanisms, the state outside before and after, and folders left."""
    wanted = SEVERAL[request.param]
    if not set(wanted) <= set(found):
        pytest.skip(f"this kernel has only {', '.join(found) or 'nothing'}")
    outside = Outside(tmp_path_factory.mktemp("outside"))
    room = tmp_path_factory.mktemp("room")
    try:
        before = outside.state()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(code_interpreter, "mechanisms", lambda: wanted)
            patch.setattr(code_interpreter.tempfile, "tempdir", str(room))
            patch.setenv("ESCAPE_TOKEN", SECRET)
            text = "".join(map(code_interpreter.code_interpreter, programs(outside.aims())))
        yield text, before, outside.state(), list(room.iterdir()), outside
    finally:
        outside.close()


@pytest.mark.parametrize("name", NAMES)
def test_no_program_escapes(several, name):
    text, *_ = several
    assert f"{name}: refused: " in text
    assert f"{name}: ESCAPED" not in text
    assert SECRET not in text


def test_nothing_outside_has_changed(several):
    _, before, after, left, outside = several
    assert after == before
    assert left == []
    with pytest.raises(BlockingIOError):
        outside.listener.accept()


def test_programs_that_stay_are_ended(found):
    """By the time limit or by their own limits; no process and no file of theirs is left, even before the pool ends."""
    if not held(found):
        pytest.skip("this kernel cannot hold a model's code")
    with EnvironmentPool({"e": ""}, ["python"], workers=4, timeout_s=3.0, memory_mb=512) as pool:
        for number in range(len(STAY) + 1):
            pool.reset((number,), "e", {})
        for number, (code, _) in enumerate(STAY.values()):
            pool.call((number,), [("code_interpreter", {"code": code})])
        outcomes = {}
        while len(outcomes) < len(STAY):
            outcomes |= {each.key[0]: each for each in pool.collect(wait_for_one=True) if each.action == "call"}
        for number, (name, (_, expected)) in enumerate(STAY.items()):
            (answer,) = outcomes[number].answers
            assert re.search(expected, answer.failure or answer.value), (name, answer)
        pool.call((len(STAY),), [("code_interpreter", {"code": "1 + 1"})])
        (answer,) = pool.collect(wait_for_one=True)[-1].answers
        assert answer.value == "2"
        wait_until(lambda: not sandboxes())
        wait_until(lambda: all(not list(folder.iterdir()) for folder in Path(pool._files.name).iterdir()))


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_program_ends_with_its_caller(found, kind):
    """Also if the caller is killed alone, and its group is not."""
    if not set(SEVERAL[kind]) <= set(found):
        pytest.skip(f"this kernel has only {', '.join(found) or 'nothing'}")
    script = (
        "from mindrlhf.environments.ready import code_interpreter as tool\n"
        f"tool.mechanisms = lambda: {SEVERAL[kind]}\n"
        "tool.code_interpreter('while True: pass')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as caller:
        wait_until(sandboxes)
        caller.kill()
    wait_until(lambda: not sandboxes())


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("name", FLOODS)
def test_floods_are_ended(found, tmp_path, monkeypatch, name, kind):
    if not set(SEVERAL[kind]) <= set(found):
        pytest.skip(f"this kernel has only {', '.join(found) or 'nothing'}")
    monkeypatch.setattr(code_interpreter, "mechanisms", lambda: SEVERAL[kind])
    monkeypatch.setattr(code_interpreter.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(code_interpreter, "FOLDER_FILES", 100)  # disks are slow
    text = code_interpreter.code_interpreter(OFF + FLOODS[name])
    assert any(
        end in text[-400:] for end in ("No space left on device", "by the limits of its folder", "of its output")
    )
    assert list(tmp_path.iterdir()) == []


LACKING = {
    "no namespaces": (("unshare",), "Landlock\nseccomp\n2\n"),
    "no Landlock": (("landlock_create_ruleset",), "namespaces\nseccomp\n2\n"),
    "neither": (
        ("unshare", "landlock_create_ruleset"),
        "seccomp\nrefused: tool 'python': this machine cannot hold",
    ),
    "no filters": (("seccomp",), "namespaces\nLandlock\nrefused: .*cannot hold a model's code"),
}


@pytest.mark.parametrize("kind", LACKING)
def test_kernels_and_containers_that_lack_a_mechanism(found, kind):
    """A filter of our own refuses the calls, before the pool begins: the mechanisms are those that are left."""
    if len(found) < 3:
        pytest.skip(f"this kernel has only {', '.join(found) or 'nothing'}")
    calls, expected = LACKING[kind]
    script = (
        "import ctypes, errno, struct\n"
        "from mindrlhf.workers.system_calls import NUMBERS, NO_NEW_PRIVILEGES, call, prctl\n"
        "one = lambda code, value=0, no=0: struct.pack('HBBI', code, 0, no, value)\n"
        f"tests = [one(0x15, NUMBERS[name], 1) + one(6, 0x50000 | errno.ENOSYS) for name in {calls}]\n"
        "program = ctypes.create_string_buffer(one(0x20) + b''.join(tests) + one(6, 0x7FFF0000))\n"
        "prctl(NO_NEW_PRIVILEGES, 1)\n"
        "call('seccomp', 1, 0, struct.pack('HxxxxxxP', len(program) // 8, ctypes.addressof(program)))\n"
        "from mindrlhf.environments.pool import EnvironmentPool\n"
        "from mindrlhf.environments.ready.code_interpreter import mechanisms\n"
        "from mindrlhf.errors import UserError\n"
        "print(*mechanisms(), sep='\\n')\n"
        "try:\n"
        "    with EnvironmentPool({'e': ''}, ['python'], timeout_s=60.0) as pool:\n"
        "        pool.reset((0,), 'e', {})\n"
        "        pool.collect(True)\n"
        "        pool.call((0,), [('code_interpreter', {'code': '1 + 1'})])\n"
        "        print(pool.collect(True)[0].answers[0].value)\n"
        "except UserError as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.match(expected, done.stdout), (done.stdout, done.stderr)


def test_a_run_says_what_holds_code(found):
    assert sandbox_note(RolloutSettings(tools=("calculator",))) is None
    for name in ("python", READY["python"]):
        note = sandbox_note(RolloutSettings(tools=(name,)))
        assert note.startswith("code of the tool python: ")
        assert all(mechanism in note for mechanism in found)


def test_a_home_with_python_in_it_is_not_readable(monkeypatch, tmp_path):
    """Of a prefix only the libraries are, because it may be a user's home."""
    (tmp_path / "lib").mkdir()
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    assert str(tmp_path / "lib") in readable()
    assert not any(str(tmp_path / ".ssh").startswith(path) for path in readable())


@pytest.mark.parametrize("some", [(), ("Landlock",), ("namespaces",), ("namespaces", "Landlock"), ("seccomp",)])
def test_nothing_runs_where_nothing_holds_it(monkeypatch, some):
    """Unless a setting asks for that."""
    monkeypatch.setattr(code_interpreter, "mechanisms", lambda: some)
    with pytest.raises(UserError, match=r"cannot hold a model's code .* set rollout.sandbox: best_effort"):
        code_interpreter.code_interpreter("1 + 1")
    monkeypatch.setenv(code_interpreter.SETTING, code_interpreter.BEST_EFFORT)
    if set(some) <= set(code_interpreter.mechanisms()):
        assert code_interpreter.code_interpreter("1 + 1") == "2"
    assert "not held (there is" in code_interpreter.describe()


def sandboxes() -> list[psutil.Process]:
    """Processes of the sandbox, below this process or of nobody."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        own = os.getpid() in [process.info["ppid"], *(parent.pid for parent in process.parents())]
        if "ready import sandbox" in str(process.info["cmdline"]) and (own or process.info["ppid"] == 1):
            found.append(process)
    return found
