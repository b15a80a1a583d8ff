"""Advantages against golden numbers, and against the definitions written out with Python's exact statistics."""

import itertools
import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from mindrlhf.algorithms.advantages import (
    ADVANTAGES,
    RewardBatch,
    compute_advantages,
    gae_with_returns,
)
from mindrlhf.errors import UserError

TOLERANCE = 2e-6


# Golden file


@pytest.fixture(scope="module")
def golden(shared):
    return json.loads((shared / "golden" / "policy_losses.json").read_text())


@pytest.fixture(scope="module")
def golden_batch(golden):
    inputs = golden["inputs"]
    lengths = np.array(inputs["mask"]).sum(axis=1).astype(int)
    rewards = np.array(inputs["score"])
    assert inputs["uid"] == ["a"] * 4 + ["b"] * 4
    values = [np.array(row)[:length] for row, length in zip(inputs["values"], lengths, strict=True)]
    return RewardBatch(
        rewards=[rewards[:4], rewards[4:]],
        lengths=[lengths[:4], lengths[4:]],
        values=[values[:4], values[4:]],
    )


def padded(groups, batch, tokens):
    """One entry per sample -> [rows, tokens], as a trainer fills its rows."""
    lengths = np.concatenate(batch.lengths)
    matrix = np.zeros((len(lengths), tokens))
    for row, length, advantage in zip(matrix, lengths, (one for group in groups for one in group), strict=True):
        row[:length] = advantage
    return matrix


VERL_NAMES = {
    "grpo": "grpo",
    "dr_grpo(norm=False)": "dr_grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "grpo_passk": "grpo_passk",
    "gae(gamma=1,lam=.95)": "gae",
}
# verl's grpo_vectorized floors the variance at 1e-6; on this batch that changes nothing, and it is the same method.
VERL_NAMES["grpo_vectorized"] = "grpo"
COMPARED_ELSEWHERE = {"reinforce_plus_plus.returns", "gae.returns"}


def test_verl_advantages(golden, golden_batch):
    mask = np.array(golden["inputs"]["mask"])
    assert set(golden["verl.advantages"]) == set(VERL_NAMES) | COMPARED_ELSEWHERE
    for theirs, name in VERL_NAMES.items():
        ours = padded(compute_advantages(name, golden_batch), golden_batch, mask.shape[1])
        expected = np.array(golden["verl.advantages"][theirs]) * mask  # gae's are not zeroed there
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE, err_msg=theirs)


def test_verl_returns(golden, golden_batch):
    mask = np.array(golden["inputs"]["mask"])
    returns = padded(gae_with_returns(golden_batch, 1.0, 0.95)[1], golden_batch, mask.shape[1])
    np.testing.assert_allclose(returns, np.array(golden["verl.advantages"]["gae.returns"]) * mask, atol=TOLERANCE)
    # ReMax with a greedy reward of 0 is the plain return.
    plain = RewardBatch(golden_batch.rewards, golden_batch.lengths, greedy_rewards=[0.0, 0.0])
    returns = padded(compute_advantages("remax", plain), plain, mask.shape[1])
    expected = np.array(golden["verl.advantages"]["reinforce_plus_plus.returns"]) * mask  # the empty row has a reward
    np.testing.assert_allclose(returns, expected, atol=TOLERANCE)


@pytest.mark.parametrize(("theirs", "std"), [("group(1e-4)", "group"), ("none", "none"), ("batch", "batch")])
def test_trl_advantages(golden, golden_batch, theirs, std):
    ours = np.concatenate(compute_advantages("grpo", golden_batch, advantage_std=std, advantage_eps=1e-4))
    np.testing.assert_allclose(ours, golden["trl.advantages"][theirs], rtol=0, atol=TOLERANCE)


# The definitions once more, sample by sample


def valid(values):
    return [value for value in values if math.isfinite(value)]


def stdev(values):
    return statistics.stdev(values) if len(values) > 1 and max(values) > min(values) else 0.0


def by_group(rule):
    """rule(reward, valid rewards of its group, valid rewards of the others, all valid rewards of the batch)."""

    def method(batch):
        everything = valid(reward for group in batch.rewards for reward in group)
        result = []
        for group in batch.rewards:
            advantages = []
            for index, reward in enumerate(group):
                others = valid([*group[:index], *group[index + 1 :]])
                comparable = math.isfinite(reward) and others and stdev([reward, *others]) > 0
                advantages.append(rule(reward, valid(group), others, everything) if comparable else 0.0)
            result.append(advantages)
        return result

    return method


