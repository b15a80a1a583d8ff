"""Processes that reward functions begin end with the function's process, whatever session or parent they have."""

import time

import psutil
import pytest
from reward_pools import runner, texts

SOURCE = """
import os, signal, subprocess, time

SLEEP = ["sleep", "98766"]

def leaves(prompt, completion, fields):
    if completion == "twice":
        subprocess.run(["sh", "-c", "setsid sleep 98766 &"], env={"PATH": os.environ["PATH"]})
        time.sleep(0.5)
    else:
        subprocess.Popen(SLEEP, start_new_session=True)
    if completion in ("hangs", "twice"):
        time.sleep(1000)
    if completion == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def sleeping():
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "98766"]]


@pytest.mark.parametrize("completion", ["returns", "hangs", "twice", "dies"])
def test_nothing_is_left(tmp_path, completion):
    (tmp_path / "leaving.py").write_text(SOURCE)
    with runner(f"{tmp_path / 'leaving.py'}:leaves", timeout_s=2.0) as pool:
        table = pool.score(texts(completion))
        assert (table.totals[0] == 1.0) == (completion == "returns")
        patience = 500 if completion == "returns" else 0  # a program that has just begun has no name yet
        while patience and not sleeping():
            time.sleep(0.01)
            patience -= 1
        assert bool(sleeping()) == (completion == "returns")
    assert psutil.wait_procs(sleeping(), timeout=20)[1] == []
