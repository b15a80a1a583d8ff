"""Ranks that only train and ranks that only generate together give what one process gives, to the last bit."""

import random
import subprocess
from pathlib import Path

import jobs
import numpy as np
import phases
import pytest

SETTINGS = (
    *("optimizer.lr=1e-2", "optimizer.eps=1e-5", "train.length_bucket=48", "train.max_tokens_per_micro_batch=240"),
    *("algorithm.beta=0.1", "algorithm.updates_per_iteration=2", "algorithm.kl_in_reward=True"),
    *("trainer.test_freq=2", "validation.limit=3", "validation.max_new_tokens=4", "trainer.progress=False"),
    *("rollout_correction.level=token", *jobs.ONE_LAYER),  # as one step behind: the same graphs
)
BEHIND = "trainer.staleness=1"
# What differs between placements: times, memory, what moves, and the age of answers, which turns have not.
PLACED = ("timing", "perf", "reshard/", "swap/", "trainer/", "generator/", "sample/stale", "sample/trajectory_spans")


def arguments(task, folder, *settings, **flags) -> list[str]:
    held_out = f"data.val_dataset={task.folder}/test.mindrecord"
    return task.train(folder, *SETTINGS, held_out, *settings, **flags)


def divided(trainers: int, generators: int) -> dict[str, str]:
    return {"trainer_ranks": str(trainers), "generator_ranks": str(generators)}


def split(task, folder, trainers: int, generators: int, *settings, **flags) -> jobs.Run:
    argv = arguments(task, folder, *settings, **divided(trainers, generators), **flags)
    jobs.train_apart(argv, trainers + generators, timeout=400)
    return jobs.Run(folder)


def together(task, folder, *settings, workers: int = 0, **flags) -> jobs.Run:
    jobs.train_apart(arguments(task, folder, *settings, **flags), workers, timeout=400)
    return jobs.Run(folder)


def measured(run: jobs.Run) -> list[dict]:
    return [{name: row[name] for name in row if not name.startswith(PLACED)} for row in run.metrics]


def assert_same(run: jobs.Run, other: jobs.Run) -> None:
    assert run.responses == other.responses
    np.testing.assert_equal(measured(run), measured(other))
    name = "ckpt/hf/model.safetensors"
    assert (run.folder / name).read_bytes() == (other.folder / name).read_bytes()


def column(run: jobs.Run, name: str) -> np.ndarray:
    """One metric over the steps; the first row is a measurement before them."""
    return np.array([row[name] for row in run.metrics[1:]])


def assert_idle_is_a_share(run: jobs.Run) -> None:
    for side in ("trainer", "generator"):
        idle = column(run, f"{side}/idle_ratio")
        assert ((idle >= 0) & (idle < 1)).all(), (side, idle)
    assert np.isfinite(column(run, "timing_per_token_ms/gen")).all()


def assert_measured_and_synchronised(run: jobs.Run) -> None:
    held_out = [[name for name in row if name.startswith("val-core")] for row in run.metrics]
    assert [len(names) for names in held_out] == [1, 0, 1, 1]  # before step 1, and after the steps 2 and 3
    assert (column(run, "perf/weight_sync_s") > 0).all()


@pytest.fixture(scope="module")
def in_turn(task, tmp_path_factory) -> jobs.Run:
    return together(task, tmp_path_factory.mktemp("in_turn"))


@pytest.fixture(scope="module")
def behind(task, tmp_path_factory) -> jobs.Run:
    return together(task, tmp_path_factory.mktemp("behind"), BEHIND)


@pytest.mark.slow
@pytest.mark.msrun
def test_in_turn_it_is_one_process(task, in_turn, tmp_path):
    run = split(task, tmp_path, 1, 1)
    assert_same(run, in_turn)
    assert_idle_is_a_share(run)
    assert_measured_and_synchronised(run)


@pytest.mark.msrun
def test_one_step_behind_it_is_one_process_one_step_behind(task, behind, in_turn, tmp_path):
    run = split(task, tmp_path, 1, 1, BEHIND)
    assert_same(run, behind)
    assert_idle_is_a_share(run)
    assert_measured_and_synchronised(run)
    assert run.responses[32:] != in_turn.responses[32:]
    assert [column(run, f"sample/staleness_{name}").tolist() for name in ("mean", "max")] == [[0, 1, 1]] * 2


# Answers of the second batch are scored once the trainer has advantages of the first: never, if it waits for them.
MEETING = """
import time
from pathlib import Path

import numpy as np

from mindrlhf.algorithms.advantages import ADVANTAGES

FOLDER = Path(__file__).parent
GROUPS, SAMPLES, TRIED = 4, 4, 3  # of a step; answers that are tried before the run

def waiting(prompt, completion, fields):
    with (FOLDER / "calls").open("a+") as file:
        file.write("1")
        calls = file.tell()
    limit = time.monotonic() + 100
    while calls > TRIED + GROUPS * SAMPLES and not (FOLDER / "updating").exists():
        if time.monotonic() > limit:
            raise RuntimeError("the trainer waits for answers that it does not need")
        time.sleep(0.01)
    return len(set(completion)) / 10

@ADVANTAGES.register(compares=True)
def noting(batch):
    if len(batch.rewards) == GROUPS:  # and not a rehearsal
        (FOLDER / "updating").touch()
    return [np.asarray(rewards, np.float32) - np.float32(np.mean(rewards)) for rewards in batch.rewards]
"""


