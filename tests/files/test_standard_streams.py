"""Standard output that is closed, full or without a reader: trainings go on, other commands say it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from mindrlhf.errors import UserError
from mindrlhf.files.standard_streams import guard_streams
guard_streams(lasting=sys.argv[1] == "lasting")
try:
    for number in range(3):
        print("line", number, flush=True)
        print("error", number, file=sys.stderr, flush=True)
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
opened = os.open(os.devnull, os.O_RDONLY)
assert opened > 2, opened
open(os.environ["DONE"], "w").write("done")
"""


def run(tmp_path, how: str, kind: str) -> subprocess.CompletedProcess:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = f"exec {sys.executable} {tmp_path}/program.py {kind} {how}"
    environment = os.environ | {"DONE": str(tmp_path / "done")}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    "how", [">/dev/full", ">&-", "> >(exec true; sleep 1)", "2>&- >&-", "<&- >&- 2>&-", "2>/dev/full"]
)
def test_a_training_goes_on(tmp_path, how):
    done = run(tmp_path, how, "lasting")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "done"
    assert "Traceback" not in done.stderr
    if "2>" not in how:
        assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
            "error 0",
            "error 1",
            "error 2",
        ]
    if how in (">/dev/full", ">&-"):
        reason = "it is closed" if "-" in how else "No space left on device"
        said = f"standard output cannot be written ({reason}); the run goes on without it"
        assert done.stderr.count(said) == 1


def test_a_reader_that_leaves(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    for kind, code in (("lasting", 0), ("ending", 141)):
        read, write = os.pipe()
        os.close(read)
        environment = os.environ | {"DONE": str(tmp_path / kind)}
        command = [sys.executable, str(tmp_path / "program.py"), kind]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
        os.close(write)
        assert (done.returncode, (tmp_path / kind).exists()) == (code, kind == "lasting"), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("Broken pipe") == (kind == "lasting")


def test_another_command_ends_with_a_sentence(tmp_path):
    done = run(tmp_path, ">/dev/full", "ending")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("standard output cannot be written (No space left on device)")
    assert not (tmp_path / "done").exists()


def test_output_arrives(tmp_path):
    done = run(tmp_path, "", "ending")
    assert (done.returncode, done.stdout) == (0, "line 0\nline 1\nline 2\n")
