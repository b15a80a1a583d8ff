"""`SFTTrainer`: the run that the command makes, on rows in TRL's forms."""

import json

import jobs
import numpy as np
import pytest

from mindrlhf import SFTConfig, SFTTrainer

STEPS = 3


def talk(a, b):
    question, answer = f"{a} + {b} =", f"It is {a + b}."
    return [{"role": "user", "content": question}], [{"role": "assistant", "content": answer}]


TALKS = [talk(a, b) for a in range(4) for b in range(3)]
ROWS = [{"messages": prompt + completion} for prompt, completion in TALKS]
KEYS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = SFTTrainer(model, SFTConfig(folder, **KEYS), ROWS, ROWS[:4])
    return trainer, trainer.train()


def test_metrics_have_both_names(trained):
    trainer, result = trained
    losses = jobs.Run(trainer.output).column("train/loss")
    assert len(losses) == STEPS
    assert result.training_loss == result.metrics["loss"] == losses[-1] < losses[0]
    assert trainer.state.log_history[-1]["eval_loss"] == result.metrics["val/loss"]


def test_the_command_makes_the_same_run(trained, model, tmp_path):
    for name, rows in (("train", ROWS), ("test", ROWS[:4])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--load_sft_checkpoint_train", model, "--mind_dataset_dir", tmp_path / "train.jsonl")
    flags += ("--enable_compile_cache", True)
    settings = {
        "seed": 42,
        "data.pairs_per_step": 4,
        "data.max_length": 1024,
        "data.val_dataset": tmp_path / "test.jsonl",
        "optimizer.lr": 1e-2,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0,
        "trainer.total_steps": STEPS,
        "trainer.test_freq": 3,
        "trainer.val_before_train": False,
        "trainer.loggers": "[console, jsonl]",
        "trainer.progress": False,
    }
    given = (f"{key}={value}" for key, value in settings.items())
    assert jobs.call(["sft", *flags, "--save_ckpt_dir", tmp_path / "run" / "ckpt", *given]) == 0
    ours, theirs = jobs.Run(trained[0].output), jobs.Run(tmp_path / "run")
    np.testing.assert_equal(ours.kept_metrics, theirs.kept_metrics)
    assert all(np.array_equal(array, theirs.weights[name]) for name, array in ours.weights.items())


def test_the_trained_model_is_measured(trained):
    trainer, result = trained
    assert trainer.evaluate()["eval_loss"] == pytest.approx(result.metrics["val/loss"], rel=1e-6)
