"""Drafts of next tokens change no token and no number: in the decode operator, whatever they say."""

import numpy as np
import pytest
from decode_inputs import cache_of, drawn_by, no_context
from mindspore import Tensor
from small_model import SmallModel

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.rollout import decode_graphs as graphs
from mindrlhf.rollout.sampling import Sampler

VOCABULARY, PREFIX, TOKENS, HISTORY = 64, 20, 16, 80
STOPS = (5, 9)


class Call:
    """A call with slots of uneven length, three of which share a prompt; one has tokens of the context first."""

    def __init__(self, slots: int, temperature: float, stops=STOPS):
        rng = np.random.default_rng(slots)
        model = SmallModel.random()
        decoder, _ = model.build(64)
        self.slots, self.cache = slots, cache_of(model.config, slots, 64)
        settings = self.settings = SamplingSettings(temperature=temperature, min_new_tokens=1, max_new_tokens=64)
        self.graph = graphs.Decode(decoder, self.cache, Sampler([settings], VOCABULARY, stops))
        self.ids, self.uniform = rng.integers(0, VOCABULARY, slots).astype(np.int32), rng.random((slots, TOKENS))
        self.remaining, self.zeros = np.full(slots, TOKENS, np.int32), np.zeros(slots, np.int32)
        self.remaining[1::3] = rng.integers(0, TOKENS, len(self.remaining[1::3]))
        self.positions, self.banned = self.zeros + PREFIX, self.zeros.copy()
        self.banned[2::4] = 7
        self.leaders = np.arange(slots, dtype=np.int32)
        self.leaders[:3] = 0
        self.context = no_context(slots)
        self.context[-1, :4] = 9
        self.contents = [rng.normal(size=p.shape).astype(np.float32) for p in (*self.cache.keys, *self.cache.values)]

    def __call__(self, histories: np.ndarray):
        """Token, behaviour, policy; keys and values of what was drawn; counts."""
        for parameter, content in zip((*self.cache.keys, *self.cache.values), self.contents, strict=True):
            parameter.asnumpy()[...] = content
        call = np.array([0, 40, TOKENS], np.int32)
        places = self.positions, self.positions
        slots = (self.ids, *places, self.remaining, self.banned, self.leaders, self.zeros + PREFIX, call)
        uniform = self.uniform.astype(np.float32)
        inputs = (*slots, self.context, histories, uniform, *drawn_by(self.settings, self.slots))
        *found, counts = (part.asnumpy() for part in self.graph(*(Tensor(part.copy()) for part in inputs)))
        drawn = (found[0] >= 0).sum(1)
        kept = [
            parameter.asnumpy()[slot, :, 40 : 40 + drawn[slot]].copy()
            for parameter in (*self.cache.keys, *self.cache.values)
            for slot in range(self.slots)
        ]
        return found, kept, counts.tolist()

    def histories(self, texts) -> np.ndarray:
        """Each slot's text and its last token behind it; keys of two tokens begin with one that never comes."""
        out = np.full((self.slots, HISTORY), -1, np.int32)
        for slot, text in enumerate(texts):
            line = [VOCABULARY - 1, self.ids[slot], *text, -1, VOCABULARY - 1, self.ids[slot]]
            out[slot, -len(line) :] = line
        return out


def assert_same(found, expected):
    for parts, others in zip(found[:2], expected[:2], strict=True):
        for part, other in zip(parts, others, strict=True):
            assert part.tobytes() == other.tobytes()


@pytest.fixture(params=[(1, 1.0), (5, 1.0), (5, 0.0), (13, 1.0), (21, 1.0)], ids=lambda p: f"{p[0]} slots, {p[1]}")
def call(request, fused):
    return Call(*request.param)


@pytest.fixture
def plain(call):
    return call(np.full((call.slots, HISTORY), -1, np.int32))


def test_right_drafts(call, plain):
    (tokens, *_), _, counts = plain
    assert counts[1:] == [0, 0]
    found = call(call.histories([[id for id in row if id >= 0] for row in tokens]))
    assert_same(found, plain)
    steps, drafted, accepted = found[2]
    assert steps < counts[0]
    assert 0 < accepted <= drafted
    if call.slots == 1:  # 2 tokens, then twice as many each time
        assert steps <= 4
        assert accepted == drafted == counts[0] - steps


def test_wrong_drafts(call, plain):
    (tokens, *_), _, counts = plain
    found = call(call.histories([[(id + 1) % VOCABULARY for id in row if id >= 0] for row in tokens]))
    assert_same(found, plain)
    assert found[2][0] <= counts[0]  # a slot's own text may be right
    assert found[2][1] > 2 * found[2][2]


def test_half_right_drafts(call, plain):
    rng = np.random.default_rng(0)
    (tokens, *_), _, counts = plain
    texts = [[int(rng.integers(VOCABULARY)) if rng.random() < 0.2 else id for id in row if id >= 0] for row in tokens]
    found = call(call.histories(texts))
    assert_same(found, plain)
    assert found[2][2] < found[2][1]
    assert found[2][0] <= counts[0]