def over(deviation, spread, eps=1e-6):
    return deviation / (spread + eps) if spread else deviation


def passk(reward, group, others, _):
    first = group.index(max(group))
    return (reward - max(others)) / (stdev(group) + 1e-6) if group[first] is reward else 0.0


mean = statistics.fmean
DEFINITIONS = {
    ("grpo", ()): by_group(lambda r, group, others, batch: over(r - mean(group), stdev(group))),
    ("grpo", (("leave_one_out", True),)): by_group(lambda r, g, others, b: over(r - mean(others), stdev(others))),
    ("grpo", (("advantage_std", "batch"),)): by_group(
        lambda r, group, others, batch: over(r - mean(group), stdev(batch))
    ),
    ("grpo", (("advantage_std", "batch"), ("leave_one_out", True))): by_group(
        lambda r, group, others, batch: over(r - mean(others), stdev(batch))
    ),
    ("grpo", (("advantage_std", "none"),)): by_group(lambda r, group, others, batch: r - mean(group)),
    ("dr_grpo", ()): by_group(lambda r, group, others, batch: r - mean(group)),
    ("rloo", ()): by_group(lambda r, group, others, batch: r - mean(others)),
    ("gpg", ()): by_group(
        lambda r, group, others, batch: (r - mean(group)) * len(batch) / max(sum(x != 0 for x in batch), 1)
    ),
}


def reward_batches(batches, **fields):
    """RewardBatch of each of the 1,000 batches, rows in order of groups."""
    for index, rewards in enumerate(batches.rewards):
        bounds = np.cumsum([len(group) for group in rewards])[:-1]
        lengths = batches.lengths[index]
        extra = {
            name: [
                list(part) for part in _split([row[:n] for row, n in zip(array[index], lengths, strict=True)], bounds)
            ]
            for name, array in fields.items()
        }
        yield RewardBatch(rewards, np.split(lengths, bounds), **extra)


def _split(rows, bounds):
    edges = [0, *bounds, len(rows)]
    return [rows[low:high] for low, high in itertools.pairwise(edges)]


@pytest.fixture(scope="module")
def scored(request, batches):
    """Batches with rewards and lengths only: 200, and 1,000 with --slow."""
    return list(itertools.islice(reward_batches(batches), None if request.config.getoption("--slow") else 200))


@pytest.fixture(scope="module")
def with_tokens(request, batches):
    """The same number of batches with rewards per token and a critic's values."""
    every = reward_batches(batches, token_rewards=batches.token_rewards, values=batches.values)
    return list(itertools.islice(every, None if request.config.getoption("--slow") else 200))


def assert_same(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "options"), DEFINITIONS)
def test_equals_its_definition(name, options, scored):
    for batch in scored:
        ours = compute_advantages(name, batch, **dict(options))
        assert all(group.dtype == np.float32 for group in ours)
        assert_same(ours, DEFINITIONS[name, options](batch))


def test_opo_weighs_the_baseline_by_length(scored):
    for batch in scored:
        expected = []
        for rewards, lengths in zip(batch.rewards, batch.lengths, strict=True):
            pairs = [(r, n) for r, n in zip(rewards, lengths, strict=True) if math.isfinite(r)]
            tokens = sum(n for _, n in pairs)
            baseline = math.fsum(r * n for r, n in pairs) / tokens if tokens else 0.0
            comparable = stdev([r for r, _ in pairs]) > 0
            expected.append([r - baseline if comparable and math.isfinite(r) else 0.0 for r in rewards])
        assert_same(compute_advantages("opo", batch), expected)


def test_passk_gives_the_lead_of_the_best_sample(scored):
    for batch in scored:
        for rewards, advantages in zip(batch.rewards, compute_advantages("grpo_passk", batch), strict=True):
            ranked = sorted(valid(rewards))
            if stdev(ranked) == 0:
                assert not advantages.any()
                continue
            best = int(np.nanargmax(rewards))
            lead = (ranked[-1] - ranked[-2]) / (stdev(ranked) + 1e-6)
            assert advantages[best] == pytest.approx(lead, rel=2e-6)
            assert not np.delete(advantages, best).any()


