"""A worker that is killed in the middle of training takes the job down, and everybody says which one it was."""

import json

import jobs
import pytest
from workers import run_msrun

TWO_RANKS = ("train_yaml.parallel_config.data_parallel=2", "infer_yaml.parallel_config.data_parallel=2")

# Scoring runs in a child of each worker; in the second step that of rank 1 kills its parent, as a lack of memory would.
KILLING_REWARD = """
import os, signal

calls = 0

def killing(prompt, completion, fields):
    global calls
    calls += 1
    if os.environ["RANK_ID"] == "1" and calls > 8:  # 4 prompts of 4 samples on two ranks
        os.kill(os.getppid(), signal.SIGKILL)
    return len(set(completion)) / 10
"""


@pytest.mark.slow
@pytest.mark.msrun
def test_a_worker_killed_in_training_is_named(task, tmp_path):
    (tmp_path / "reward.py").write_text(KILLING_REWARD)
    reward = f"reward.functions=[{{name: '{tmp_path}/reward.py:killing'}}]"
    arguments = task.train(tmp_path / "out", *TWO_RANKS, reward)
    run = run_msrun(2, [jobs.ONE_STAGE, *arguments[1:]], timeout=300)  # the other one would wait for hours
    assert run.returncode != 0
    assert "rank 0 of 2: rank 1 is gone" in run.logs[0]
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 1
