"""What must come out equal: the same seed twice, a replay of recorded rollouts, and one process or two workers.

The job has everything that could make a difference: a reference model, two passes of two updates each (so that old
log-probs matter), responses of uneven length, and weights that really move.
"""

import jobs
import numpy as np
import pytest

from mindrlhf.records.formats import read_record_rows, write_record

TWO_RANKS = (*jobs.layout("train", "dp2"), *jobs.layout("infer", "dp2"))
SHARED = (*jobs.layout("train", "dp2zero3"), *jobs.layout("infer", "dp2"))
SETTINGS = (
    "algorithm.beta=0.1",
    "algorithm.num_iterations=2",
    "algorithm.updates_per_iteration=2",
    "algorithm.aggregation=token-mean",
    "optimizer.lr=1e-3",
    "rollout.stop_strings=[e, '3']",
    "optimizer.eps=1e-5",  # else Adam blows rounding errors up to full steps where a gradient is zero (key biases)
    "train.length_bucket=48",  # one shape of graph: each more is compiled for seconds
    "train.max_tokens_per_micro_batch=240",  # one group
    *jobs.ONE_LAYER,
)
LOG_PROBS = ("behaviour_log_probs", "policy_log_probs")
SAME = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")


def train(task: jobs.Task, folder, *settings: str, workers: int | None = None, **flags) -> jobs.Run:
    """A finished run: in this process, in a new one (0 workers), or on some ranks."""
    arguments = task.train(folder, *SETTINGS, *settings, **flags)
    if workers is None:
        assert jobs.call(arguments) == 0
    else:
        jobs.train_apart(arguments, workers, new=True)
    return jobs.Run(folder)


@pytest.fixture(scope="module")
def first(task, tmp_path_factory) -> jobs.Run:
    return train(task, tmp_path_factory.mktemp("first"))


def assert_close(run: jobs.Run, other: jobs.Run, tolerance: float = 1e-5) -> None:
    """The same tokens; losses, gradient norms and weights within a relative tolerance."""
    assert run.responses == other.responses
    for name in SAME:
        np.testing.assert_allclose(run.column(name), other.column(name), rtol=tolerance, atol=1e-7, err_msg=name)
    for name, expected in other.weights.items():
        difference = np.linalg.norm(run.weights[name] - expected)
        assert difference <= tolerance * np.linalg.norm(expected), name


def test_the_job_is_worth_comparing(first):
    lengths = {len(response) for *_, response in first.responses}
    assert len(lengths) > 4
    assert (first.column("actor/grad_norm") > 0.01).all()
    assert first.column("actor/kl_loss")[-1] > 0
    assert np.abs(first.column("actor/ppo_kl")).max() > 0
    assert (first.column("actor/skipped_updates") == 0).all()
    assert (first.column("group/zero_std_fraction") < 1).all()
    assert first.column("rollout_corr/log_prob_diff/max").max() < 1e-4  # the engine and the train graph agree


def test_the_same_seed_twice(task, first, tmp_path):
    """In two processes, too."""
    again = train(task, tmp_path, workers=0)
    assert again.responses == first.responses
    for name in SAME:
        assert again.column(name).tolist() == first.column(name).tolist(), name
    assert (tmp_path / "ckpt/hf/model.safetensors").read_bytes() == (
        first.folder / "ckpt/hf/model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_another_seed_differs(task, first, tmp_path):
    other = train(task, tmp_path, "seed=1", "trainer.total_steps=1")
    assert other.responses != first.responses[: len(other.responses)]


def test_a_replay_gives_the_same_update(task, first, tmp_path):
    replayed = train(
        task, tmp_path, replay=first.folder / "rollouts.mindrecord", mind_dataset_dir=None, save_data_file=None
    )
    for name in SAME:
        assert replayed.column(name).tolist() == first.column(name).tolist(), name
    assert replayed.weights.keys() == first.weights.keys()
    for name, expected in first.weights.items():
        assert replayed.weights[name].tobytes() == expected.tobytes(), name
    assert not (tmp_path / "rollouts.mindrecord").exists()


@pytest.mark.slow
def test_a_replay_with_tokens_that_were_not_sampled(task, first, tmp_path):
    """As a tool's answers would be: whatever their log-probs are, the run is the same; they count nowhere."""
    runs = []
    for name, rest in (("one", -0.5), ("other", -50.0)):
        rows = []
        for row in read_record_rows(first.folder / "rollouts.mindrecord"):
            sampled = np.arange(len(row["response_ids"])) % 4 != 1
            numbers = {key: np.where(sampled, row[key], np.float32(rest)) for key in LOG_PROBS}
            rows.append(row | numbers | {"sampled": sampled})
        (tmp_path / name).mkdir()
        write_record(tmp_path / name / "mixed.mindrecord", rows)
        replay = tmp_path / name / "mixed.mindrecord"
        runs.append(train(task, tmp_path / name, "trainer.save_rollouts=True", replay=replay, mind_dataset_dir=None))
    one, other = runs
    for row, its in zip(one.metrics, other.metrics, strict=True):
        same = [name for name in row if not name.startswith(("timing", "perf/"))]
        assert [row[name] for name in same] == [its[name] for name in same]
    for name, expected in one.weights.items():
        assert other.weights[name].tobytes() == expected.tobytes(), name
    lengths = [e.sampled_lengths for _, step in one.rollouts[:1] for e in step]
    assert one.metrics[0]["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert one.column("actor/loss").tolist() != first.column("actor/loss").tolist()


@pytest.mark.msrun
@pytest.mark.parametrize("layouts", [SHARED, pytest.param(TWO_RANKS, marks=pytest.mark.slow)], ids=["shared", "whole"])
def test_two_workers_equal_one(task, first, tmp_path, layouts):
    """Whether they share weights, gradients and moments, or each has them whole."""
    assert_close(train(task, tmp_path, *layouts, workers=2), first)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_two_workers_equal_one_whatever_the_aggregation(task, tmp_path, aggregation):
    changed = (f"algorithm.aggregation={aggregation}", "train.max_tokens_per_micro_batch=16384")
    one = train(task, tmp_path / "one", *changed)
    assert_close(train(task, tmp_path / "two", *changed, *TWO_RANKS, workers=2), one)


@pytest.mark.slow
@pytest.mark.msrun
def test_a_replay_on_two_workers(task, first, tmp_path):
    replayed = train(
        task, tmp_path, *TWO_RANKS, workers=2, replay=first.folder / "rollouts.mindrecord", mind_dataset_dir=None
    )
    assert_close(replayed, first)
