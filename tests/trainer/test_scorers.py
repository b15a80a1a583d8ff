"""Scoring on ranks that do not train the policy: the run is that of ranks that do everything, to the last bit."""

import jobs
import killed_ranks
import numpy as np
import pytest
from split_runs import BEHIND, arguments, assert_same, column, divided, split, together

CRITIC = ("algorithm.advantage=gae", "critic.warmup_steps=1")


def assert_same_critic(run: jobs.Run, other: jobs.Run) -> None:
    name = "ckpt/critic/model.safetensors"
    assert (run.folder / name).read_bytes() == (other.folder / name).read_bytes()


@pytest.fixture(scope="module")
def one(task, tmp_path_factory) -> jobs.Run:
    """One process with reference and critic, one step behind."""
    return together(task, tmp_path_factory.mktemp("one"), BEHIND, *CRITIC)


@pytest.mark.msrun
def test_a_reference_and_a_critic_apart_are_those_of_one_process(task, one, tmp_path):
    run = split(task, tmp_path, 1, 1, BEHIND, *CRITIC, scorers=1)
    assert_same(run, one)
    assert_same_critic(run, one)
    for side in ("trainer", "generator", "scorer"):
        idle = column(run, f"{side}/idle_ratio")
        assert ((idle >= 0) & (idle < 1)).all(), (side, idle)
    for phase in ("gen", "ref", "values", "update_critic", "update_actor"):
        assert run.metrics[2][f"timing_per_token_ms/{phase}"] > 0, phase
    assert run.metrics[-1]["perf/mfu/critic"] > 0


@pytest.mark.slow
@pytest.mark.msrun
def test_in_turn_with_a_reference_alone(task, tmp_path):
    assert_same(split(task, tmp_path / "apart", 1, 1, scorers=1), together(task, tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("reference", ["start", "base"])
def test_a_reference_under_adapters_has_weights_of_its_own(task, tmp_path, reference):
    settings = (BEHIND, "lora.rank=4", f"lora.reference={reference}", *CRITIC)
    run = split(task, tmp_path / "apart", 1, 1, *settings, scorers=1)
    assert_same(run, together(task, tmp_path / "one", *settings))


@pytest.mark.slow
@pytest.mark.msrun
def test_two_ranks_score_in_a_layout_of_their_own(task, one, tmp_path):
    """With tensor parallelism, whose sums have another order; the policy's answers are the same at first."""
    run = split(task, tmp_path, 1, 1, BEHIND, *CRITIC, "score_yaml.parallel_config.model_parallel=2", scorers=2)
    assert run.responses[:16] == one.responses[:16]
    for name in ("critic/vf_loss", "critic/values/mean", "actor/reward_kl_penalty"):
        np.testing.assert_allclose(column(run, name)[:2], column(one, name)[:2], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.msrun
def test_replicas_that_score_share_the_step(task, tmp_path):
    settings = (BEHIND, *CRITIC, *jobs.layout("train", "dp2"))
    apart = split(task, tmp_path / "apart", 2, 1, *settings, scorers=2)
    assert_same(apart, split(task, tmp_path / "split", 2, 1, *settings))


@pytest.mark.slow
@pytest.mark.msrun
def test_a_run_goes_on_with_and_without_ranks_that_score(task, tmp_path):
    """The critic's weights, moments and count of updates are in the checkpoint, whoever trains it."""
    whole = together(task, tmp_path / "whole", *CRITIC)
    saving = (*CRITIC, "trainer.save_freq=1")
    shorter = (*saving, "trainer.total_steps=2")
    split(task, tmp_path / "first", 1, 1, *shorter, scorers=1)
    first = together(task, tmp_path / "first", *saving, resume_training="auto")
    together(task, tmp_path / "second", *shorter)
    second = split(task, tmp_path / "second", 1, 1, *saving, scorers=1, resume_training="auto")
    for run in (first, second):
        assert run.responses == whole.responses
        assert_same_critic(run, whole)
        np.testing.assert_array_equal(column(run, "critic/vf_loss"), column(whole, "critic/vf_loss"))


BESIDE = "trainer.scoring_ranks=infer"


@pytest.mark.msrun
def test_ranks_that_generate_score_what_they_drew(task, one, tmp_path):
    """The critic stays with the policy."""
    run = split(task, tmp_path, 1, 1, BEHIND, BESIDE, *CRITIC)
    assert_same(run, one)
    assert_same_critic(run, one)
    for phase in ("gen", "ref", "values", "update_critic", "update_actor"):
        assert run.metrics[2][f"timing_per_token_ms/{phase}"] > 0, phase


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(
    "settings",
    [
        (),  # in turn
        (BEHIND, "lora.rank=4", "lora.reference=base"),
        (BEHIND, "rollout.tokens_per_step=40"),
        (BEHIND, "dynamic_sampling.enabled=True", "dynamic_sampling.max_rounds=3"),
    ],
)
def test_they_do_in_other_schedules(task, tmp_path, settings):
    apart = split(task, tmp_path / "apart", 1, 1, BESIDE, *settings)
    assert_same(apart, together(task, tmp_path / "one", *settings))


@pytest.mark.slow
@pytest.mark.msrun
def test_replicas_that_generate_share_the_scoring(task, tmp_path):
    apart = split(task, tmp_path / "apart", 1, 2, BEHIND, BESIDE)
    assert_same(apart, together(task, tmp_path / "one", BEHIND))


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("parts", [(), ("rollout.tokens_per_step=40",)])
def test_a_checkpoint_leaves_scores_to_the_ranks_that_go_on(task, tmp_path, parts):
    """Batches that are drawn and not trained on come without the reference's log-probs."""
    settings = (BEHIND, "trainer.save_freq=1", "trainer.total_steps=4", *parts)
    whole = together(task, tmp_path / "whole", *settings)
    for first, then in (((), (BESIDE,)), ((BESIDE,), (BESIDE,)), ((BESIDE,), ())):
        folder = tmp_path / f"{len(first)}{len(then)}"
        words = arguments(task, folder, *settings, *first, resume_training="auto", **divided(1, 1))
        killed_ranks.kill_all(words, folder / "killed", 2, killed_ranks.Hold(0, "update", 3, 5))
        assert_same(split(task, folder, 1, 1, *settings, *then, resume_training="auto"), whole)
