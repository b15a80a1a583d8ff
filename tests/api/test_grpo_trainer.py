"""`GRPOTrainer`: the run that the command makes, with callbacks, an iterator, resume and the trained model."""

import json

import jobs
import numpy as np
import pytest

from mindrlhf import GRPOConfig, GRPOTrainer, TrainerCallback, UserError

STEPS = 3
ROWS = [
    {"prompt": [{"role": "user", "content": f"{a} + {b} ="}], "total": a + b} for a in range(2, 6) for b in range(4)
]
# Per step 8 completions, which are 2 prompts.
KEYS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": True,
}
REWARD = """
def variety(prompts, completions, total, **columns):
    assert all(prompt[0]["content"].startswith(("2 ", "3 ", "4 ", "5 ")) for prompt in prompts)
    assert all(isinstance(number, int) for number in total)
    return [len(set(message["content"])) / 10 for (message,) in completions]
"""


class Noting(TrainerCallback):
    """Notes each call with the step, and asks for a stop after one."""

    def __init__(self, stop_after=None):
        self.calls, self.logs, self.stop_after = [], [], stop_after

    def __getattr__(self, event):
        if not event.startswith("on_"):
            raise AttributeError(event)

        def note(args, state, control, logs=None, **others):
            self.calls.append((event, state.global_step))
            if logs:
                self.logs.append(logs)
            if event == "on_step_end" and state.global_step == self.stop_after:
                control.should_training_stop = True

        return note


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """The file of a batch function, and the function."""
    path = tmp_path_factory.mktemp("reward") / "rewards.py"
    path.write_text(REWARD)
    namespace = {}
    exec(REWARD, namespace)
    return path, namespace["variety"]


@pytest.fixture(scope="module")
def make(model, reward):
    """A trainer that writes into a folder."""

    def of(folder, *callbacks, **keys):
        args = GRPOConfig(folder, **KEYS | keys)
        return GRPOTrainer(model, reward[1], args, ROWS, eval_dataset=ROWS[:3], callbacks=callbacks)

    return of


@pytest.fixture(scope="module")
def trained(make, tmp_path_factory):
    """A trainer after its training, its callback, and what `train` gave."""
    noting = Noting()
    trainer = make(tmp_path_factory.mktemp("trained") / "run", noting)
    return trainer, noting, trainer.train()


def test_callbacks_are_called_in_order(trained):
    _, noting, _ = trained
    step = [("on_step_begin", "on_step_end", "on_log"), ("on_save",)]
    expected = [("on_init_end", 0), ("on_train_begin", 0)]
    for number in range(1, STEPS + 1):
        ends = [*step[0], *(["on_evaluate"] if number == STEPS else []), *step[1]]
        expected += [(event, number - (event == "on_step_begin")) for event in ends]
    assert noting.calls == [*expected, ("on_train_end", STEPS)]


def test_metrics_have_both_names(trained):
    trainer, noting, result = trained
    rows = jobs.Run(trainer.output).metrics
    assert result.global_step == len(rows) == STEPS
    assert result.metrics["reward"] == result.metrics["critic/rewards/mean"] == rows[-1]["critic/rewards/mean"]
    assert result.training_loss == result.metrics["loss"] == rows[-1]["actor/loss"]
    assert result.metrics["rewards/variety/mean"] == rows[-1]["reward/variety/mean"]
    assert [logs["reward"] for logs in noting.logs] == [row["critic/rewards/mean"] for row in rows]
    assert len({row["actor/grad_norm"] for row in rows}) == STEPS
    assert 0 < result.metrics["reward"] < 1
    history = trainer.state.log_history
    assert [entry["step"] for entry in history] == [1, 2, 3, 3]
    assert history[-1]["eval_reward"] == rows[-1]["val-aux/fields/reward/mean@1"]


