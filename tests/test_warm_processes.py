"""Forks of a process that has imported everything behave as new processes do."""

import os
import signal
import subprocess

import pytest
import warm

SCRIPT = """
import os, sys
from pathlib import Path
print(sys.argv[1:], os.environ.get("ASKED"), Path.cwd().name, __name__, Path(__file__).name, Path(sys.path[0]).name)
print(sorted(set(sys.modules) & {"warm", "__mp_main__"}), sys.stdin.read() == "")
print("warned", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "made" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def test_a_script_has_its_arguments_environment_folder_and_output(script, tmp_path):
    done = warm.run([script, "3", "x"], os.environ | warm.FIXED | {"ASKED": "for"}, 60, tmp_path)
    first, second = done.stdout.splitlines()
    assert first == f"['3', 'x'] for {tmp_path.name} __main__ script.py made"
    assert second == "[] True"
    assert (done.stderr, done.returncode) == ("warned\n", 3)


def test_an_error_ends_it_as_python_ends(script):
    script.write_text("raise KeyError('no such thing')\n")
    fork, new = (run([script], os.environ | warm.FIXED, 60) for run in (warm.run, warm.run_new))
    assert fork.returncode == new.returncode == 1
    assert fork.stderr.splitlines()[-1] == new.stderr.splitlines()[-1] == "KeyError: 'no such thing'"


def test_signals_and_timeouts(script):
    script.write_text("import time\ntime.sleep(600)\n")
    with open(os.devnull, "w") as output:
        process = warm.start([script], output.fileno(), output.fileno(), os.environ | warm.FIXED)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == process.poll() == -signal.SIGTERM
    process.kill()  # nothing is left to kill


def test_other_threads_need_a_new_process(script):
    environment = os.environ | warm.FIXED | {"OMP_NUM_THREADS": "2"}
    assert warm.start([script, "0"], 1, 2, environment) is None
    assert warm.run([script, "4"], environment, 60).returncode == 4
