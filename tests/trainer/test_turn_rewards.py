"""Rewards of turns in a step's advantages: by definition, and the same on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
from responses import LOG_PROBS
from step_parts import advantages, assert_same_rows, rows_of

from mindrlhf.algorithms.advantages import RewardBatch, compute_advantages
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.types import taken


def turns(rng, count):
    """Turns with context between, in front and behind: a mask, and places with a reward for most turns."""
    mask, places = [False] * int(rng.integers(0, 3)), []
    for _ in range(count):
        mask += [True] * int(rng.integers(1, 5))
        places.append(len(mask) - 1)
        mask += [False] * int(rng.integers(0, 4))  # an empty answer leaves two turns side by side
    rewards = rng.normal(size=count).tolist()
    return np.array(mask), tuple(zip(places, rewards, strict=True))[: count - int(rng.integers(0, 2))]


def with_turns(one, rng):
    """A group of conversations with rewards of turns, and their sum plus an outcome as the environment's reward."""
    drawn = [turns(rng, count) for count in rng.integers(1, 5, 3)]
    rollouts = tuple(
        replace(
            rollout,
            response_ids=np.zeros(len(mask), np.int32),
            tokens={"sampled": mask, **dict.fromkeys(LOG_PROBS, np.zeros(len(mask), np.float32))},
        ).with_values({"turn_rewards": dict(rewards)})
        for rollout, (mask, rewards) in zip(one.group.rollouts, drawn, strict=True)
    )
    outcomes = rng.integers(0, 2, 3)
    own = np.array([n + sum(r for _, r in rewards) for n, (_, rewards) in zip(outcomes, drawn, strict=True)])
    fields = {
        "rewards": (2 * own + 0.5 * outcomes).astype(np.float32),
        "rewards_by_function": {"environment": own.astype(np.float32), "format": outcomes.astype(np.float32)},
    }
    values = tuple(rng.normal(size=len(mask)).astype(np.float32) for mask, _ in drawn)
    return replace(one.with_tokens(values=values), group=replace(one.group, rollouts=rollouts), **fields)


def estimates(rewards, values, gamma, lam):
    """Sum of (gamma lam)^k delta_(t+k), by its definition."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    weights = (gamma * lam) ** np.arange(len(deltas))
    return np.array([weights[: len(deltas) - t] @ deltas[t:] for t in range(len(deltas))])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_rewards_of_turns_count_where_the_turns_end(step, name, size):
    rng = np.random.default_rng(8)
    gamma, lam = 0.9, 0.8 if name == "gae" else 1.0
    step = [with_turns(one, rng) for one in step]
    step[1].rewards[2] = np.nan  # this one counts nowhere
    functions = "reward.functions=[{name: environment, weight: 2}, {name: format, weight: 0.5}]"
    options = [f"algorithm.gamma={gamma}", *([f"algorithm.lam={lam}"] if name == "gae" else [])]
    settings = load_grpo_config(None, [f"algorithm.advantage={name}", "algorithm.beta=0", functions, *options])
    got = advantages(step, settings, size)
    every, targets = [], []
    for one in step:
        for rollout, total, values in zip(one.group.rollouts, one.rewards, one.rows("values"), strict=True):
            rewards, values = np.zeros(len(rollout.sampled)), values.astype(np.float64)
            given = rollout.row("turn_rewards")
            rewards[~np.isnan(given)] = 2 * given[~np.isnan(given)]
            rewards[np.flatnonzero(rollout.sampled)[-1]] += total - rewards.sum()
            values = values[rollout.sampled] if name == "gae" else np.zeros(rollout.sampled.sum())
            every.append(estimates(rewards[rollout.sampled], values, gamma, lam))
            targets.append(values + np.nan_to_num(every[-1]))
    tokens = np.concatenate(every)
    centre, spread = np.nanmean(tokens), np.sqrt(np.nanvar(tokens, ddof=1) + 1e-8)
    expected = [np.nan_to_num((row - centre) / spread) for row in every]
    masks = [mask for one in step for mask in one.sampled]
    mine = rows_of(got, "advantages")
    assert_same_rows(taken(mine, masks), expected, 1e-6)
    assert not any(row[~mask].any() for row, mask in zip(mine, masks, strict=True))
    if name == "gae":
        assert_same_rows(taken(rows_of(got, "returns"), masks), targets, 1e-6)
    plain = [
        replace(
            one,
            group=replace(
                one.group, rollouts=tuple(replace(r, tokens={"sampled": r.sampled}) for r in one.group.rollouts)
            ),
        )
        for one in step
    ]
    at_the_end = taken(rows_of(advantages(plain, settings, size), "advantages"), masks)
    assert max(np.abs(row - other).max() for row, other in zip(at_the_end, expected, strict=True)) > 0.1


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_advantages_that_compare_responses_see_the_sum_of_turns(step, name):
    rng = np.random.default_rng(8)
    step = [with_turns(one, rng) for one in step]
    functions = "reward.functions=[{name: environment, weight: 2}, {name: format, weight: 0.5}]"
    preset = {"rloo": ["algorithm.advantage=grpo", "algorithm.leave_one_out=True"]}
    settings = load_grpo_config(
        None, [*preset.get(name, [f"algorithm.advantage={name}"]), "algorithm.beta=0", functions]
    )
    options = settings.algorithm.options_of(settings.algorithm.method)
    batch = RewardBatch([one.rewards for one in step], lengths=[one.sampled_lengths for one in step])
    expected = compute_advantages(settings.algorithm.advantage, batch, **options)
    assert_same_rows([one.advantages for one in advantages(step, settings, 2)], expected)


def test_rewards_of_turns_have_the_weight_of_the_environment(step):
    """Without a reward function that gives the environment's reward, its turns give nothing either."""
    rng = np.random.default_rng(8)
    step = [with_turns(one, rng) for one in step]
    other = [replace(one, rewards_by_function={"format": one.rewards_by_function["format"]}) for one in step]
    functions = "reward.functions=[{name: format}]"
    settings = load_grpo_config(None, ["algorithm.advantage=reinforce_plus_plus", "algorithm.beta=0", functions])
    batch = RewardBatch([one.rewards for one in step], lengths=[one.sampled_lengths for one in step])
    expected = compute_advantages("reinforce_plus_plus", batch)
    for one, rows in zip(advantages(other, settings, 1), expected, strict=True):
        assert_same_rows(taken(one.rows("advantages"), one.sampled), rows)
