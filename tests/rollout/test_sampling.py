"""Drawing tokens: the filters and the probabilities against NumPy, over an even grid of uniform numbers.

With u = (i + 1/2) / n for i = 0..n-1, the share of draws that fall on a token is its probability to within 1/n, so that
sets and probabilities are seen without chance.
"""

from functools import cache

import numpy as np
import pytest
from reference_sampling import filtered
from slow_cases import few_of
from small_model import log_softmax

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.rollout.sampling import Sampler, block_size, rule_of

VOCABULARY, DRAWS, STOP = 60, 2000, (3, 17)
# Both ends of what `random.uniform` gives, and some between.
NUMBERS = np.array([0.0, 2.0**-23, *np.random.default_rng(3).random(20), 1 - 2.0**-22, 1 - 2.0**-23], np.float32)


@cache
def compiled(settings: SamplingSettings, vocabulary: int) -> Sampler:
    """One graph for each setting and vocabulary; it compiles anew for another number of rows."""
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    return Sampler([settings], vocabulary, STOP)


def run(settings: dict, logits, uniform, ban_stop=None, seen=None):
    """Token, behaviour log-prob and policy log-prob of each row."""
    from mindspore import Tensor

    sampler = compiled(SamplingSettings(**settings), logits.shape[1])
    ban_stop = np.zeros(len(logits)) if ban_stop is None else ban_stop
    seen = np.zeros((1, 1)) if seen is None else seen
    rules = np.repeat(rule_of(SamplingSettings(**settings), logits.shape[1])[:, None], len(logits), 1)
    out = sampler(*(Tensor(np.asarray(part, np.float32)) for part in (logits, uniform, ban_stop, rules, seen)))
    return [part.asnumpy() for part in out]


def random_logits(rows=3, vocabulary=VOCABULARY, scale=2.0, seed=0):
    return (np.random.default_rng(seed).normal(size=(rows, vocabulary)) * scale).astype(np.float32)


def grid(count=DRAWS):
    return (np.arange(count) + 0.5) / count


SETTINGS = few_of(
    [
        {},
        {"top_k": 1},
        {"top_k": 1000},
        {"top_p": 1e-6},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "min_new_tokens": 4},
    ],
    [
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.7},
    ],
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "plain")
def test_draws_have_the_probabilities_that_the_filters_leave(settings):
    """Three rows of logits, each drawn from 2,000 times."""
    rows = random_logits()
    # Stop tokens are among the most probable ones, where a ban shows.
    rows[:, STOP] = rows.max(-1, keepdims=True) - 0.5
    seen = np.random.default_rng(1).random((3, VOCABULARY)) < 0.4
    banned = STOP if settings.get("min_new_tokens") else ()
    uniform = np.tile(grid(), 3)
    token, behaviour, policy = run(
        settings,
        np.repeat(rows, DRAWS, 0),
        uniform,
        ban_stop=np.ones(3 * DRAWS),
        seen=np.repeat(seen, DRAWS, 0) if "repetition_penalty" in settings else None,
    )
    options = {key: value for key, value in settings.items() if key != "min_new_tokens"}
    raw = log_softmax(rows / settings.get("temperature", 1.0))
    for row, (tokens, logs, policies) in enumerate(
        zip(token.reshape(3, -1), behaviour.reshape(3, -1), policy.reshape(3, -1), strict=True)
    ):
        expected = filtered(rows[row], **options, seen=np.flatnonzero(seen[row]), banned=banned)
        shares = np.bincount(tokens, minlength=VOCABULARY) / DRAWS
        assert set(np.flatnonzero(shares)) <= set(np.flatnonzero(expected))
        assert set(np.flatnonzero(expected > 1 / DRAWS)) <= set(np.flatnonzero(shares))
        np.testing.assert_allclose(shares, expected, rtol=0, atol=1.01 / DRAWS)
        assert (np.diff(tokens) >= 0).all()  # the inverse of the cumulative distribution
        np.testing.assert_allclose(logs, np.log(expected[tokens]), rtol=0, atol=1e-5)
        np.testing.assert_allclose(policies, raw[row, tokens], rtol=0, atol=1e-5)


FILTERS = {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "min_new_tokens": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [[{"temperature": 0.7}, FILTERS], [{"top_k": 5}, {"top_p": 0.7, "temperature": 1.4}, {"min_p": 0.1}, FILTERS]],
)
def test_a_row_is_drawn_by_its_own_rule(others):
    """The same bits in one graph for all rules as in a graph of its own."""
    from mindspore import Tensor

    kinds = [SamplingSettings(**one) for one in ({}, {"temperature": 0.0}, *others)]
    logits, uniform = random_logits(20 * len(kinds)), np.random.default_rng(5).random(20 * len(kinds))
    rows = [np.arange(i, len(logits), len(kinds)) for i in range(len(kinds))]
    seen = (np.random.default_rng(6).random(logits.shape) < 0.4).astype(np.float32)
    ban = np.array([bool(one.min_new_tokens) for one in kinds] * 20)
    rules = np.stack([rule_of(one, VOCABULARY) for one in kinds] * 20, 1)
    inputs = [np.asarray(part, np.float32) for part in (logits, uniform, ban, rules, seen)]
    together = [part.asnumpy() for part in Sampler(kinds, VOCABULARY, STOP)(*map(Tensor, inputs))]
    for own, one in zip(rows, kinds, strict=True):
        parts = [part[:, own] if part is inputs[3] else part[own] for part in inputs]
        alone = Sampler([one], VOCABULARY, STOP)(*(Tensor(part.copy()) for part in parts))
        for part, expected in zip(together, alone, strict=True):
            assert part[own].tobytes() == expected.asnumpy().tobytes(), one