def whitened(rows_of_groups):
    """Token by token; None marks a token that counts nowhere and gets 0."""
    tokens = [x for group in rows_of_groups for row in group for x in row if x is not None]
    if len(tokens) < 2 or max(tokens) == min(tokens):
        return [[[0.0] * len(row) for row in group] for group in rows_of_groups]
    centre, scale = mean(tokens), 1.0 / math.sqrt(statistics.variance(tokens) + 1e-8)
    return [[[0.0 if x is None else (x - centre) * scale for x in row] for row in group] for group in rows_of_groups]


def test_reinforce_plus_plus_baseline(scored):
    for batch in scored:
        centred = DEFINITIONS["dr_grpo", ()](batch)
        rows = [
            [[a if math.isfinite(r) else None] * n for a, r, n in zip(*triple, strict=True)]
            for triple in zip(centred, batch.rewards, batch.lengths, strict=True)
        ]
        expected = whitened(rows)
        ours = compute_advantages("reinforce_plus_plus_baseline", batch)
        for mine, theirs in zip(ours, expected, strict=True):
            for advantage, row in zip(mine, theirs, strict=True):
                assert row == pytest.approx([advantage] * len(row), rel=2e-6, abs=TOLERANCE)


def token_rewards(batch):
    """Rows of rewards per token, the sample's own at its last token; None for a sample that abstained."""
    for index, (rewards, lengths) in enumerate(zip(batch.rewards, batch.lengths, strict=True)):
        rows = []
        for sample, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            row = [float(x) for x in batch.token_rewards[index][sample]] if batch.token_rewards else [0.0] * length
            if length:
                row[-1] += reward
            rows.append(row if math.isfinite(reward) else [None] * length)
        yield rows


def future(row, discount):
    """Sum over k of discount**k * row[t + k], for each t."""
    if None in row:
        return row
    return [math.fsum(discount**k * x for k, x in enumerate(row[t:])) for t in range(len(row))]


