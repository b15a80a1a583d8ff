"""GRPO with images under other schedules, roles and weights of rollouts; each run goes on bit for bit when resumed."""

import shutil

import jobs
import pytest
from safetensors.numpy import load_file, save_file
from seeing_task import make_seeing_task

REWARD = """
def likes(prompt, completion, fields):
    return fields["level"] + (len(set(completion)) > 4) + len(completion) / 100
"""
ENVIRONMENT = """
class Counter:
    def reset(self, level: str, seed: str) -> str | None:
        self.turns = 0
        return f"level {level}?" if int(seed) % 2 else None

    def reply(self, text: str) -> str | None:
        self.turns += 1
        return None if self.turns == 2 else f"{len(text)} <|image_pad|>"

    def get_reward(self) -> float:
        return self.turns
"""
SMALL = (
    "data.prompts_per_step=3",
    "rollout.num_generations=2",
    "rollout.max_new_tokens=6",
    "train.length_bucket=16",
    "optimizer.lr=1e-2",
    "algorithm.beta=0",
    "trainer.total_steps=3",
    "trainer.save_freq=1",
    "optimizer.lr_decay=cosine",
)
CASES = {
    "staleness": ("trainer.staleness=1",),
    "parts": ("trainer.staleness=1", "rollout.tokens_per_step=20"),
    "dynamic sampling": ("dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=2"),
    "critic": ("algorithm.advantage=gae",),
    "teacher": ("algorithm.advantage=distillation", "algorithm.teacher={teacher}"),
    "conversations": (
        "rollout.environment={folder}/counter.py:Counter",
        "rollout.max_new_tokens=64",
        "rollout.stop_strings=[e, '3', a, '1', o]",
    ),
    "int8": ("rollout.weights=int8",),
    "frozen": ("train.freeze=[vision, merger]", "algorithm.beta=0.1"),
    "adapters": ("lora.rank=2", "lora.target_modules=[qkv, q_proj]", "algorithm.beta=0.1"),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    task = make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)
    (task.rows.parent / "reward.py").write_text(REWARD)
    (task.rows.parent / "counter.py").write_text(ENVIRONMENT)
    shutil.copytree(task.model, task.rows.parent / "teacher")
    weights = load_file(task.model / "model.safetensors")
    larger = {name: 1.2 * array for name, array in weights.items()}
    save_file(larger, task.rows.parent / "teacher" / "model.safetensors", {"format": "pt"})
    return task


def training(seeing, output, *settings, **flags):
    reward = f"reward.functions=[{{name: '{seeing.rows.parent}/reward.py:likes'}}]"
    return seeing.training(output, reward, *SMALL, *settings, **{"enable_compile_cache": True} | flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_one_that_was_never_stopped(seeing, tmp_path, name):
    folder = seeing.rows.parent
    settings = tuple(one.format(teacher=folder / "teacher", folder=folder) for one in CASES[name])
    if name == "parts":
        settings = (*settings, "rollout_correction.level=token")
    assert jobs.call(training(seeing, tmp_path / "whole", *settings)) == 0
    whole = jobs.Run(tmp_path / "whole")
    shutil.copytree(whole.folder, tmp_path / "stopped")
    for step in ("step_000002", "step_000003", "hf", "hf_adapter"):
        shutil.rmtree(tmp_path / "stopped" / "ckpt" / step, ignore_errors=True)
    jobs.train_apart(training(seeing, tmp_path / "stopped", *settings, resume_training="auto"))
    again = jobs.Run(tmp_path / "stopped")
    assert again.responses == whole.responses
    ours, theirs = (one.folder / "ckpt" / "hf" / "model.safetensors" for one in (again, whole))
    assert ours.read_bytes() == theirs.read_bytes()
    for row in whole.metrics:
        if "rollout_corr/log_prob_diff/max" in row and name not in ("int8", "parts", "staleness"):
            assert row["rollout_corr/log_prob_diff/max"] < 2e-5
    if name == "conversations":
        assert max(row["conversation/turns"] for row in whole.metrics) > 1
        assert all(row["conversation/user_tokens"] > 1 for row in whole.metrics)


@pytest.mark.slow
def test_a_teacher_with_the_policy_s_weights_agrees_with_it(seeing, tmp_path):
    """It reads the same images: without them it would differ."""
    settings = ("algorithm.advantage=distillation", f"algorithm.teacher={seeing.model}", "trainer.total_steps=1")
    assert jobs.call(training(seeing, tmp_path, *settings)) == 0
    assert abs(jobs.Run(tmp_path).column("distillation/reverse_kl")[0]) < 1e-5
