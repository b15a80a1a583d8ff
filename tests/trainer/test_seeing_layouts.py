"""GRPO of a model that sees on several ranks, against one process, with no, one and several images a row."""

import functools
import json
import shutil

import jobs
import killed_ranks
import numpy as np
import pytest
from seeing_task import make_seeing_task

SETTINGS = (
    "data.prompts_per_step=4",
    "rollout.num_generations=4",
    "rollout.max_new_tokens=6",
    "rollout.verify_weights=True",
    "rollout.temperature=0.7",
    "train.length_bucket=16",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-5",
    "algorithm.beta=0.1",
    "trainer.total_steps=2",
)
LAYOUTS = {  # workers, layouts of training and generation
    "dp2": (2, "dp2", "dp2"),
    "dp2 to tp2": (2, "dp2", "tp2"),
    "dp2 that shares weights to tp2": (2, "dp2zero3", "tp2"),
    "tp2 sp to dp2": (2, "tp2sp", "dp2tp1"),
    "pp2 to tp2": (2, "pp2", "tp2"),
    "tp2 pp2 to dp2 tp2": (4, "tp2pp2", "dp2tp2"),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    task = make_seeing_task(tmp_path_factory.mktemp("seeing"))
    rows = [json.loads(line) for line in task.asked.read_text().splitlines()]
    rows = [row | {"question": "Which colour?"} for row in rows if "question" in row]
    for row in rows[::3]:
        row["images"] = []
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    task.asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return task


@pytest.fixture(scope="module")
def argv(seeing):
    def words(folder, *settings, **flags):
        reward = f"reward.functions=[{{name: '{seeing.rows.parent}/reward.py:likes'}}]"
        return seeing.training(folder, reward, *SETTINGS, *settings, **{"mind_dataset_dir": seeing.asked} | flags)

    return words


@pytest.fixture(scope="module")
def train(argv):
    def run(folder, *settings, workers=0, **flags):
        jobs.train_apart(argv(folder, *settings, **flags), workers, timeout=500)
        return jobs.Run(folder)

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"))


def layouts(ours, theirs):
    return (*jobs.layout("train", ours), *jobs.layout("infer", theirs), "trainer.save_freq=1")


@pytest.fixture(scope="module")
def spread(train, tmp_path_factory):
    """Runs in the layouts that were never stopped, by name."""

    def run(name):
        workers, ours, theirs = LAYOUTS[name]
        return train(tmp_path_factory.mktemp("spread"), *layouts(ours, theirs), workers=workers)

    return functools.cache(run)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_as_one_process(spread, whole, name):
    run = spread(name)
    assert run.responses == whole.responses
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss"):
        np.testing.assert_allclose(run.column(key), whole.column(key), rtol=1e-4, atol=1e-6, err_msg=key)
    for key, weight in whole.weights.items():
        assert np.linalg.norm(run.weights[key] - weight) <= 1e-5 * np.linalg.norm(weight), key


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_are_killed_and_resumed(argv, train, spread, tmp_path, name):
    """All at once, to the last bit."""
    workers, ours, theirs = LAYOUTS[name]
    words = argv(tmp_path / "run", *layouts(ours, theirs), resume_training="auto")
    killed_ranks.kill_all_somewhere(words, tmp_path / "log", workers, name, reshards=ours != theirs)
    assert (tmp_path / "run" / "ckpt" / "step_000001").is_dir()
    again = train(tmp_path / "run", *layouts(ours, theirs), workers=workers, resume_training="auto")
    assert again.responses == spread(name).responses
    np.testing.assert_equal(again.kept_metrics, spread(name).kept_metrics)
    for key, weight in spread(name).weights.items():
        np.testing.assert_array_equal(again.weights[key], weight, err_msg=key)


@pytest.mark.slow
@pytest.mark.msrun
def test_ranks_are_resumed(train, tmp_path):
    """Bit for bit, with moments that the ranks share."""
    settings = (*layouts("dp2", "tp2"), "train_yaml.parallel.enable_parallel_optimizer=True")
    through = train(tmp_path / "through", *settings, workers=2)
    shutil.copytree(through.folder, tmp_path / "stopped")
    for name in ("step_000002", "hf"):
        shutil.rmtree(tmp_path / "stopped" / "ckpt" / name)
    again = train(tmp_path / "stopped", *settings, workers=2, resume_training="auto")
    assert again.responses == through.responses
    for key, weight in through.weights.items():
        np.testing.assert_array_equal(again.weights[key], weight, err_msg=key)


@pytest.mark.slow
@pytest.mark.msrun
def test_ranks_of_their_own_for_generation_train_as_one_process(train, tmp_path):
    """The images of what is drawn come to the ranks that train."""
    one = train(tmp_path / "one", "trainer.staleness=1")
    two = train(tmp_path / "two", "trainer.staleness=1", workers=2, trainer_ranks=1, generator_ranks=1)
    assert two.responses == one.responses
    for key, weight in one.weights.items():
        np.testing.assert_array_equal(two.weights[key], weight, err_msg=key)
