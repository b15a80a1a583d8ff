"""Whole GRPO runs through Ascend's operators, on the CPU in float16: killed and resumed, layers computed again."""

import random

import jobs
import numpy as np
import phases
import pytest

# Heads of 16, which attention on Ascend takes, in float16, which the CPU computes.
MODEL = ("num_heads=2", "n_kv_heads=1", "num_layers=2", "compute_dtype=float16")
SETTINGS = (
    *(f"{role}_yaml.model.model_config.{key}" for role in ("train", "infer") for key in MODEL),
    "trainer.total_steps=4",
    "trainer.save_freq=1",
    "trainer.progress=False",
    "optimizer.lr=1e-3",
    "memory.swap=True",
)


@pytest.fixture(autouse=True)
def _contracts(monkeypatch):
    monkeypatch.setenv(phases.ON_CONTRACTS, "1")


def weights_file(run: jobs.Run):
    return run.folder / "ckpt" / "hf" / "model.safetensors"


def without_swap(row: dict) -> dict:
    """Metrics but for the bytes that move, which are others in the first step of a process."""
    return {name: value for name, value in row.items() if not name.startswith("swap/")}


def trained(task, folder, *settings: str) -> jobs.Run:
    phases.to_the_end(task.train(folder, *SETTINGS, *settings, resume_training="auto"), folder.with_suffix(".phases"))
    return jobs.Run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "update", "save"])
def test_a_killed_run_resumes_to_the_same_bits(task, tmp_path, phase):
    whole = trained(task, tmp_path / "whole")
    argv = task.train(tmp_path / "cut", *SETTINGS, resume_training="auto")
    phases.kill_in(argv, tmp_path / "phases", phase, 3, random.Random(phase))
    resumed = trained(task, tmp_path / "cut")
    assert resumed.responses == whole.responses
    np.testing.assert_equal(*(list(map(without_swap, run.kept_metrics)) for run in (resumed, whole)))
    assert weights_file(resumed).read_bytes() == weights_file(whole).read_bytes()


@pytest.mark.slow
def test_layers_that_are_computed_again_train_the_same(task, tmp_path):
    """Within float16's rounding, of a rate of 1e-3."""
    kept = trained(task, tmp_path / "kept")
    again = trained(task, tmp_path / "again", "train_yaml.recompute_config.recompute=True")
    assert again.responses[:16] == kept.responses[:16]
    np.testing.assert_allclose(again.column("actor/grad_norm")[1], kept.column("actor/grad_norm")[1], rtol=2e-3)
    for name, weight in again.weights.items():
        assert np.abs(weight - kept.weights[name]).max() < 4 * 1e-3
