"""`--enable_compile_cache True`: a run started again takes its graphs from the folder, and gives the same numbers."""

import re
from functools import reduce
from operator import getitem
from pathlib import Path

import jobs
import numpy as np
import pytest
from workers import run_msrun

from mindrlhf.backend.native import library
from mindrlhf.run.compile_cache import graph_settings

SETTINGS = ("algorithm.beta=0.1", "trainer.total_steps=2", "trainer.save_freq=1", *jobs.ONE_LAYER)
SAME = ("actor/loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache folder with the operators that are built already, and no graphs."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "mindrlhf").mkdir(mode=0o700)
    if path := library().path:
        (folder / "mindrlhf" / path.name).symlink_to(path)
    return folder


def run(task, folder, cache, *settings, **flags):
    """(the run, how many of its graphs came from the cache, were built, could not be kept)."""
    arguments = task.train(folder, *SETTINGS, *settings, enable_compile_cache="True", **flags)
    result = jobs.start(arguments, new=True, XDG_CACHE_HOME=str(cache))
    assert result.returncode == 0, result.stderr
    return jobs.Run(folder), counts(result.stdout)


def counts(output: str) -> tuple[int, int, int]:
    found = re.search(r"compiled graphs: (\d+) from \S+, (\d+) built(?: and kept there)?(?:, (\d+) built)?", output)
    return tuple(int(number or 0) for number in found.groups())


def assert_same(one, other):
    """The last step, and what the run ends with."""
    step = other.responses[-1][0]
    assert [row for row in one.responses if row[0] == step] == [row for row in other.responses if row[0] == step]
    for name in SAME:
        assert one.metrics[-1][name] == other.metrics[-1][name], name
    for name, weights in one.weights.items():
        np.testing.assert_array_equal(weights, other.weights[name], err_msg=name)


@pytest.fixture(scope="module")
def without(task, tmp_path_factory, cache):
    """A run that goes on where there is no folder for graphs, and says so."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "mindrlhf").mkdir(mode=0o700)
    for path in (cache / "mindrlhf").glob("*.so"):
        (folder / "mindrlhf" / path.name).symlink_to(path.resolve())
    (folder / "mindrlhf" / "graphs").write_text("in its place")
    arguments = task.train(folder / "run", *SETTINGS, enable_compile_cache="True")
    result = jobs.start(arguments, XDG_CACHE_HOME=str(folder))
    assert result.returncode == 0, result.stderr
    assert "compiled graphs are not kept" in result.stdout + result.stderr
    return jobs.Run(folder / "run")


@pytest.fixture(scope="module")
def cold(task, tmp_path_factory, cache):
    return run(task, tmp_path_factory.mktemp("cold"), cache)


def test_a_run_started_again_builds_nothing(task, tmp_path, cache, cold):
    first, (loaded, stored, left_out) = cold
    assert (loaded, left_out) == (0, 0)
    assert stored > 5
    again, found = run(task, tmp_path, cache)
    assert found == (stored, 0, 0)
    assert_same(again, first)


@pytest.mark.slow
def test_a_run_without_a_folder_for_graphs_is_the_same(without, cold):
    assert_same(cold[0], without)


@pytest.mark.slow
def test_another_order_of_graphs_changes_nothing(task, tmp_path, cache, without, cold):
    """Answers to held-out problems come first, and of the steps the second."""
    first, (_, stored, _) = cold
    look = (f"data.val_dataset={task.folder}/test.mindrecord", "trainer.val_before_train=True", "trainer.test_freq=9")
    resumed, found = run(task, tmp_path, cache, *look, resume_training=first.folder / "ckpt" / "step_000001")
    assert_same(resumed, without)
    loaded, built, left_out = found
    assert loaded > stored / 2
    assert built > 0
    assert left_out == 0


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(("train", "infer"), [("tp2", "dp2"), ("pp2", "tp2"), ("dp2", "dp2")])
def test_workers_have_graphs_of_their_own(task, tmp_path, cache, train, infer):
    layout = (*jobs.TWO_LAYERS, *jobs.layout("train", train), *jobs.layout("infer", infer))
    runs = []
    for kept in (False, True, True):
        folder = tmp_path / str(len(runs))
        arguments = task.train(folder, *SETTINGS, *layout, enable_compile_cache=str(kept))
        result = run_msrun(2, [jobs.ONE_STAGE, *arguments[1:]], timeout=500, XDG_CACHE_HOME=str(cache))
        assert result.returncode == 0, result.logs
        runs.append((jobs.Run(folder), counts(result.logs[0]) if kept else None))
    (without, _), (cold, (loaded, built, left_out)), (warm, found) = runs
    assert_same(cold, without)
    assert_same(warm, without)
    assert left_out == 0
    assert found == (loaded + built, 0, 0)


def test_keys_follow_settings_that_graphs_depend_on():
    """Not where files are, nor how long a run goes on: it would build its graphs again after a resume."""

    def settings(name="train/loss", **changes) -> dict:
        groups = ("algorithm", "data", "lora", "memory", "optimizer", "reward", "rollout", "trainer", "validation")
        described = {
            "grpo": {group: {} for group in groups},
            "train_yaml": {"path": "a.yaml", "parallel": {"model_parallel": 1}},
            "infer_yaml": {"path": "b.yaml"},
            "model": {"hidden_size": 64},
            "flags": {},
        }
        for place, value in changes.items():
            *groups, key = place.split("__")
            reduce(getitem, groups, described)[key] = value
        return graph_settings(described, "grpo", name)

    everywhere = ("train_yaml__parallel__model_parallel", "model__hidden_size", "grpo__lora__rank")
    nowhere = ("grpo__trainer__total_steps", "grpo__data__val_dataset", "grpo__memory__swap", "grpo__seed")
    nowhere += ("train_yaml__path",)
    scoring = {"grpo__algorithm__beta": False, "grpo__rollout__temperature": True}
    changed = {
        "train/loss": dict.fromkeys(scoring, True),
        "train/scores": scoring,
        "generate/decode": scoring,
        "optimizer/apply": dict.fromkeys(scoring, False),
    }
    for name, by_setting in changed.items():
        expected = by_setting | dict.fromkeys(everywhere, True) | dict.fromkeys((*nowhere, "flags__resume"), False)
        for setting, differs in expected.items():
            assert (settings(name, **{setting: 2}) != settings(name)) == differs, (name, setting)
