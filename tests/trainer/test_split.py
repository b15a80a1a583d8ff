"""Ranks that only train and ranks that only generate together give what one process gives, to the last bit."""

import jobs
import numpy as np
import pytest
from split_runs import BEHIND, assert_same, column, split, together


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
def test_in_turn_it_is_one_process(task, behind, in_turn, tmp_path):
    run = split(task, tmp_path, 1, 1)
    assert_same(run, in_turn)
    assert run.responses[32:] != behind.responses[32:]
    assert_idle_is_a_share(run)
    assert_measured_and_synchronised(run)


@pytest.mark.msrun
def test_one_step_behind_it_is_one_process_one_step_behind(task, behind, tmp_path):
    run = split(task, tmp_path, 1, 1, BEHIND)
    assert_same(run, behind)
    assert_idle_is_a_share(run)
    assert_measured_and_synchronised(run)
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


@pytest.mark.slow
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
