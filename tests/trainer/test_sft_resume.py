"""Fine-tuning that is killed, stopped and resumed is the run that was never stopped, bit for bit.

The job has what a resume could forget: moments, a learning rate that changes, epochs that are shuffled anew, held-out
rows, a best step and patience.
"""

import random
from pathlib import Path

import jobs
import numpy as np
import phases
import pytest

STEPS = 5
SETTINGS = (
    f"trainer.total_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.save_max_ckpt_num=2",
    "trainer.test_freq=2",
    "trainer.early_stop_patience=9",
    "trainer.loggers=[console, jsonl]",
    "data.pairs_per_step=24",  # the third step crosses into the second epoch of 56 rows
    "data.val_share=0.125",
    "optimizer.lr_decay=cosine",
    "optimizer.warmup_steps=2",
    "optimizer.eps=1e-5",
    "train.length_bucket=48",
)


def argv(task, folder: Path, *settings: str, **flags) -> list[str]:
    return task.sft(folder, *SETTINGS, *settings, **{"resume_training": "auto"} | flags)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> Path:
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    phases.to_the_end(argv(task, folder / "run", resume_training=None), folder / "phases")
    return folder / "run"


def measured(folder: Path) -> list[dict]:
    """What is measured, without times and memory."""
    timed = ("timing", "perf")
    return [{name: row[name] for name in row if not name.startswith(timed)} for row in jobs.Run(folder).metrics]


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_same(folder: Path, whole: Path) -> None:
    assert listing(folder) == listing(whole)
    np.testing.assert_equal(measured(folder), measured(whole))
    arrays = [name for name in listing(whole) if name.endswith(".safetensors")]
    assert len(arrays) == 1 + 3 * len(list((whole / "ckpt").glob("step_*")))
    for name in arrays:
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_job_is_worth_comparing(whole):
    first, *rows = measured(whole)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    lr, third = 1e-2, np.cos(np.pi / 3)  # of the cosine, after one of the three updates behind the warm-up
    rates = [lr / 2, lr, lr, lr * (1 + third) / 2, lr * (1 - third) / 2]
    np.testing.assert_allclose([row["actor/lr"] for row in rows], rates, rtol=1e-6)
    assert rows[1]["training/epoch"] < 1 < rows[2]["training/epoch"]
    assert [row["step"] for row in (first, *rows) if "val/loss" in row] == [0, 2, 4, 5]
    best = min(rows, key=lambda row: row.get("val/loss", np.inf))["step"]
    kept = {path.name for path in (whole / "ckpt").glob("step_*")}
    assert kept == {f"step_{step:06d}" for step in (best, *range(STEPS - 2 + (best < STEPS - 1), STEPS + 1))}


def test_killed_and_stopped(task, whole, tmp_path):
    """SIGKILL while a checkpoint is written, SIGTERM in an update; the last start comes to the end."""
    command, log = argv(task, tmp_path / "run"), tmp_path / "phases"
    phases.kill_in(command, log, "save", 2, random.Random(0))
    output = phases.signalled(command, log, "update", 4)
    assert "stopped: the state after step 4 of 5 is saved in" in output
    assert phases.to_the_end(command, log).count("the fine-tuned model is in") == 1
    assert_same(tmp_path / "run", whole)


def test_a_damaged_checkpoint_is_refused_or_passed_over(task, whole, tmp_path, capfd):
    newest = whole / "ckpt" / f"step_{STEPS:06d}"
    damaged = tmp_path / "ckpt" / newest.name
    for path in (path for path in newest.rglob("*") if path.is_file()):
        copy = damaged / path.relative_to(newest)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    weights = damaged / "rank_0" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"none")
    assert jobs.call(argv(task, tmp_path / "other", resume_training=damaged)) == 2
    assert f"{weights}: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mind_dataset_dir": "test.mindrecord"}, "was trained on other prompts"),
        ({"settings": ["train_yaml.model.model_config.num_layers=1"]}, "num_layers"),
        ({"resume_training": "never"}, "holds checkpoints of an earlier run"),
    ],
)
def test_another_run_is_refused(task, whole, capfd, changes, message):
    settings = changes.pop("settings", ())
    if "mind_dataset_dir" in changes:
        changes = {"mind_dataset_dir": task.folder / changes["mind_dataset_dir"]}
    before = jobs.files(whole)
    assert jobs.call(argv(task, whole, *settings, **changes)) == 2
    assert message in capfd.readouterr().err
    assert jobs.files(whole) == before


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "dp2zero3"])
def test_another_layout_goes_on(task, whole, tmp_path, layout):
    """From the checkpoint of one process to two workers: the last step and the weights agree to rounding."""
    start = whole / "ckpt" / f"step_{STEPS - 1:06d}"
    command = argv(task, tmp_path / "run", *jobs.layout("train", layout), resume_training=start)
    phases.to_the_end(command, tmp_path / "phases", workers=2)
    run, expected = jobs.Run(tmp_path / "run"), jobs.Run(whole)
    assert [row["step"] for row in run.metrics] == [STEPS]
    for name in ("train/loss", "val/loss", "actor/grad_norm", "actor/lr", "training/epoch"):
        np.testing.assert_allclose(run.metrics[0][name], expected.metrics[-1][name], rtol=1e-5, err_msg=name)
    for name, weight in expected.weights.items():
        assert np.linalg.norm(run.weights[name] - weight) <= 1e-5 * np.linalg.norm(weight), name