def test_stop_tokens_are_banned_row_by_row():
    rows = np.zeros((2, VOCABULARY))
    rows[:, STOP[0]] = 30.0
    token, behaviour, _ = run({"min_new_tokens": 1}, rows, [0.5, 0.5], ban_stop=[0.0, 1.0])
    assert token[0] == STOP[0]
    assert token[1] not in STOP
    np.testing.assert_allclose(behaviour, [0.0, -np.log(VOCABULARY - 2)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 2.0, "min_new_tokens": 3}], ids=["plain", "penalty"])
def test_temperature_zero_takes_the_largest(settings):
    rows = random_logits(rows=5)
    rows[0, STOP[0]] = 50.0
    seen = np.random.default_rng(2).random(rows.shape) < 0.5
    token, behaviour, policy = run(
        {"temperature": 0.0, **settings}, rows, np.full(5, 0.9), ban_stop=np.ones(5), seen=seen if settings else None
    )
    expected = [
        filtered(row, repetition_penalty=2.0, seen=np.flatnonzero(s), banned=STOP).argmax()
        if settings
        else row.argmax()
        for row, s in zip(rows, seen, strict=True)
    ]
    assert token.dtype == np.int32
    np.testing.assert_array_equal(token, expected)
    assert (behaviour == 0).all()
    np.testing.assert_allclose(policy, log_softmax(rows)[np.arange(5), expected], rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [61, 320, 2048, 151936])
def test_the_search_inverts_the_cumulative_distribution(vocabulary):
    """Prime, small and Qwen's own vocabulary; both ends of the uniform numbers among others."""
    logits = random_logits(1, vocabulary, scale=3.0)
    token, behaviour, _ = run({}, np.repeat(logits, len(NUMBERS), 0), NUMBERS)
    expected = filtered(logits[0])
    np.testing.assert_allclose(behaviour, np.log(expected[token]), rtol=0, atol=2e-5)
    ends = np.cumsum(expected)
    error = 2e-5  # of a float32 sum over the vocabulary
    assert (ends[token] + error >= NUMBERS).all()
    assert (ends[token] - expected[token] - error <= NUMBERS).all()


@pytest.mark.parametrize("vocabulary", [61, 320])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_what_has_no_probability_is_never_drawn(vocabulary, place):
    """Only three tokens can be drawn: neither end of the uniform numbers, nor rounding, may land beside them."""
    start = {"first": 0, "middle": vocabulary // 2, "last": vocabulary - 3}[place]
    logits = np.full((1, vocabulary), -1e5)
    logits[0, start : start + 3] = [0.0, 1e-3, -1.0]
    token, behaviour, _ = run({}, np.repeat(logits, len(NUMBERS), 0), NUMBERS)
    assert token[NUMBERS.argmin()] == start
    assert token[NUMBERS.argmax()] == start + 2
    assert set(token) == {start, start + 1, start + 2}
    np.testing.assert_allclose(behaviour, np.log(filtered(logits[0])[token]), rtol=0, atol=1e-5)


def test_rounding_lands_on_no_token_beside_the_possible_ones():
    """Four thousand rows, drawn from where one block's sum ends, at most the last one's: a block is summed twice."""
    vocabulary, rows, rng = 320, np.arange(4000), np.random.default_rng(4)
    dense = random_logits(len(rows), vocabulary, scale=3.0)
    token, _, _ = run({}, dense, np.full(len(rows), NUMBERS.max()))
    assert token.max() < vocabulary

    sparse = np.where(rng.random(dense.shape) < 0.7, -1e5, dense)
    weights = np.exp(sparse - sparse.max(-1, keepdims=True))
    ends = np.cumsum(weights, -1) / weights.sum(-1, keepdims=True)
    blocks = ends[:, block_size(vocabulary) - 1 :: block_size(vocabulary)]
    chosen = blocks[rows, rng.integers(0, blocks.shape[1], len(rows))]
    token, behaviour, _ = run({}, sparse, np.minimum(chosen, NUMBERS.max()))
    assert (weights[rows, token] > 0).all()
    assert np.isfinite(behaviour).all()
    assert 0.2 < (ends[rows, token] < chosen + 1e-6).mean() < 0.9  # many were rounded below their edge, many above


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.7}], ids=["top_k", "top_p"])
def test_ties_are_kept_together(settings):
    """Equal logits at the edge of top-k or top-p have equal claims: here the edge is after four of six."""
    logits = np.full((1, VOCABULARY), -4.0)
    logits[0, 5], logits[0, 10:16] = 2.0, 1.0
    token, _, _ = run(settings, np.repeat(logits, 3 * DRAWS, 0), grid(3 * DRAWS))
    assert set(token) == {5, 10, 11, 12, 13, 14, 15}


@pytest.mark.parametrize("vocabulary", [1, 2, 61, 64, 320, 2048, 151643, 151936, 152064])
def test_blocks_divide_the_vocabulary(vocabulary):
    block = block_size(vocabulary)
    assert vocabulary % block == 0
    nearer = [b for b in range(1, vocabulary + 1) if vocabulary % b == 0]
    assert max(block, vocabulary // block) == min(max(b, vocabulary // b) for b in nearer)
