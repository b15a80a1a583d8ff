"""A job on any pair of train and infer layouts gives what one process gives: tokens, losses, norms, weights.

The job has two steps, a reference model, responses of uneven length and a tied embedding. Attention has
two key-value heads, which four tensor-parallel ranks share.
"""

import copying_memory
import jobs
import numpy as np
import pytest
from workers import run_ranks

SETTINGS = (
    "algorithm.beta=0.1",
    "algorithm.aggregation=token-mean",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-5",  # else Adam blows rounding errors up to full steps where a gradient is zero (key biases)
    "rollout.stop_strings=[e, '3']",
    "train.length_bucket=48",  # one shape of graph: each more is compiled for seconds
    "train.max_tokens_per_micro_batch=240",  # one group
    "trainer.total_steps=2",
)
SAME = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory) -> jobs.Run:
    folder = tmp_path_factory.mktemp("alone")
    result = jobs.start(task.train(folder, *SETTINGS))
    assert result.returncode == 0, result.stderr
    run = jobs.Run(folder)
    assert len({len(response) for *_, response in run.responses}) > 4
    assert (run.column("actor/grad_norm") > 0.01).all()
    return run


PAIRS = {
    2: [
        ("dp2", "tp2"),
        ("tp2", "dp2"),
        ("pp2", "dp2"),
        ("dp2", "dp2"),
        ("tp2", "tp2"),
        ("pp2", "tp2"),
        ("dp2zero3", "tp2"),
    ],
    4: [
        (train, infer) for train in ("dp2tp2", "tp2pp2", "dp2pp2", "tp4", "tp4sp") for infer in ("dp4", "dp2tp2", "tp4")
    ]
    + [("dp4zero3", "dp2tp2"), ("dp2tp2zero3", "dp4"), ("dp2tp2spzero3", "tp4")],
    8: [(train, infer) for train in ("dp2tp2pp2", "tp4pp2", "tp2pp2dp2sp") for infer in ("dp2tp4", "dp4tp2")],
}
DEFAULT = [("pp2", "tp2")]


def marked(workers: int, pair: tuple[str, str]):
    return pytest.param(workers, *pair, marks=[] if pair in DEFAULT else [pytest.mark.slow], id="-".join(pair))


@pytest.mark.msrun
@pytest.mark.parametrize(
    ("workers", "train", "infer"), [marked(workers, pair) for workers, pairs in PAIRS.items() for pair in pairs]
)
def test_a_pair_of_layouts_equals_one_process(task, alone, tmp_path, workers, train, infer):
    check_pair(task, alone, tmp_path, workers, train, infer)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(("train", "infer"), [("tp2", "dp2"), ("dp2", "tp2")])
def test_a_pair_where_the_host_sees_copies_of_parameters(task, alone, tmp_path, train, infer):
    """As on Ascend: what the reshard brings reaches the graph that generates."""
    check_pair(task, alone, tmp_path, 2, train, infer, copying_memory.__file__)


def check_pair(task, alone, tmp_path, workers, train, infer, *scripts):
    layouts = (*jobs.layout("train", train), *jobs.layout("infer", infer))
    arguments = task.train(tmp_path, *SETTINGS, *layouts)
    result = run_ranks(workers, [*scripts, jobs.ONE_STAGE, *arguments[1:]], timeout=500)
    assert result.returncode == 0, result.logs
    run = jobs.Run(tmp_path)
    assert run.responses == alone.responses
    for name in SAME:
        np.testing.assert_allclose(run.column(name), alone.column(name), rtol=1e-5, atol=1e-7, err_msg=name)
    assert run.column("rollout_corr/log_prob_diff/max").max() < 1e-4  # the infer graph has the train graph's weights
    for name, expected in alone.weights.items():
        difference = np.linalg.norm(run.weights[name] - expected)
        assert difference <= 1e-5 * np.linalg.norm(expected), name
