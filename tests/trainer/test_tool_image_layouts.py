"""GRPO with an environment that answers with images: on several ranks, with a frozen tower, and in other schedules."""

import json

import jobs
import numpy as np
import pytest
from painting_task import make_painting_task

SETTINGS = (
    "data.prompts_per_step=4",
    "rollout.num_generations=2",
    "rollout.max_new_tokens=64",
    "rollout.stop_strings=[e, '3', a, '1', h, R]",
    "rollout.tool_images=True",
    "train.length_bucket=64",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-5",
    "algorithm.beta=0.1",
    "trainer.total_steps=2",
)
LAYOUTS = {  # workers, layouts of training and generation
    "dp2": (2, "dp2", "dp2"),
    "dp2 to tp2": (2, "dp2", "tp2"),
    "pp2 to tp2": (2, "pp2", "tp2"),
    "tp2 sp to dp2": (2, "tp2sp", "dp2tp1"),
}
# Schedules and settings of one process.
ALONE = {
    "frozen": ("train.freeze=[vision, merger]",),
    "remax": ("algorithm.advantage=remax",),
    "filtered": ("rollout.top_k=20", "rollout.repetition_penalty=1.1"),
    "staleness": ("trainer.staleness=1",),
    "dynamic": ("dynamic_sampling.enabled=True",),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_painting_task(tmp_path_factory.mktemp("seeing"), depth=2, layers=2)


@pytest.fixture(scope="module")
def train(seeing):
    def run(folder, *settings, workers=0):
        place = seeing.rows.parent
        functions = f"reward.functions=[{{name: environment}}, {{name: '{place}/reward.py:pictures'}}]"
        talks = f"rollout.environment={place}/painter.py:Painter"
        jobs.train_apart(seeing.training(folder, functions, talks, *SETTINGS, *settings), workers, timeout=500)
        return jobs.Run(folder)

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"))


def images(run) -> int:
    return sum(len(one.pictures) for _, step in run.rollouts for e in step for one in e.group.rollouts)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_as_one_process(train, whole, tmp_path, name):
    workers, ours, theirs = LAYOUTS[name]
    run = train(tmp_path, *jobs.layout("train", ours), *jobs.layout("infer", theirs), workers=workers)
    assert images(run) == images(whole) >= 12
    assert run.responses == whole.responses
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss"):
        np.testing.assert_allclose(run.column(key), whole.column(key), rtol=1e-4, atol=1e-6, err_msg=key)
    for key, weight in whole.weights.items():
        assert np.linalg.norm(run.weights[key] - weight) <= 1e-5 * np.linalg.norm(weight), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_other_schedules_train_on_one_distribution(train, tmp_path, name):
    run = train(tmp_path, *ALONE[name], "algorithm.updates_per_iteration=2")
    assert images(run) >= 8
    assert (run.column("actor/grad_norm") > 0).all()
    if name != "staleness":
        assert run.column("rollout_corr/log_prob_diff/max").max() < 2e-5


@pytest.mark.slow
def test_rows_of_a_frozen_tower_change_no_bit(train, tmp_path):
    known, none = (
        train(tmp_path / name, "train.freeze=[vision, merger]", *more)
        for name, more in (("known", ()), ("none", ("train.tower_cache_gb=0",)))
    )
    assert known.responses == none.responses
    ours, theirs = (one.folder / "ckpt" / "hf" / "model.safetensors" for one in (known, none))
    assert ours.read_bytes() == theirs.read_bytes()
    assert known.metrics[-1]["vision/cache_hit_rate"] > 0.5


@pytest.mark.slow
def test_held_out_conversations_show_images_too(seeing, train, tmp_path):
    held_out = (f"data.val_dataset={seeing.alike}", "validation.limit=3", "validation.reward=environment")
    train(tmp_path, *held_out, "trainer.test_freq=1", "trainer.val_before_train=False", "trainer.total_steps=1")
    answers = [json.loads(line) for line in (tmp_path / "validation" / "step_000001.jsonl").read_text().splitlines()]
    assert len(answers) == 3
    assert max(row["num_turns"] for row in answers) > 2
    assert max(row["score"] for row in answers) > 1
