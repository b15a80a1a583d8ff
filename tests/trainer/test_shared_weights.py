"""Weights that replicas share, in whole runs beside those that `test_layout_pairs.py` and others have."""

import jobs
import numpy as np
import pytest
from workers import run_ranks

SETTINGS = (
    *jobs.layout("train", "dp2zero3"),
    *jobs.layout("infer", "tp2"),
    "algorithm.beta=0.1",
    "memory.swap=True",
    "optimizer.lr=1e-3",
    "rollout.verify_weights=True",
    "train.max_tokens_per_micro_batch=150",  # several micro-batches a block
    "trainer.save_freq=1",
)


def run(task, folder, *settings: str, **flags) -> jobs.Run:
    arguments = task.train(folder, *SETTINGS, *settings, **flags)
    result = run_ranks(2, [jobs.ONE_STAGE, *arguments[1:]], timeout=500)
    assert result.returncode == 0, result.logs
    return jobs.Run(folder)


@pytest.mark.slow
@pytest.mark.msrun
def test_a_run_goes_on_bit_for_bit(task, tmp_path):
    through = run(task, tmp_path / "through")
    for steps in (1, 2, 3):
        again = run(task, tmp_path / "again", f"trainer.total_steps={steps}", resume_training="auto")
    assert again.metrics[-1]["step"] == 3
    for name, weight in through.weights.items():
        np.testing.assert_array_equal(again.weights[name], weight, err_msg=name)


@pytest.mark.slow
@pytest.mark.msrun
def test_updates_that_are_not_finite_are_skipped_on_all_ranks(task, tmp_path):
    """The first update throws the weights far away; no rank waits for another after that."""
    found = run(task, tmp_path, "optimizer.lr=1e18", "algorithm.updates_per_iteration=2", "trainer.total_steps=2")
    assert found.column("actor/skipped_updates").tolist() == [1, 2]
