"""How a process hears that it is to stop, whatever MindSpore does with signals; without a run."""

import functools
import os
import signal
import subprocess
import sys

import pytest

from mindrlhf.backend.process.msrun import Msrun
from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.run import stop_signals
from mindrlhf.run.stop_signals import SIGNALS, StopSignals

# Of NumPy's library: with one it starts none that could take a signal.
THREADS = {"OMP_NUM_THREADS": "2"}
SLEEPER = """
import time
from mindrlhf.run.stop_signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.wanted:
        time.sleep(0.01)
    print("wanted", flush=True)
    time.sleep(30)
"""


def test_the_command_imports_no_numpy_before_it_blocks_signals():
    code = "import sys; from mindrlhf.commands import train; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_stops_at_once(number):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | THREADS,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "wanted\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == -number
    assert f"{number.name} was received: saving the state and stopping" in errors


# A MindRecord is written and read and a graph runs, which is when MindSpore sets its own handlers.
AT_WORK = """
import sys
import threading
from pathlib import Path
from mindrlhf.run.stop_signals import SIGNALS, StopSignals
with StopSignals() as signals:
    from mindrlhf.data.mindrecord import read_columns, write_columns
    file = f"{sys.argv[1]}/x.mindrecord"
    write_columns(file, {"x": {"type": "int64"}}, [{"x": 1}, {"x": 2}])
    assert read_columns(file) == {"x": [1, 2]}
    import mindspore
    from graph import doubled
    assert doubled(mindspore.Tensor([2.0])).asnumpy() == 4.0
    both = sum(1 << (number - 1) for number in SIGNALS)
    blocked = {
        int(task.parent.name): int(task.read_text().split("SigBlk:")[1].split()[0], 16) & both
        for task in Path("/proc/self/task").glob("*/status")
    }
    waiting = [thread.native_id for thread in threading.enumerate() if thread.name == "stop-signals"]
    assert len(blocked) > 2 and [task for task in blocked if blocked[task] != both] == waiting, (blocked, waiting)
    print("ready", flush=True)
    while not signals.wanted:
        doubled(mindspore.Tensor([2.0])).asnumpy()
    print(signals.reason, flush=True)
"""
GRAPH = """
import mindspore
mindspore.set_context(mode=mindspore.GRAPH_MODE)
@mindspore.jit
def doubled(x):
    return x + x
"""


def test_a_signal_while_mindspore_is_at_work(tmp_path):
    """No thread takes Ctrl-C, and it is called by its name."""
    (tmp_path / "graph.py").write_text(GRAPH)
    environment = os.environ | THREADS | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", AT_WORK, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    if process.stdout.readline() == "ready\n":
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "SIGINT was received\n"), errors


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals() as signals:
        assert not signals.wanted
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)


@pytest.mark.parametrize("joins", [True, False])
def test_the_end_of_msrun_is_a_wish_to_stop(monkeypatch, joins):
    """Unless it does not wait for its workers and always ends before them."""
    msrun = Msrun(os.getppid(), joins, None, frozenset(), {})
    monkeypatch.setattr(stop_signals, "find_msrun", lambda: msrun)
    signals = StopSignals()
    assert not signals.wanted
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert signals.wanted == joins


def test_a_shell_that_has_ended_is_no_msrun(monkeypatch):
    signals = StopSignals()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not signals.wanted


BLOCKED = """
import signal

def blocked(prompt, completion, fields):
    return float(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_reward_functions_have_no_signal_blocked(tmp_path):
    """Nor have the processes that they start, which would not end when they are told to."""
    (tmp_path / "rewards.py").write_text(BLOCKED)
    settings = RewardSettings(functions=[RewardFunctionSettings(name=f"{tmp_path}/rewards.py:blocked")])
    with StopSignals(), RewardRunner(settings) as runner:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(SIGNALS)
        assert runner.score([Sample("prompt", "answer", {})]).totals.tolist() == [0.0]


ASKED = """
import sys, time
from mindrlhf.run.stop_signals import StopSignals
with StopSignals() as signals:
    signals.asking = tuple(sys.argv[1:])
    print("ready", flush=True)
    while not signals.wanted:
        time.sleep(0.01)
    print(signals.reason, flush=True)
    sys.stdin.readline()
"""


def asked(*names: str, ignored: bool = False) -> subprocess.Popen:
    """A process that waits for a request to stop, and then for a line.

    ignored: SIGHUP is, as under nohup; otherwise it has its usual effect, also where the tests run under nohup.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    effect = signal.SIG_IGN if ignored else signal.SIG_DFL
    command = [sys.executable, "-c", ASKED, *names]
    prepare = functools.partial(signal.signal, signal.SIGHUP, effect)
    process = subprocess.Popen(command, text=True, env=os.environ | THREADS, preexec_fn=prepare, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_hangup_and_a_queue_ask_as_often_as_they_like(name):
    """A terminal's end comes several times; a SIGTERM may follow, and only a second one of these ends the process."""
    process, number = asked("SIGUSR1", "SIGUSR2", "SIGXCPU"), signal.Signals[name]
    process.send_signal(number)
    assert process.stdout.readline() == f"{name} was received\n"
    for further in (number, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(further)
        assert process.poll() is None
    while f"{signal.SIGTERM.name} was received" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_signals_of_queues_have_their_usual_effect_unless_asked_for(name):
    process = asked()
    process.send_signal(signal.Signals[name])
    assert process.wait(20) == -signal.Signals[name]


def test_a_hangup_under_nohup():
    process = asked(ignored=True)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM was received\n"
    process.communicate("\n", timeout=20)
    assert process.returncode == 0
