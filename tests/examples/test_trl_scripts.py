"""TRL's scripts in examples/trl run with another model's path, and under msrun with two processes."""

import json
import re
import runpy

import jobs
import numpy as np
import pytest
import workers

pytest.importorskip("datasets")
SCRIPTS = jobs.ROOT / "examples" / "trl"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return jobs.make_task(tmp_path_factory.mktemp("task"), layers=1)


@pytest.fixture(scope="module")
def model(task, tmp_path_factory):
    return jobs.write_model(task, tmp_path_factory.mktemp("model") / "hf", num_layers=1)


@pytest.fixture
def script(model, tmp_path, monkeypatch):
    """Write a script with this model's path and other changes; it runs in the folder of the test."""
    monkeypatch.chdir(tmp_path)

    def write(name, **changes):
        text, found = re.subn(r'^MODEL = ".*?"', f'MODEL = "{model}"', (SCRIPTS / name).read_text(), flags=re.M)
        assert found == 1
        for key, value in changes.items():
            text, found = re.subn(rf"\b{key}=[^,]*,", f"{key}={value},", text)
            assert found == 1, key
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.slow
def test_batch_rewards(script, tmp_path):
    runpy.run_path(str(script("grpo_batch_reward.py", max_steps=2)), run_name="__main__")
    run = jobs.Run(tmp_path / "out" / "trl_grpo")
    assert len(run.metrics) == 2
    assert all(-1 < row["reward/brief/mean"] < 0 <= row["reward/right/mean"] <= 1 for row in run.metrics)
    half = run.column("reward/right/mean") + 0.5 * run.column("reward/brief/mean")
    np.testing.assert_allclose(run.column("critic/rewards/mean"), half, rtol=1e-5)
    saved = run.folder / "model" / "model.safetensors"
    assert saved.read_bytes() == (run.folder / "ckpt" / "hf" / "model.safetensors").read_bytes()


def test_held_out_problems_and_a_callback(script, tmp_path, capsys):
    runpy.run_path(str(script("grpo_eval_callback.py", max_steps=1, eval_steps=1, beta=0.0)), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1: eval_reward 0.0")]
    assert len(lines) == 2  # of the run, and of `evaluate` behind it
    settings = json.loads((tmp_path / "out" / "trl_eval" / "settings.json").read_text())["grpo"]
    assert settings["data"]["prompts_per_step"] == 4
    assert settings["algorithm"]["aggregation"] == "dr_grpo"


def test_fine_tuning(script, tmp_path):
    runpy.run_path(str(script("sft.py", learning_rate=1e-2)), run_name="__main__")
    run = jobs.Run(tmp_path / "out" / "trl_sft")
    assert len(run.metrics) == 20  # 2 epochs of 160 rows, 16 a step
    assert [row["step"] for row in run.metrics if "val/loss" in row] == [10, 20]
    assert run.column("train/loss")[-1] < run.column("train/loss")[0]
    assert (run.folder / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.msrun
def test_two_processes_are_the_parallel_run(script, tmp_path):
    """The same steps as one process's with twice the completions, up to rounding; measured, too, in the same script."""
    changes = {"max_steps": 2, "per_device_train_batch_size": 16, "eval_steps": 1, "beta": 0.0}
    whole = script("grpo_eval_callback.py", **changes)
    runpy.run_path(str(whole), run_name="__main__")
    alone = jobs.Run((tmp_path / "out" / "trl_eval").rename(tmp_path / "alone"))
    parallel = script("grpo_eval_callback.py", **changes | {"per_device_train_batch_size": 8})
    result = workers.run_msrun(2, [parallel], PYTHONPATH=str(jobs.ROOT), timeout=300)
    assert result.returncode == 0, result.output
    both = jobs.Run(tmp_path / "out" / "trl_eval")
    for name in ("critic/rewards/mean", "actor/grad_norm", "response_length/mean"):
        np.testing.assert_allclose(both.column(name), alone.column(name), rtol=1e-4, err_msg=name)
    for name, array in alone.weights.items():
        np.testing.assert_allclose(both.weights[name], array, atol=1e-6, err_msg=name)
    assert result.output.count("step 2: eval_reward") + result.logs[0].count("step 2: eval_reward") >= 2
