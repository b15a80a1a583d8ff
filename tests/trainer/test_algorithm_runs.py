"""Whole runs of the family's less usual members: the same however a step is cut and over whatever ranks it is spread.

`everything` is no algorithm that anybody needs; it switches on together what looks at all tokens of a step, or changes
during a run: chosen tokens, dynamic sampling with a surplus, importance weights, an entropy bonus, a steered KL term, a
reference that follows.
"""

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

COMMON = (
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-5",  # else Adam blows rounding errors up to full steps where a gradient is zero (key biases)
    "critic.optimizer.lr=1e-3",
    "critic.optimizer.eps=1e-5",
    "rollout.stop_strings=[e, '3']",
    "train.length_bucket=48",  # one shape of graph: each more is compiled for seconds
    "trainer.total_steps=3",
    *jobs.ONE_LAYER,
)
JOBS = {
    "ppo": (
        "algorithm.advantage=gae",
        "algorithm.kl_in_reward=True",
        "algorithm.kl_target=0.001",
        "algorithm.kl_horizon=20",
        "algorithm.updates_per_iteration=2",
        "algorithm.num_iterations=2",
        "critic.warmup_steps=1",
        "critic.value_clip=0.2",
    ),
    "everything": (
        "algorithm.policy_loss=kl_cov",
        "algorithm.kl_cov_ratio=0.1",
        "algorithm.aggregation=token-mean",
        "algorithm.entropy_coef=0.05",
        "algorithm.beta=0.1",
        "algorithm.kl_target=0.001",
        "algorithm.kl_horizon=20",
        "algorithm.reference_sync_steps=2",
        "algorithm.reference_sync_share=0.5",
        "algorithm.mask_truncated=True",
        "algorithm.updates_per_iteration=2",
        "dynamic_sampling.enabled=True",
        "dynamic_sampling.prompts_per_round=6",
        "reward.overlong_factor=0.5",
        "rollout_correction.level=sequence",
        "rollout.repetition_penalty=1.3",
    ),
    "remax": ("algorithm.advantage=remax", "rollout.num_generations=1", "algorithm.policy_loss=clip_cov"),
}
# Which tokens are highest may change with a log-prob's last digit, and tensor parallelism adds in another order.
JOBS["everything but the choice"] = (*JOBS["everything"], "algorithm.policy_loss=clip", "algorithm.kl_cov_ratio=null")
SAME = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "actor/kl_coef")
SAME += ("critic/vf_loss", "critic/grad_norm", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/rewards/mean")
SAME += ("rollout_corr/rollout_is_mean", "actor/selected_fraction", "sampling/surplus_groups")


def finished(task: jobs.Task, folder, name: str, *settings: str, workers: int = 0) -> jobs.Run:
    arguments = task.train(folder, *COMMON, *JOBS[name], *settings)
    jobs.train_apart(arguments, workers, timeout=500)
    return jobs.Run(folder)


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """(name, further settings) -> the run of one process."""
    runs = {}

    def get(name: str, *settings: str) -> jobs.Run:
        key = (name, *settings)
        if key not in runs:
            runs[key] = finished(task, tmp_path_factory.mktemp(name), name, *settings)
        return runs[key]

    return get


def assert_equal(run: jobs.Run, expected: jobs.Run) -> None:
    assert run.responses == expected.responses
    for row, other in zip(run.metrics, expected.metrics, strict=True):
        shared = [name for name in SAME if name in other]
        assert set(shared) == {name for name in SAME if name in row}
        assert len(shared) > 4
        for name in shared:
            np.testing.assert_allclose(row[name], other[name], rtol=2e-5, atol=1e-6, err_msg=name)
    models = [(run.weights, expected.weights)]
    critics = [one.folder / "ckpt" / "critic" / "model.safetensors" for one in (run, expected)]
    if critics[1].exists():
        models.append(tuple(map(load_file, critics)))
        assert models[1][1]["score.weight"].any()
    for weights, others in models:
        assert weights.keys() == others.keys()
        for name, tensor in others.items():
            assert np.linalg.norm(weights[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name


def test_ppo_warms_its_critic_up_first(alone):
    run = alone("ppo")
    assert "actor/loss" not in run.metrics[0]
    assert (run.column("critic/grad_norm") > 0).all()
    assert all(row["actor/grad_norm"] > 0 for row in run.metrics[1:])
    assert run.metrics[0]["critic/values/max"] == 0
    assert run.metrics[-1]["critic/values/mean"] > 0.1
    # Nothing has moved away from the reference in the first two steps: the coefficient falls by a fifth of 16 / 20.
    assert run.metrics[1]["actor/kl_coef"] == pytest.approx(0.01 * (1 - 0.2 * 16 / 20))


@pytest.mark.slow
def test_everything_is_on(alone):
    run = alone("everything")
    last = run.metrics[-1]
    assert last["sampling/surplus_groups"] + run.metrics[0]["sampling/surplus_groups"] > 0
    assert 0 < run.column("response_length/clip_ratio").max() < 1
    assert (run.column("actor/selected_fraction") > 0).all()
    assert 0 < last["rollout_corr/rollout_is_eff_sample_size"] < 1
    assert last["reward/soft_overlong/mean"] < 0
    assert len(set(run.column("actor/kl_coef"))) == 3


CUTS = {
    "one group at a time": (0, ["train.max_tokens_per_micro_batch=1"]),
    "dp2": (2, [*jobs.layout("train", "dp2"), *jobs.layout("infer", "dp2")]),
    "dp2zero3": (2, [*jobs.layout("train", "dp2zero3"), *jobs.layout("infer", "tp2")]),
    "tp2pp2": (4, [*jobs.TWO_LAYERS, *jobs.layout("train", "tp2pp2"), *jobs.layout("infer", "dp2tp2")]),
}


def case(name: str, cut: str):
    workers, settings = CUTS[cut]
    marks = [pytest.mark.slow] + [pytest.mark.msrun] * bool(workers)
    return pytest.param(name, workers, settings, marks=marks, id=f"{name}-{cut}")


CASES = [(name, cut) for name in JOBS for cut in CUTS]
CASES = [(name, cut) for name, cut in CASES if "everything" not in name or (cut == "tp2pp2") == ("choice" in name)]


@pytest.mark.parametrize(("name", "workers", "settings"), [case(*pair) for pair in CASES])
def test_a_run_that_is_cut_otherwise_is_the_same(task, alone, tmp_path, name, workers, settings):
    layers = [setting for setting in settings if setting in jobs.TWO_LAYERS]
    assert_equal(finished(task, tmp_path, name, *settings, workers=workers), alone(name, *layers))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "remax"])
def test_a_replay_is_the_same(task, alone, tmp_path, name):
    first = alone(name)
    arguments = task.train(
        tmp_path, *COMMON, *JOBS[name], replay=first.folder / "rollouts.mindrecord", mind_dataset_dir=None
    )
    result = jobs.start(arguments)
    assert result.returncode == 0, result.stderr
    replayed = jobs.Run(tmp_path)
    for name in ("actor/loss", "actor/grad_norm"):
        np.testing.assert_allclose(replayed.column(name), first.column(name), rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_a_critic_is_loaded_again(task, alone, tmp_path):
    """Its values begin where the earlier run's ended, and a critic is refused where a policy is asked for."""
    first = alone("ppo")
    critic = first.folder / "ckpt" / "critic"
    flags = {"load_sft_checkpoint_infer": first.folder / "ckpt" / "hf", "vocab_path": None, "merges_file_path": None}
    settings = ("algorithm.advantage=gae", "algorithm.beta=0", *COMMON, "trainer.total_steps=1")
    arguments = task.train(tmp_path, *settings, **flags, load_critic_checkpoint=critic)
    result = jobs.start(arguments)
    assert result.returncode == 0, result.stderr
    assert jobs.Run(tmp_path).metrics[0]["critic/values/mean"] > 0.1
    refused = jobs.start(task.train(tmp_path, load_sft_checkpoint_infer=critic))
    assert refused.returncode == 2
    assert f"{critic}: is a critic" in refused.stderr
