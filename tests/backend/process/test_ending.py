"""The end of a process that runs a command: everything written, exit functions called, MindSpore left as it is."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading, time, types
from mindrlhf.backend.process.ending import end_with

class Graph:
    def __del__(self, write=open(sys.argv[2], "a").write):
        write("taken apart")

def later():
    time.sleep(0.2)
    print("a thread ended")

def main():
    library = sys.modules["mindspore"] = types.ModuleType("mindspore")
    library.get_context = {"device_target": sys.argv[1]}.get
    library.graph = Graph()
    atexit.register(print, "an exit function was called")
    threading.Thread(target=later).start()
    if sys.argv[1] == "none":
        raise SystemExit(4)
    return 3

end_with(main)
"""


def ended(device: str, tmp_path, **streams) -> tuple[subprocess.CompletedProcess, bool]:
    """The process, and whether it took the library's objects apart."""
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    script.write_text(SCRIPT)
    streams = {"stdout": subprocess.PIPE} | streams
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, script, device, notes]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, **streams)
    return done, notes.read_text() == "taken apart"


@pytest.mark.parametrize(("device", "code", "taken_apart"), [("CPU", 3, False), ("Ascend", 3, True), ("none", 4, True)])
def test_a_cpu_s_graphs_are_left_to_the_system(tmp_path, device, code, taken_apart):
    done, apart = ended(device, tmp_path)
    assert (done.returncode, apart) == (code, taken_apart), done.stderr
    assert done.stdout.splitlines() == ["a thread ended", "an exit function was called"]


def test_output_that_cannot_be_written_is_not_passed_over(tmp_path):
    with open("/dev/full", "w") as full:
        done, _ = ended("CPU", tmp_path, stdout=full)
    assert done.returncode == 120
    assert "No space left on device" in done.stderr


HARNESS = """
import runpy, sys

try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("it ended with", end.code)
sys.exit(7)
"""


def test_a_program_that_runs_a_command_has_its_own_exit_code(tmp_path):
    """As pytest does: failing tests would end with 0 after a command that ended well."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "harness.py").write_text(HARNESS)
    words = ["import sys; sys.argv[:1] = ['script.py']; import harness", "CPU", "notes"]
    done = subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert "it ended with 3" in done.stdout
