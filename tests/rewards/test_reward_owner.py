"""The runner inside a script of its own: what names mean there, and workers that end when their owner does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SCRIPT = """
import sys
from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

functions = tuple(RewardFunctionSettings(name=name) for name in sys.argv[1:])
runner = RewardRunner(RewardSettings(functions=functions, timeout_s=1.0))
print(*runner.score([Sample("", "process", {})]).totals.tolist(), flush=True)
runner.score([Sample("", sys.stdin.readline().strip(), {})])
sys.stdin.readline()
"""


@pytest.fixture
def start_script(root, tmp_path):
    """Starts SCRIPT, which has a package beside it, in a working directory with modules; gives the process."""
    app, work = tmp_path / "app", tmp_path / "work"
    (app / "my_rewards").mkdir(parents=True)
    work.mkdir()
    (app / "script.py").write_text(SCRIPT)
    (app / "my_rewards" / "__init__.py").write_text("")
    (app / "my_rewards" / "inner.py").write_text("def reward(prompt, completion, fields): return 1.0\n")
    for name in ("here", "beside"):
        (work / f"{name}.py").write_text("def reward(prompt, completion, fields): return 10.0\n")
    body = "return time.sleep(1000) if completion == 'hang' else float(os.getpid())"
    source = f"import os, time\ndef pid(completion): {body}\n"
    (work / "pid.py").write_text(source)
    started = []

    def start(*names):
        process = subprocess.Popen(
            [sys.executable, str(app / "script.py"), *names],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A shell's background jobs, and what they start, ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_names_mean_in_a_worker_what_they_mean_in_the_script(start_script):
    script = start_script("my_rewards.inner:reward", "here.py:reward", "beside:reward")
    assert script.stdout.readline() == "21.0\n"


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_an_idle_worker_ends_with_its_owner(start_script, ending):
    script = start_script("pid.py:pid")
    worker = psutil.Process(int(float(script.stdout.readline())))
    script.send_signal(ending)
    script.wait(timeout=10)
    assert psutil.wait_procs([worker], timeout=5)[1] == []


@pytest.mark.slow
def test_a_hanging_worker_ends_some_time_after_its_killed_owner(start_script):
    script = start_script("pid.py:pid")
    worker = psutil.Process(int(float(script.stdout.readline())))
    script.stdin.write("hang\n")
    script.stdin.flush()
    time.sleep(0.5)
    script.kill()
    assert psutil.wait_procs([worker], timeout=20)[1] == []