@pytest.mark.msrun
def test_updates_do_not_wait_for_the_answers_of_the_next_step(task, tmp_path):
    file = tmp_path / "meeting.py"
    file.write_text(MEETING)
    settings = (
        *(f"reward.functions=[{{name: '{file}:waiting'}}]", f"algorithm.advantage={file}:noting"),
        *("reward.workers=1", "reward.timeout_s=150", "algorithm.kl_in_reward=False", "algorithm.beta=0"),
    )
    run = split(task, tmp_path / "out", 1, 1, BEHIND, "trainer.total_steps=2", *settings)
    assert run.metrics[-1].get("reward/waiting/failures", 0) == 0
    assert run.metrics[-1].get("reward/unscored", 0) == 0


@pytest.mark.slow
@pytest.mark.msrun
def test_one_trainer_and_three_generators(task, tmp_path):
    """Answers do not depend on the ranks that draw them."""
    settings = (BEHIND, "data.prompts_per_step=6", "validation.limit=4")
    assert_same(split(task, tmp_path / "split", 1, 3, *settings), together(task, tmp_path / "one", *settings))


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("train", ["tp2", "dp2", "pp2"])
def test_two_trainers_and_two_generators(task, tmp_path, train):
    """With tensor parallelism on both sides, as on two ranks that do both."""
    layouts = (*jobs.TWO_LAYERS, *jobs.layout("train", train), *jobs.layout("infer", "tp2"))
    run = split(task, tmp_path / "split", 2, 2, BEHIND, *layouts)
    assert_same(run, together(task, tmp_path / "two", BEHIND, *layouts, workers=2))


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(
    "setting", ["memory.swap=True", "rollout.weights=int8", "lora.rank=4", "rollout.verify_weights=True"]
)
def test_other_settings(task, tmp_path, setting):
    settings = (BEHIND, setting)
    assert_same(split(task, tmp_path / "split", 1, 1, *settings), together(task, tmp_path / "one", *settings))


# --- killed and resumed ---

STEPS = 5
LONG = (
    *("trainer.staleness=1", f"trainer.total_steps={STEPS}", "trainer.save_freq=1", "rollout.max_new_tokens=8"),
    *("dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=6", "dynamic_sampling.max_rounds=3"),
)
# The process of scoring kills the rank that started it at a call of a number, once.
KILLING = """
import os
import signal
from pathlib import Path

FOLDER = Path(__file__).parent

def variety(prompt, completion, fields):
    with (FOLDER / "calls").open("a+") as file:
        file.write("1")
        calls = file.tell()
    if (FOLDER / "kill_at").exists() and calls >= int((FOLDER / "kill_at").read_text()):
        (FOLDER / "kill_at").unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    return len(set(completion)) / 10
"""


def long(task, folder: Path, *settings: str, **flags) -> list[str]:
    return arguments(task, folder, *LONG, *settings, **({"resume_training": "auto"} | flags))


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> jobs.Run:
    """One process, one step behind, with dynamic sampling, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    jobs.train_apart(long(task, folder))
    run = jobs.Run(folder)
    assert max(row.get("sampling/surplus_groups", 0) for row in run.metrics) > 0
    return run


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("case", range(4))
def test_a_trainer_is_killed_anywhere(task, whole, tmp_path, case):
    rng = random.Random(f"trainer {case}")
    argv = long(task, tmp_path / "run", **divided(1, 1))
    for step in sorted(rng.sample(range(1, STEPS + 1), 2)):
        phase = rng.choice(("update", "save", "report", "reshard"))
        phases.kill_in(argv, tmp_path / "phases", phase, step, rng, workers=2)
    jobs.train_apart(argv, 2, timeout=400)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("case", range(4))
def test_a_generator_is_killed_anywhere(task, whole, tmp_path, case):
    file = tmp_path / "reward.py"
    file.write_text(KILLING)
    reward = f"reward.functions=[{{name: '{file}:variety'}}]"
    argv = long(task, tmp_path / "run", reward, **divided(1, 1))
    (tmp_path / "kill_at").write_text(str(random.Random(f"generator {case}").randrange(8, 80)))
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        jobs.train_apart(argv, 2, timeout=400)
    assert not (tmp_path / "kill_at").exists()
    jobs.train_apart(argv, 2, timeout=400)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("second", [(0, 0), (1, 2)])
def test_resumed_on_another_division(task, whole, tmp_path, second):
    """Also in one process: a checkpoint holds what is drawn and not trained on, whoever drew it."""
    first = long(task, tmp_path / "run", **divided(1, 1))
    phases.kill_in(first, tmp_path / "phases", "update", 4, random.Random(0), workers=2)
    flags = divided(*second) if any(second) else {}
    jobs.train_apart(long(task, tmp_path / "run", **flags), sum(second), timeout=400)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.msrun
def test_a_stopped_run_saves_its_state(task, tmp_path):
    argv = arguments(task, tmp_path / "run", BEHIND, "trainer.total_steps=50", **divided(1, 1))
    said = phases.signalled(argv, tmp_path / "phases", "update", 2, workers=2, rank=1)
    assert "the state after step 2 of 50 is saved" in said
