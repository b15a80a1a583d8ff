"""Runs whose responses are drawn with packed weights, which are corrected for and follow the updates."""

import jobs
import numpy as np
import pytest
from slow_cases import few_of

SETTINGS = (
    "rollout.weights=int8",
    "rollout.max_new_tokens=16",
    "algorithm.beta=0",
    "optimizer.lr=1e-2",  # weights that are not packed again are far away after a step
    "optimizer.eps=1e-5",
    "train.length_bucket=48",
    "trainer.progress=False",
    *jobs.ONE_LAYER,
)
STEPS = 4


def finished(task: jobs.Task, folder, *settings: str, workers: int = 0, **flags) -> jobs.Run:
    arguments = task.train(folder, *SETTINGS, *settings, **flags)
    assert "rollout_correction.level is null" not in jobs.train_apart(arguments, workers, timeout=500)
    return jobs.Run(folder)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> jobs.Run:
    return finished(task, tmp_path_factory.mktemp("whole"), f"trainer.total_steps={STEPS}")


def assert_near_the_trained_policy(run: jobs.Run) -> None:
    """And not the trained policy itself, by the log-probs of the distribution that was really drawn from."""
    difference = run.column("rollout_corr/log_prob_diff/mean")
    assert (difference > 1e-4).all()
    assert (difference < 0.02).all()
    assert (run.column("rollout_corr/rollout_is_eff_sample_size") > 0.99).all()


def test_responses_follow_the_trained_policy(whole):
    assert len(whole.metrics) == STEPS
    assert (whole.column("actor/grad_norm") > 0).all()
    assert_near_the_trained_policy(whole)
    assert (whole.column("timing_s/reshard") > 0).all()


@pytest.mark.slow
def test_other_slots_and_swapped_weights_give_the_same_run(task, whole, tmp_path):
    run = finished(task, tmp_path, f"trainer.total_steps={STEPS}", "rollout.max_slots=5", "memory.swap=True")
    assert run.responses == whole.responses
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(run.weights[name], weight, err_msg=name)


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_went_through(task, whole, tmp_path):
    """And other slots, and weights that are swapped, change nothing."""
    for steps in (2, STEPS):
        settings = (f"trainer.total_steps={steps}", "trainer.save_freq=1", "rollout.max_slots=7", "memory.swap=True")
        run = finished(task, tmp_path, *settings, resume_training="auto")
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(run.weights[name], weight, err_msg=name)


@pytest.mark.slow
@pytest.mark.msrun
def test_tensor_parallel_ranks_pack_their_shards(task, tmp_path):
    layouts = (*jobs.layout("train", "dp2"), *jobs.layout("infer", "tp2"))
    assert_near_the_trained_policy(finished(task, tmp_path, "trainer.total_steps=3", *layouts, workers=2))


@pytest.mark.slow
def test_adapters_train_over_a_packed_base(task, tmp_path):
    lora = ("lora.rank=3", "rollout.top_k=20", "rollout.weights=bfloat16")  # filters draw outside of the operator
    run = finished(task, tmp_path, "trainer.total_steps=3", *lora)
    assert (run.column("rollout_corr/log_prob_diff/mean") < 0.02).all()
    assert not any(name.startswith("timing_s/reshard") for name in run.metrics[-1])


@pytest.mark.parametrize(
    "settings", few_of([["rollout.weights=int8"]], [["rollout.weights=bfloat16", "rollout.top_k=20"]])
)
def test_credit_reads_the_policy_s_own_log_probs(task, tmp_path, settings):
    """A policy that is its reference and its teacher has no divergence from them, however rollouts are rounded."""
    model = jobs.write_model(task, tmp_path / "model", num_layers=1)
    kl = ("algorithm.beta=0.1", "algorithm.kl_in_reward=True", "algorithm.kl_estimator=k1", "algorithm.kl_target=0.1")
    taught = ("algorithm.advantage=distillation", f"algorithm.teacher={model}", "trainer.total_steps=1")
    arguments = task.train(tmp_path, *jobs.ONE_LAYER, *kl, *taught, *settings, load_sft_checkpoint_train=model)
    assert jobs.call(arguments) == 0
    run = jobs.Run(tmp_path)
    assert run.column("rollout_corr/log_prob_diff/mean")[0] > 1e-4  # the rollouts are rounded
    advantages = ("critic/advantages/max", "critic/advantages/min")
    for name in ("actor/reward_kl_penalty", "distillation/reverse_kl", *advantages):
        assert abs(run.column(name)[0]) <= 1e-6, name
    assert run.column("timing_s/old_log_prob")[0] > 0
