from dataclasses import replace

import numpy as np
import pytest
from responses import LOG_PROBS, made_rollout, with_advantages
from step_parts import with_context

from mindrlhf.metrics.experience import (
    add_conversations,
    add_experience,
    add_log_prob_difference,
    add_reward_troubles,
    add_turns,
    token_counts,
)
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.types import Experience, Prompt, RolloutGroup


def make_experience(prompt_id, prompt_length, lengths, finishes, rewards, by_function, advantages, shift=None):
    """An experience whose old log-probs are the engine's plus `shift` (None: there are none)."""
    rng = np.random.default_rng(prompt_id)
    log_probs = [-rng.random(length).astype(np.float32) for length in lengths]
    rollouts = tuple(
        made_rollout(prompt_id, index, np.arange(length), finish, **dict.fromkeys(LOG_PROBS, log_probs[index]))
        for index, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
    )
    group = RolloutGroup(Prompt(prompt_id, np.arange(prompt_length, dtype=np.int32)), rollouts)
    by_function = {name: np.array(values, np.float64) for name, values in by_function.items()}
    one = with_advantages(Experience(group, np.array(rewards, np.float64), by_function, None, 1), advantages)
    if shift is None:
        return one
    return one.with_tokens(old_log_probs=tuple(values + np.float32(shift) for values in log_probs))


@pytest.fixture
def experiences():
    nan = np.nan
    return [
        make_experience(
            1, 5, [2, 4], ["eos", "length"], [1.0, 0.0], {"gsm8k": [1, 0], "format": [0.5, nan]}, [0.5, -0.5], 0.25
        ),
        make_experience(2, 7, [4, 1], ["length", "stop"], [2.0, 2.0], {"gsm8k": [2, 2], "format": [1, 1]}, [0, 0], 0.5),
        make_experience(3, 7, [1, 4], ["eos", "length"], [nan, 3.0], {"gsm8k": [nan, 3], "format": [nan, nan]}, [0, 2]),
    ]


def results(experiences, max_prompt_length=7):
    metrics = MetricSet()
    add_experience(metrics, experiences, max_prompt_length)
    return metrics.results()


def test_lengths_and_clip_ratios(experiences):
    values = results(experiences, max_prompt_length=7)
    assert values["response_length/mean"] == pytest.approx(16 / 6)
    assert (values["response_length/max"], values["response_length/min"]) == (4, 1)
    assert values["response_length/clip_ratio"] == 0.5, "as the engine recorded it, whatever the lengths"
    assert values["prompt_length/mean"] == pytest.approx(38 / 6)
    assert (values["prompt_length/max"], values["prompt_length/min"]) == (7, 5)
    assert values["response/aborted_ratio"] == 0.0
    assert values["prompt_length/clip_ratio"] == pytest.approx(4 / 6)
    assert token_counts(experiences) == (16, 16 + 2 * (5 + 7 + 7))


def test_rewards_leave_out_what_has_none(experiences):
    values = results(experiences)
    for name in ("critic/score", "critic/rewards"):
        assert values[f"{name}/mean"] == pytest.approx((1 + 0 + 2 + 2 + 3) / 5)
        assert (values[f"{name}/max"], values[f"{name}/min"]) == (3, 0)
    assert values["reward/gsm8k/mean"] == pytest.approx(8 / 5)
    assert values["reward/gsm8k/std"] == pytest.approx(np.std([1, 0, 2, 2, 3], ddof=1))
    assert values["reward/gsm8k/missing"] == 1
    assert values["reward/unscored"] == 1
    assert values["reward/format/mean"] == pytest.approx(2.5 / 3)
    assert values["reward/format/missing"] == 3


def test_advantages_are_averaged_over_tokens(experiences):
    values = results(experiences)
    assert values["critic/advantages/mean"] == pytest.approx((2 * 0.5 - 4 * 0.5 + 4 * 2) / 16)
    assert (values["critic/advantages/max"], values["critic/advantages/min"]) == (2, -0.5)


def test_groups_without_spread(experiences):
    values = results(experiences)
    assert values["group/zero_std_fraction"] == pytest.approx(2 / 3), "equal rewards, and one reward only"
    assert values["group/reward_std"] == pytest.approx((np.std([1, 0], ddof=1) + 0) / 2)


def test_single_responses_have_no_group_to_compare_with():
    """PPO learns from them: a run must not be told that all answers to a prompt score the same."""
    values = results([make_experience(n, 5, [2], ["eos"], [float(n)], {"gsm8k": [n]}, [0.5]) for n in range(3)])
    assert values["critic/rewards/mean"] == 1
    assert not any(name.startswith("group/") for name in values)


