"""The fused CPU operators that generate, against one token at a time and the compositions of basic operators."""

import numpy as np
import pytest
from bfloat16_numbers import pairs, rounded
from decode_inputs import alone, cache_of, drawn_by, no_context, no_histories
from mindspore import Tensor, nn, ops
from slow_cases import few_of
from small_model import SmallModel, log_softmax

from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.rollout import decode_graphs as graphs
from mindrlhf.rollout.sampling import Sampler


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "temperature"),
    few_of(
        [({}, 1.0), ({"qk_norm": True, "attention_bias": False}, 0.0)],
        [({}, 0.0), ({"qk_norm": True, "attention_bias": False}, 1.0)],
    ),
)
def test_tokens_of_one_call_are_those_of_one_by_one(fused, options, temperature):
    """Slots of uneven length, one of them empty, one that may not stop at first; with tokens of the context, some of
    which would end a turn if they were drawn; and what is written to the caches.
    """
    model = SmallModel.random(**options)
    decoder, _ = model.build(40)
    slots, size, tokens = 5, 40, graphs.FUSED_TOKENS
    rng = np.random.default_rng(3)
    ids, positions = (
        rng.integers(0, model.config.vocab_size, slots).astype(np.int32),
        np.array([0, 3, 11, 7, 20], np.int32),
    )
    angles = positions + np.array([0, 2, 9, 1, 3], np.int32)  # not those of the places in the cache
    remaining, banned = np.array([16, 5, 0, 16, 1], np.int32), np.array([0, 0, 0, 6, 0], np.int32)
    uniform = rng.random((slots, tokens)).astype(np.float32)
    settings = SamplingSettings(temperature=temperature, min_new_tokens=1, max_new_tokens=64)
    stops = (5, 9, 31, 40)
    context = no_context(slots)
    context[:, 1:4] = context[0, 9:] = 9
    context[3, :8] = np.arange(8) + 2
    found = {}
    for is_fused in (True, False):
        cache = cache_of(model.config, slots, size)
        graph = graphs.Decode(decoder, cache, Sampler([settings], model.config.vocab_size, stops))
        assert graph.fused
        graph.fused = is_fused
        now = ids.copy(), positions.copy(), angles.copy(), remaining.copy(), banned.copy()
        out = np.full((3, slots, tokens), -1.0) * np.array([1, 0, 0]).reshape((3, 1, 1))
        rule = drawn_by(settings, slots)
        if is_fused:
            inputs = (*now, *alone(slots), context, no_histories(slots), uniform, *rule)
            parts = graph(*(Tensor(part) for part in inputs))[:3]
            out = np.stack([part.asnumpy().astype(np.float64) for part in parts])
        for t in range(0 if is_fused else tokens):
            given, numbers = (part[:, t : t + 1].copy() for part in (context, uniform))
            inputs = (*now, *alone(slots), given, no_histories(slots), numbers, *rule)
            parts = [part.asnumpy() for part in graph(*(Tensor(part) for part in inputs))]
            going = now[3] > 0
            out[:, going, t] = np.stack(parts)[:, going, 0]
            drawn = parts[0][:, 0]
            now[0][going] = drawn[going]
            now[1][going] += 1
            now[2][going] += 1
            now[3][going] = np.where(np.isin(drawn, stops) & (context[:, t] < 0), 0, now[3] - 1)[going]
            now[4][...] = np.maximum(now[4] - 1, 0)
        caches = [p.asnumpy().copy() for p in (*cache.keys, *cache.values)]
        found[is_fused] = out, caches
    (token, *log_probs), caches = found[True]
    expected, composed = found[False]
    np.testing.assert_array_equal(token, expected[0])
    lengths = (token >= 0).sum(1)
    assert lengths[2] == 0
    assert lengths[4] == 1
    assert lengths[3] > 8  # it may not stop before
    given = (context >= 0) & (np.arange(tokens) < lengths[:, None])
    assert given.sum() > 8
    np.testing.assert_array_equal(token[given], context[given])
    assert not np.array(log_probs)[:, given].any()
    np.testing.assert_allclose(log_probs, expected[1:], rtol=0, atol=2e-5)
    for one, other in zip(caches, composed, strict=True):
        for slot in np.flatnonzero(lengths):
            upto = positions[slot] + lengths[slot]
            np.testing.assert_allclose(one[slot, :, :upto], other[slot, :, :upto], rtol=0, atol=1e-5)


