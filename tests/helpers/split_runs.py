"""Runs whose ranks train and generate apart, and the same runs with ranks that do both."""

from pathlib import Path

import jobs
import numpy as np

SETTINGS = (
    *("optimizer.lr=1e-2", "optimizer.eps=1e-5", "train.length_bucket=48", "train.max_tokens_per_micro_batch=240"),
    *("algorithm.beta=0.1", "algorithm.updates_per_iteration=2", "algorithm.kl_in_reward=True"),
    *("trainer.test_freq=2", "validation.limit=3", "validation.max_new_tokens=4", "trainer.progress=False"),
    *("rollout_correction.level=token", *jobs.ONE_LAYER),  # as one step behind: the same graphs
)
BEHIND = "trainer.staleness=1"
# What differs between placements: times, memory, what moves, and the age of answers, which turns have not.
PLACED = ("timing", "perf", "reshard/", "swap/", "trainer/", "generator/", "scorer/", "sample/stale")
PLACED += ("sample/trajectory_spans",)


def arguments(task, folder, *settings, **flags) -> list[str]:
    held_out = f"data.val_dataset={task.folder}/test.mindrecord"
    return task.train(folder, *SETTINGS, held_out, *settings, **flags)


def divided(trainers: int, generators: int, scorers: int = 0) -> dict[str, str]:
    sides = {"trainer_ranks": trainers, "generator_ranks": generators, "scorer_ranks": scorers}
    return {flag: str(ranks) for flag, ranks in sides.items() if ranks}


def split(task, folder, trainers: int, generators: int, *settings, scorers: int = 0, **flags) -> jobs.Run:
    argv = arguments(task, folder, *settings, **divided(trainers, generators, scorers), **flags)
    jobs.train_apart(argv, trainers + generators + scorers, timeout=400)
    return jobs.Run(folder)


def together(task, folder, *settings, workers: int = 0, **flags) -> jobs.Run:
    jobs.train_apart(arguments(task, folder, *settings, **flags), workers, timeout=400)
    return jobs.Run(folder)


def measured(run: jobs.Run) -> list[dict]:
    return [{name: row[name] for name in row if not name.startswith(PLACED)} for row in run.metrics]


def column(run: jobs.Run, name: str) -> np.ndarray:
    """One metric over the steps; the first row is a measurement before them."""
    return np.array([row[name] for row in run.metrics[1:]])


def rewards(run: jobs.Run) -> list[list[float]]:
    """The rewards of every recorded group, in order."""
    return [experience.rewards.tolist() for _, experiences in run.rollouts for experience in experiences]


def assert_same(run: jobs.Run, other: jobs.Run) -> None:
    """To the last bit: responses, rewards, metrics, weights."""
    assert run.responses == other.responses
    np.testing.assert_equal(rewards(run), rewards(other))
    np.testing.assert_equal(measured(run), measured(other))
    name = "ckpt/hf/model.safetensors"
    assert (run.folder / name).read_bytes() == (other.folder / name).read_bytes()


# Of runs that are killed and resumed.
STEPS = 5
LONG = (
    *(f"trainer.total_steps={STEPS}", "trainer.save_freq=1", "rollout.max_new_tokens=8"),
    *("dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=6", "dynamic_sampling.max_rounds=3"),
    *(f"{role}_yaml.model.model_config.num_layers=1" for role in ("train", "infer")),
    "trainer.loggers=[console, jsonl]",
)


def long(task, folder: Path, *settings: str, **flags) -> list[str]:
    """A run with dynamic sampling that goes on from its newest checkpoint."""
    return arguments(task, folder, *LONG, *settings, **({"resume_training": "auto"} | flags))