def test_difference_between_engine_and_train_graph(experiences):
    values = results(experiences)
    # The first group has 6 tokens with d = 0.25, the second 5 with d = 0.5, the third has no old log-probs.
    assert values["rollout_corr/kl"] == pytest.approx(-(6 * 0.25 + 5 * 0.5) / 11, rel=1e-5)
    k3 = (6 * (np.exp(0.25) - 1.25) + 5 * (np.exp(0.5) - 1.5)) / 11
    assert values["rollout_corr/k3_kl"] == pytest.approx(k3, rel=1e-5)
    assert values["rollout_corr/log_prob_diff/mean"] == pytest.approx((6 * 0.25 + 5 * 0.5) / 11, rel=1e-5)
    assert values["rollout_corr/log_prob_diff/max"] == pytest.approx(0.5, rel=1e-5)
    differences = [
        np.exp(old) - np.exp(rollout.row("policy_log_probs"))
        for experience in experiences[:2]
        for rollout, old in zip(experience.group.rollouts, experience.rows("old_log_probs"), strict=True)
    ]
    flat = np.abs(np.concatenate(differences))
    assert values["training/rollout_probs_diff_mean"] == pytest.approx(flat.mean(), rel=1e-5)
    assert values["training/rollout_probs_diff_max"] == pytest.approx(flat.max(), rel=1e-5)
    assert not any(name.startswith("rollout_corr") for name in results(experiences[2:]))


def test_the_kl_is_that_of_the_distribution_drawn_from():
    """With top-k, top-p or a penalty the behaviour log-probs are others than the engine's of the policy."""
    policy, behaviour = np.log(np.array([0.2, 0.4])), np.log(np.array([0.25, 0.8]))
    rollout = made_rollout(0, 0, [1, 2], behaviour_log_probs=behaviour, policy_log_probs=policy)
    metrics = MetricSet()
    add_log_prob_difference(metrics, [rollout], [policy])
    values = metrics.results()
    assert values["rollout_corr/kl"] == pytest.approx(np.log([1.25, 2.0]).mean())
    assert values["rollout_corr/k3_kl"] == pytest.approx(np.mean([0.8 - np.log(0.8) - 1, 0.5 - np.log(0.5) - 1]))
    assert values["rollout_corr/log_prob_diff/max"] == values["training/rollout_probs_diff_max"] == 0.0


def test_absurd_log_probs_stay_finite():
    metrics, absurd = MetricSet(), np.array([-2000.0])
    rollout = made_rollout(0, 0, [1], **dict.fromkeys(LOG_PROBS, absurd))
    add_log_prob_difference(metrics, [rollout], [np.array([-0.1])])
    values = metrics.results()
    assert values["rollout_corr/k3_kl"] == pytest.approx(np.exp(20.0) - 21)
    assert values["rollout_corr/log_prob_diff/max"] == pytest.approx(1999.9)


@pytest.mark.parametrize("by_token", [False, True])
def test_tokens_that_were_not_sampled_change_no_metric(experiences, by_token):
    """Lengths, advantages, values and log-probs are of the others."""
    rows = [tuple(np.linspace(0, 1, n, dtype=np.float32) for n in one.lengths) for one in experiences]
    given = [
        one.with_tokens(values=row, returns=row, **({"advantages": row} if by_token else {}))
        for one, row in zip(experiences, rows, strict=True)
    ]
    mixed = [with_context(one) for one in given]
    assert results(mixed) == results(given)
    sampled, total = token_counts(mixed)
    assert (sampled, total) == (16, token_counts(given)[1] + 3 * (1 + 2))


def test_a_group_at_a_time_is_the_same(experiences):
    metrics = MetricSet()
    for experience in experiences:
        one = MetricSet()
        add_experience(one, [experience], max_prompt_length=6)
        metrics.merge(one)
    assert metrics.results() == pytest.approx(results(experiences, max_prompt_length=6), rel=1e-12)


def test_failures_and_timeouts():
    metrics = MetricSet()
    for _ in range(2):
        add_reward_troubles(metrics, failures={"gsm8k": 2}, timeouts={"gsm8k": 0, "judge": 3})
    assert metrics.results() == {
        "reward/gsm8k/failures": 4,
        "reward/gsm8k/timeouts": 0,
        "reward/judge/timeouts": 6,
    }


def test_conversations_and_their_calls():
    metrics = MetricSet()
    for calls, failures in ((4, 1), (0, 0)):
        tokens = {"assistant": 30, "tool": 6}
        add_conversations(metrics, 5, turns=8, calls=calls, failures=failures, lost=1, seconds=calls / 8, tokens=tokens)
    assert metrics.results() == {
        "conversation/turns": 1.6,
        "conversation/lost": 2,
        "conversation/assistant_tokens": 6.0,
        "conversation/tool_tokens": 1.2,
        "tools/call_frequency": 0.4,
        "tools/failure_frequency": 0.25,
        "tools/seconds": 0.125,
    }


@pytest.mark.parametrize(
    ("sampled", "turns"),
    [
        ("1", 2),  # the prompt and an answer to it
        ("1110011", 4),
        ("001100101", 6),  # the environment's first text belongs to the prompt
        ("110011000", 4),  # the limit cut the last answer off
    ],
)
def test_turns_are_counted_as_by_verl(sampled, turns):
    experience = make_experience(1, 3, [len(sampled), 2], ["stop", "length"], [1, 0], {}, [1, -1])
    first, second = experience.group.rollouts
    mask = np.array([sign == "1" for sign in sampled])
    metrics = MetricSet()
    add_turns(metrics, [replace(experience.group, rollouts=(replace(first, tokens={"sampled": mask}), second))])
    assert metrics.results() == {
        "num_turns/mean": (turns + 2) / 2,
        "num_turns/max": max(turns, 2),
        "num_turns/min": 2,
    }