def test_tokens_of_the_context_together_are_those_of_one_by_one(fused):
    """More of a slot, and of all slots, than are computed at a time; slots with one prompt, and one that draws none."""
    model = SmallModel.random()
    decoder, _ = model.build(320)
    slots, columns, prefix = 7, 150, 9
    rng = np.random.default_rng(6)
    runs, zeros = np.array([0, 40, 149, 3, 70, 33, 20]), np.zeros(slots, np.int32)
    remaining = np.array([5, 45, 155, 8, 75, 33, 25], np.int32)
    context = no_context(slots, columns)
    for slot, run in enumerate(runs):
        context[slot, :run] = rng.integers(0, 64, run)
    uniform, rule = rng.random((slots, columns)).astype(np.float32), drawn_by(SamplingSettings(), slots)
    shared = np.array([0, 0, 2, 2, 2, 5, 5], np.int32), zeros + prefix, np.array([0, 12, 16], np.int32)

    def run(pieces):
        cache = cache_of(model.config, slots, 320)
        for number, parameter in enumerate((*cache.keys, *cache.values)):
            parameter.asnumpy()[...] = normal(parameter.shape, number)
        graph = graphs.Decode(decoder, cache, Sampler([SamplingSettings(max_new_tokens=200)], 64, (5,)))
        ids, positions, left, out = zeros + 3, zeros + prefix, remaining.copy(), []
        for part in pieces:
            own = tuple(array[:, part].copy() for array in (context, uniform))
            inputs = (ids, positions, positions, left, zeros, *shared, own[0], no_histories(slots), own[1], *rule)
            out.append(np.stack([part.asnumpy() for part in graph(*(Tensor(one.copy()) for one in inputs))[:3]]))
            token = out[-1][0, :, 0].astype(np.int32)
            going = left > 0
            ids, positions = np.where(going, token, ids), positions + going.astype(np.int32)
            left = np.where((token == 5) & (own[0][:, 0] < 0), 0, np.maximum(left - 1, 0)).astype(np.int32)
        return np.concatenate(out, 2), [p.asnumpy().copy() for p in (*cache.keys, *cache.values)]

    (found, caches), (expected, others) = run([slice(0, columns)]), run([slice(t, t + 1) for t in range(columns)])
    kept = (found[0] >= 0).sum(1)
    assert (kept >= np.minimum(runs + 1, remaining)).all()
    assert kept[2] == columns
    np.testing.assert_array_equal(found, expected)
    for one, other in zip(caches, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_prompts_are_put_into_slots(fused):
    config = SmallModel.random().config
    shape = (3, config.num_kv_heads, 10, config.head_dim)
    prefilled = [Tensor(normal(shape, 10 + i)) for i in range(2 * config.num_layers)]
    padded = ((4, 0, 2, 2), (1, 2, 1, 1))  # with the last one again
    slots, rows = (Tensor(np.array(places, np.int32)) for places in padded)
    caches = []
    for backend in (CPU.operators(), COMPOSED):
        cache = cache_of(config, 5, 24)
        graphs.Admit(cache, backend, 9)(slots, rows, *prefilled)
        caches.append([p.asnumpy().copy() for p in (*cache.keys, *cache.values)])
    for one, other in zip(*caches, strict=True):
        np.testing.assert_array_equal(one[:, :, :9], other[:, :, :9])
        assert (np.abs(one[[0, 2, 4], :, :9]).max(axis=(1, 2, 3)) > 1).all()
        assert not one[[1, 3]].any()
        assert not one[:, :, 9:].any()


def test_prompts_are_rounded_into_packed_slots(fused):
    config = SmallModel.random().config
    shape = (3, config.num_kv_heads, 10, config.head_dim)
    prefilled = [normal(shape, 10 + i) for i in range(2 * config.num_layers)]
    cache = cache_of(config, 5, 24, packed=True)
    places = (Tensor(np.array(part, np.int32)) for part in ((4, 0), (1, 2)))
    graphs.Admit(cache, CPU.operators(), 9)(*places, *map(Tensor, prefilled))
    interleaved = [p.asnumpy() for pair in zip(cache.keys, cache.values, strict=True) for p in pair]
    for found, given in zip(interleaved, prefilled, strict=True):
        np.testing.assert_array_equal(found[[4, 0], :, :9], pairs(given[[1, 2], :, :9]))
        assert not found[1:4].any()
        assert not found[:, :, 9:].any()


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_log_probs_over_a_packed_cache_are_those_of_rounded_keys_and_values(fused, head_dim):
    """More positions than are scored at a time, against the float64 model whose keys and values are rounded."""
    model = SmallModel.random(head_dim=head_dim, qk_norm=True)
    decoder, _ = model.build(64)
    slots, tokens, run = 3, 45, 40
    rng = np.random.default_rng(9)
    ids, context = rng.integers(0, 64, slots).astype(np.int32), no_context(slots, tokens)
    context[:, :run] = rng.integers(0, 64, (slots, run))
    uniform, zeros = rng.random((slots, tokens)).astype(np.float32), np.zeros(slots, np.int32)
    graph = graphs.Decode(
        decoder, cache_of(model.config, slots, 64, packed=True), Sampler([SamplingSettings(max_new_tokens=64)], 64, ())
    )
    rest = context, no_histories(slots), uniform, *drawn_by(SamplingSettings(), slots)
    inputs = (ids, zeros, zeros, zeros + tokens, zeros, *alone(slots), *rest)
    token, _, policy = (part.asnumpy() for part in graph(*(Tensor(part) for part in inputs))[:3])
    near, far = [], []
    for slot in range(slots):
        text, drawn = np.concatenate([ids[slot : slot + 1], token[slot]]), np.arange(run, tokens)
        for errors, options in ((near, {"cached": rounded}), (far, {})):
            expected = log_softmax(model.logits(text[:-1], **options))[drawn, text[1:][drawn]]
            errors.append(np.abs(policy[slot, drawn] - expected))
    assert np.mean(near) < 0.1 * np.mean(far)
    assert np.max(far) < 0.5


@pytest.mark.parametrize(
    ("prefix", "packed"), few_of([(1, False), (21, True), (40, False)], [(1, True), (21, False), (40, True)])
)
def test_slots_with_the_same_prompt_read_it_together(fused, prefix, packed):
    """Thirteen slots in a mixed order, of three prompts, one of which has more slots than are worked on at once."""
    model = SmallModel.random()
    decoder, _ = model.build(64)
    prompts = np.array([0, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2])
    slots, size = len(prompts), 64
    first = np.array([np.flatnonzero(prompts == prompt)[0] for prompt in prompts], np.int32)
    rng = np.random.default_rng(8)
    ids, remaining = rng.integers(0, 64, slots).astype(np.int32), rng.integers(1, 17, slots).astype(np.int32)
    positions = (prefix + rng.integers(0, 8, slots)).astype(np.int32)
    remaining[4], zeros = 0, np.zeros(slots, np.int32)
    uniform, rule = rng.random((slots, graphs.FUSED_TOKENS)).astype(np.float32), drawn_by(SamplingSettings(), slots)
    found = []
    for leaders, prefixes in ((first, zeros + prefix), (np.arange(slots, dtype=np.int32), zeros + prefix)):
        cache = cache_of(model.config, slots, size, packed)
        for number, parameter in enumerate((*cache.keys, *cache.values)):
            content = normal((slots, model.config.num_kv_heads, size, model.config.head_dim), number)
            content = pairs(content) if packed else content
            content[:, :, :prefix] = content[prompts, :, :prefix]
            parameter.asnumpy()[...] = content
        graph = graphs.Decode(decoder, cache, Sampler([SamplingSettings(max_new_tokens=64)], 64, ()))
        inputs = (ids, positions, positions, remaining, zeros, leaders, prefixes, np.array([0, 40, 16], np.int32))
        inputs = (*inputs, no_context(slots), no_histories(slots), uniform, *rule)
        found.append([part.asnumpy() for part in graph(*(Tensor(part) for part in inputs))])
        assert ((found[-1][0] >= 0).sum(1) == remaining).all()
    for together, apart in zip(*found, strict=True):
        assert together.tobytes() == apart.tobytes()


def test_a_slot_does_not_feel_how_many_others_there_are(fused):
    """Sizes at which matrix products are cut in several places; each slot as one of 1 to 67, in any place."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    model = SmallModel.random(num_layers=1, **sizes)
    decoder, _ = model.build(40)
    slots = 67
    rng = np.random.default_rng(5)
    ids, positions = rng.integers(0, 64, slots).astype(np.int32), rng.integers(0, 20, slots).astype(np.int32)
    uniform = rng.random((slots, graphs.FUSED_TOKENS)).astype(np.float32)
    cache = cache_of(model.config, slots, 40)
    content = [normal(p.shape, i) for i, p in enumerate((*cache.keys, *cache.values))]
    graph = graphs.Decode(decoder, cache, Sampler([SamplingSettings(max_new_tokens=64)], 64, ()))
    found = {}
    for count in (67, 48, 33, 32, 17, 16, 3, 1):
        for parameter, array in zip((*cache.keys, *cache.values), content, strict=True):
            parameter.asnumpy()[...] = array
        going = np.zeros(slots, np.int32)
        chosen = slice(slots - count, slots) if count % 2 else slice(0, count)
        going[chosen] = 16
        rest = no_context(slots), no_histories(slots), uniform, *drawn_by(SamplingSettings(), slots)
        inputs = (ids, positions, positions, going, 0 * going, *alone(slots), *rest)
        found[count] = [part.asnumpy() for part in graph(*(Tensor(part) for part in inputs))[:3]]
        assert (found[count][0][chosen] >= 0).all()
        for part, every in zip(found[count], found[67], strict=True):
            assert part[chosen].tobytes() == every[chosen].tobytes(), count


def test_no_token_is_begun_with_enough_slots_done(fused):
    model = SmallModel.random()
    decoder, _ = model.build(40)
    sampler = Sampler([SamplingSettings(max_new_tokens=64)], model.config.vocab_size, ())
    graph = graphs.Decode(decoder, cache_of(model.config, 4, 40), sampler)
    remaining, zeros = np.array([3, 9, 5, 16], np.int32), np.zeros(4, np.int32)
    uniform = np.random.default_rng(1).random((4, graphs.FUSED_TOKENS)).astype(np.float32)
    for enough, lengths in ((0, [3, 9, 5, 16]), (2, [3, 5, 5, 5]), (4, [1, 1, 1, 1])):
        rest = no_context(4), no_histories(4), uniform, *drawn_by(SamplingSettings(), 4)
        inputs = (zeros, zeros, zeros, remaining, zeros, *alone(4, enough), *rest)
        token = graph(*(Tensor(part) for part in inputs))[0].asnumpy()
        assert (token >= 0).sum(1).tolist() == lengths


class Drawing:
    """The fused operator without a layer: the embeddings are the logits, up to the scale of the final norm."""

    def __init__(self, fused, settings: SamplingSettings, logits: np.ndarray, stop_ids=(3, 40)):
        rows, size = logits.shape
        self.rule = [Tensor(part) for part in drawn_by(settings, rows)]
        self.fused, self.sampler = fused, Sampler([settings], size, stop_ids)
        self.logits = logits / np.sqrt(np.square(logits).mean(-1, keepdims=True))
        self.scale = 4.0
        self.rows = Tensor(np.arange(rows, dtype=np.int32))
        self.table, self.head = Tensor(logits), Tensor(self.scale * np.eye(size, dtype=np.float32))
        self.norm, self.angles = Tensor(np.ones(size, np.float32)), Tensor(np.zeros((1, 2), np.float32))

    def __call__(self, numbers, ban):
        """(Drawn by the operator, drawn by the composition): token, behaviour and policy log-probs of each row."""

        class One(nn.Cell):
            def construct(
                self, rows, zeros, ones, ban, leaders, enough, context, past, uniform, rules, norm, table, head, angles
            ):
                choice = (("chosen", 0), ("normalises", False), ("records", False))
                numbers = (("scale", 1.0), ("epsilon", 0.0), *choice)
                kept = ops.zeros((1, 1, 1, 1)).astype("int32")
                slots, tables = (rows, zeros, zeros, ones, ban, leaders, zeros, enough, context, past), (angles, angles)
                return run(slots, uniform, rules, sampler.stop_ids, table, tables, norm, head, kept, (), (), numbers)

        sampler, run = self.sampler, self.fused.decode_tokens
        zeros = np.zeros(len(numbers), np.int32)
        slots = (self.rows, Tensor(zeros), Tensor(zeros + 1), Tensor(ban.astype(np.int32)), self.rows)
        inputs = (*slots, Tensor(np.array([0, 0, 1], np.int32)), Tensor(no_context(len(numbers), 1)))
        inputs = (*inputs, Tensor(no_histories(len(numbers))))
        out = One()(*inputs, Tensor(numbers[:, None]), self.rule[0], self.norm, self.table, self.head, self.angles)
        expected = sampler(Tensor(self.scale * self.logits), Tensor(numbers), Tensor(ban), *self.rule)
        return [part.asnumpy()[:, 0] for part in out[:3]], [part.asnumpy() for part in expected]


@pytest.mark.parametrize(
    ("temperature", "min_new_tokens"), few_of([(0.0, 4), (0.7, 0), (1.0, 4)], [(0.0, 0), (0.7, 4), (1.0, 0)])
)
def test_drawing_equals_the_composition(fused, temperature, min_new_tokens):
    rng = np.random.default_rng(4)
    logits = (4 * rng.normal(size=(200, 96))).astype(np.float32)
    logits[:50, 3] += 30  # a stop token that would be drawn
    numbers, ban = rng.random(200).astype(np.float32), (np.arange(200) % 2 * (min_new_tokens > 0)).astype(np.float32)
    settings = SamplingSettings(temperature=temperature, min_new_tokens=min_new_tokens, max_new_tokens=8)
    (token, behaviour, policy), expected = Drawing(fused, settings, logits)(numbers, ban)
    np.testing.assert_array_equal(token, expected[0])
    np.testing.assert_allclose(behaviour, expected[1], rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(policy, expected[2], rtol=2e-6, atol=2e-5)
    stopped = np.isin(token, (3, 40))
    assert stopped[:50:2].all()
    assert stopped[1:50:2].any() == (min_new_tokens == 0)


def test_drawing_follows_the_distribution(fused):
    rng = np.random.default_rng(6)
    row = rng.normal(size=40).astype(np.float32)
    rows = 40_000
    numbers = ((np.arange(rows) + 0.5) / rows).astype(np.float32)
    drawing = Drawing(fused, SamplingSettings(temperature=0.5, max_new_tokens=8), np.tile(row, (rows, 1)), ())
    (token, *_), _ = drawing(numbers, 0 * numbers)
    expected = np.exp(drawing.scale * drawing.logits[0].astype(np.float64) / 0.5)
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(token, minlength=40) / rows, expected, rtol=0, atol=2 / rows)
