"""Runs with `optimizer.state`: killed and resumed without a difference, and resumed in another form."""

import random
from pathlib import Path

import jobs
import numpy as np
import phases
import pytest

SETTINGS = ("trainer.total_steps=4", "trainer.save_freq=1", "trainer.loggers=[jsonl]", "optimizer.eps=1e-5")
STATES = ("bfloat16", "int8")


def argv(task, folder: Path, state: str, *settings: str) -> list[str]:
    return task.sft(folder, *SETTINGS, f"optimizer.state={state}", *settings, resume_training="auto")


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_killed_and_resumed(task, tmp_path, state):
    """Checkpoints hold the moments in their form; their bytes and the model's are those of one run."""
    phases.to_the_end(argv(task, tmp_path / "whole", state), tmp_path / "phases")
    command = argv(task, tmp_path / "run", state)
    phases.kill_in(command, tmp_path / "log", "update", 3, random.Random(0))
    phases.to_the_end(command, tmp_path / "log")
    whole = stored(tmp_path / "whole")
    assert len(whole) == 1 + 4 * 3
    assert stored(tmp_path / "run") == whole
    step = "ckpt/step_000004/rank_0"
    shares = [
        len(whole[f"{step}/{kind}.safetensors"]) / len(whole[f"{step}/model.safetensors"])
        for kind in ("exp_avg", "exp_avg_sq")
    ]
    assert max(shares) < {"bfloat16": 0.6, "int8": 0.4}[state]


@pytest.mark.slow
def test_another_form_goes_on(task, tmp_path):
    """From float32 to int8 and back, with a sentence, and near the run that stayed in float32."""
    phases.to_the_end(argv(task, tmp_path / "whole", "float32"), tmp_path / "phases")
    for steps, state in ((2, "float32"), (3, "int8"), (4, "float32")):
        command = argv(task, tmp_path / "run", state, f"trainer.total_steps={steps}")
        output = phases.to_the_end(command, tmp_path / f"log{steps}")
        assert ("they are converted" in output) == (steps > 2)
    run, whole = (jobs.Run(tmp_path / name) for name in ("run", "whole"))
    for name, weight in whole.weights.items():
        assert np.linalg.norm(run.weights[name] - weight) <= 0.02 * np.linalg.norm(weight), name