def test_the_command_makes_the_same_run(trained, model, reward, tmp_path):
    """Bit for bit, with a file for each object of the program."""
    for name, rows in (("train", ROWS), ("test", ROWS[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "grpo_config": "preset:trl",
        "load_sft_checkpoint_infer": model,
        "mind_dataset_dir": tmp_path / "train.jsonl",
        "save_ckpt_dir": tmp_path / "run" / "ckpt",
        "enable_compile_cache": True,
    }
    settings = {
        "reward.functions": f"[{{name: '{reward[0]}:variety'}}]",
        "data.prompts_per_step": 2,
        "data.val_dataset": tmp_path / "test.jsonl",
        "validation.reward": "all",
        "rollout.num_generations": 4,
        "rollout.max_new_tokens": 6,
        "optimizer.lr": 1e-2,
        "trainer.total_steps": STEPS,
        "trainer.save_freq": 1,
        "trainer.test_freq": 3,
        "trainer.loggers": "[console, jsonl]",
        "trainer.progress": False,
    }
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    assert jobs.call(["train", *given, *(f"{key}={value}" for key, value in settings.items())]) == 0
    ours, theirs = jobs.Run(trained[0].output), jobs.Run(tmp_path / "run")
    np.testing.assert_equal(ours.kept_metrics, theirs.kept_metrics)
    weights = [path.relative_to(ours.folder) for path in ours.folder.rglob("*.safetensors")]
    assert len(weights) > STEPS
    assert all((ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes() for name in weights)


def test_a_stopped_run_goes_on_as_if_it_had_not(trained, make, tmp_path):
    """Left after a step, then stopped by a callback."""
    noting = Noting(stop_after=2)
    trainer = make(tmp_path / "run", noting, save_steps=1000)
    iterator = trainer.train_iter()
    assert next(iterator)["step"] == 1
    with pytest.raises(UserError, match="under way"):
        trainer.evaluate()
    iterator.close()
    assert trainer.train(resume_from_checkpoint=True).global_step == 2
    assert noting.calls[-1] == ("on_train_end", 2)
    trainer.save_model(tmp_path / "first")  # of the checkpoint
    assert (tmp_path / "first" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="resume_from_checkpoint=True"):
        trainer.train()
    noting.stop_after = None
    steps = [logs["step"] for logs in trainer.train_iter(resume_from_checkpoint=True)]
    assert steps == [3]
    ours, theirs = jobs.Run(trainer.output), jobs.Run(trained[0].output)
    np.testing.assert_equal(ours.kept_metrics, theirs.kept_metrics)
    weights = [(run.folder / "ckpt" / "hf" / "model.safetensors").read_bytes() for run in (ours, theirs)]
    assert weights[0] == weights[1]


def test_the_trained_model_is_used(trained, model, tmp_path):
    """`save_model` copies it, `evaluate` measures what training has measured last, `generate` answers with it."""
    trainer, noting, _ = trained
    trainer.save_model(tmp_path / "saved")
    weights = (tmp_path / "saved" / "model.safetensors").read_bytes()
    assert weights == (trainer.checkpoints / "hf" / "model.safetensors").read_bytes()
    assert weights != (model / "model.safetensors").read_bytes()
    calls, history = len(noting.calls), trainer.state.log_history[-1]
    measured = trainer.evaluate()
    assert measured["eval_reward"] == pytest.approx(history["eval_reward"])
    assert noting.calls[calls:] == [("on_evaluate", STEPS)]
    assert trainer.generate("2 + 3 =", temperature=0.0, max_new_tokens=4) == trainer.generate(
        ["2 + 3 ="], temperature=0.0, max_new_tokens=4
    )
    several = trainer.generate([ROWS[0]["prompt"]], num_generations=3, max_new_tokens=4)
    assert [len(answers) for answers in several] == [3]


def test_curves_and_plan(trained):
    trainer, _, _ = trained
    assert trainer.plot()._repr_png_().startswith(b"\x89PNG")
    plan = trainer.plan()
    assert "fits" in plan
    assert "prompts of at most" in plan