def assert_same_rows(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        for row, other in zip(mine, theirs, strict=True):
            assert row.dtype == np.float32
            np.testing.assert_allclose(row, other, rtol=2e-6, atol=TOLERANCE)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(with_tokens, gamma):
    for batch in with_tokens:
        expected = whitened([[future(row, gamma) for row in rows] for rows in token_rewards(batch)])
        assert_same_rows(compute_advantages("reinforce_plus_plus", batch, gamma=gamma), expected)


def test_remax(with_tokens):
    for index, batch in enumerate(with_tokens):
        greedy = [float("nan") if (index + place) % 5 == 0 else 0.3 * place for place in range(len(batch.rewards))]
        batch = RewardBatch(batch.rewards, batch.lengths, batch.token_rewards, greedy_rewards=greedy)
        expected = [
            [[0.0 if x is None or math.isnan(baseline) else x - baseline for x in future(row, 1.0)] for row in rows]
            for rows, baseline in zip(token_rewards(batch), greedy, strict=True)
        ]
        assert_same_rows(compute_advantages("remax", batch), expected)


def test_gae(with_tokens):
    gamma, lam = 0.98, 0.9
    for batch in with_tokens:
        estimates, returns = [], []
        for rows, values_of_group in zip(token_rewards(batch), batch.values, strict=True):
            group = []
            for row, values in zip(rows, values_of_group, strict=True):
                following = [*(float(v) for v in values[1:]), 0.0]
                errors = [
                    None if r is None else r + gamma * after - float(v)
                    for r, v, after in zip(row, values, following, strict=False)
                ]
                group.append(future(errors, gamma * lam))
            estimates.append(group)
            returns.append(
                [
                    [(a or 0.0) + float(v) for a, v in zip(row, values, strict=True)]
                    for row, values in zip(group, values_of_group, strict=True)
                ]
            )
        assert_same_rows(compute_advantages("gae", batch, gamma=gamma, lam=lam), whitened(estimates))
        ours = [[row.astype(np.float32) for row in group] for group in gae_with_returns(batch, gamma, lam)[1]]
        assert_same_rows(ours, returns)


def test_gdpo_normalises_each_function_then_the_sum(scored):
    rng = np.random.default_rng(4)
    weights = {"accuracy": 1.0, "format": 0.25}
    for batch in scored[:200]:
        second = [np.where(rng.random(g.size) < 0.1, np.nan, rng.integers(0, 2, g.size)) for g in batch.rewards]
        parts = {"accuracy": batch.rewards, "format": second}
        by_function = [dict(zip(parts, pair, strict=True)) for pair in zip(*parts.values(), strict=True)]
        total = [np.where(np.isnan(a) & np.isnan(b), np.nan, 0.0) for a, b in zip(batch.rewards, second, strict=True)]
        normal = {name: DEFINITIONS["grpo", ()](RewardBatch(groups)) for name, groups in parts.items()}
        sums = [
            [sum(weights[name] * normal[name][g][i] for name in parts) for i in range(len(group))]
            for g, group in enumerate(total)
        ]
        pooled = [x for row, group in zip(sums, total, strict=True) for x, t in zip(row, group, strict=True) if t == 0]
        spread = stdev(pooled)
        expected = [
            [
                (x - mean(pooled)) / (spread + 1e-6) if t == 0 and spread else 0.0
                for x, t in zip(row, group, strict=True)
            ]
            for row, group in zip(sums, total, strict=True)
        ]
        given = RewardBatch(total, rewards_by_function=by_function, function_weights=weights)
        assert_same(compute_advantages("grpo", given, normalize_functions=True), expected)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_groups_does_not_matter(name, with_tokens):
    """What each rank gathers may come in any order: every group gets the same numbers."""
    for index, batch in enumerate(with_tokens[:20]):
        greedy = [0.5 * place for place in range(len(batch.rewards))]
        batch = replace(batch, greedy_rewards=greedy, teacher_log_ratios=batch.values)
        order = np.random.default_rng(index).permutation(len(batch.rewards))
        fields = {name: field for name, field in vars(batch).items() if field is not None}
        moved = RewardBatch(**{name: [field[i] for i in order] for name, field in fields.items()})
        plain, shuffled = compute_advantages(name, batch), compute_advantages(name, moved)
        for place, i in enumerate(order):
            for one, other in zip(shuffled[place], plain[i], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    sorted(name for name, method in ADVANTAGES.items() if method.compares and name != "reinforce_plus_plus_baseline"),
)
def test_nothing_to_compare_gives_exactly_zero(name):
    nan = float("nan")
    groups = [np.full(7, 0.1), np.array([3.0]), np.array([nan, 0.7]), np.array([nan, nan])]
    batch = RewardBatch(groups, lengths=[np.full(len(group), 3) for group in groups])
    for advantages, rewards in zip(compute_advantages(name, batch), groups, strict=True):
        np.testing.assert_array_equal(advantages, np.zeros(len(rewards)))


def test_the_odd_one_of_a_group_is_not_blown_up_by_leave_one_out():
    """Seven equal rewards have no spread to divide the eighth by; rounding must not make one."""
    rewards = np.array([0.1] * 7 + [0.7])
    odd = compute_advantages("grpo", RewardBatch([rewards]), leave_one_out=True)[0]
    assert odd[-1] == pytest.approx(0.6, rel=1e-6)
    assert np.abs(odd).max() < 1.0


def test_distillation_gives_the_teacher_s_log_ratios_whatever_the_rewards(with_tokens):
    for batch in with_tokens:
        batch = replace(batch, teacher_log_ratios=batch.values)
        assert_same_rows(compute_advantages("distillation", batch), batch.values)


def test_empty_batch_gives_nothing():
    for name in ADVANTAGES:
        empty = RewardBatch([], lengths=[], values=[], greedy_rewards=[], teacher_log_ratios=[])
        assert compute_advantages(name, empty) == []


def test_mistakes_are_named():
    batch = RewardBatch([np.array([0.0, 1.0])])
    with pytest.raises(UserError, match=r"Unknown advantage 'grop': did you mean 'grpo'\?"):
        compute_advantages("grop", batch)
    with pytest.raises(UserError, match=r"option of advantage grpo 'leave_one_ut': did you mean 'leave_one_out'"):
        compute_advantages("grpo", batch, leave_one_ut=True)
    with pytest.raises(UserError, match=r"Option advantage_std of advantage grpo is 'bach'.*'batch'"):
        compute_advantages("grpo", batch, advantage_std="bach")
    with pytest.raises(ValueError, match=r"RewardBatch\.lengths"):
        compute_advantages("opo", batch)
