"""Conversations with a partner: their tokens against a simulation, one at a time, and against the train graph."""

import gc

import numpy as np
import pytest
from engine_subject import FILTERS, STEP, STOP, TEMPERATURE, Subject, by_sample
from scripted_partner import ScriptedPartner, answer, first_words
from slow_cases import few_of
from step_parts import on_ranks

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.rollout.partner import Reply, SharedPartner

LIMIT, SAMPLES, BUCKET = 40, 3, 16  # every length of the cache is a graph
ONE_LENGTH = 64  # of composed layers, whose graphs are compiled for seconds
PENALISED = FILTERS | {"min_new_tokens": 5}
HOW = {"fused": {}, "filtered": PENALISED, "composed": {}, "greedy": {"temperature": 0.0}}
EACH = few_of(["fused"], ["composed", "filtered", "greedy"])


@pytest.fixture(scope="module")
def subjects():
    composed = Subject.random(COMPOSED, num_layers=1)  # each layer is compiled for seconds
    return {"composed": composed} | dict.fromkeys(("fused", "filtered", "greedy"), Subject.random())


def generate(engine, subject, partner):
    return engine.generate(subject.prompts, SAMPLES, STEP, partner=partner)


def no_text(ids):
    raise AssertionError("nothing is decoded")


def conversation(subject, prompt, sample, limit=LIMIT, most=LIMIT, **settings):
    """Tokens, which of them are drawn, their log-probs, and the finish reason: one after another, in float64.

    most: drawn tokens of a turn.
    """
    ids = first_words(prompt.id, sample)[: limit - 1]
    drawn, log_probs, first, reason = [False] * len(ids), [0.0] * len(ids), len(ids), "length"
    while len(ids) < limit:
        token, log_prob = subject.drawn(prompt, sample, ids, **settings)
        ids, drawn, log_probs = [*ids, token], [*drawn, True], [*log_probs, log_prob]
        if token in STOP or len(ids) - first == most:
            more, over = answer(ids[first:], len(ids))
            fits = len(ids) + len(more) <= limit
            ids = [*ids, *more][:limit]
            drawn, log_probs, first = [*drawn, *[False] * limit], [*log_probs, *[0.0] * limit], len(ids)
            drawn, log_probs = drawn[:first], log_probs[:first]
            if over:
                reason = "eos" if fits else "length"
                break
    return ids, drawn, log_probs, reason


class Alone(dict):
    """By way of decoding, made when it is asked for: one slot, replies at once."""

    def __init__(self, subjects):
        super().__init__()
        self.subjects = subjects

    def __missing__(self, how):
        bucket = ONE_LENGTH if how == "composed" else BUCKET
        engine = self.subjects[how].engine(1, bucket, no_text, max_new_tokens=LIMIT, **HOW[how])
        partner = ScriptedPartner()
        self[how] = generate(engine, self.subjects[how], partner), partner, engine
        return self[how]


@pytest.fixture(scope="module")
def alone(subjects):
    return Alone(subjects)


@pytest.mark.parametrize("how", EACH)
def test_conversations_are_those_of_the_simulation(subjects, alone, how):
    groups, partner, engine = alone[how]
    assert engine.copies_prompts == (how not in ("fused", "greedy"))
    reasons, turns = set(), []
    for row, ((prompt_id, sample), rollout) in enumerate(by_sample(groups).items()):
        prompt = next(one for one in subjects[how].prompts if one.id == prompt_id)
        ids, drawn, log_probs, reason = conversation(subjects[how], prompt, sample, **HOW[how])
        assert rollout.response_ids.tolist() == ids
        assert rollout.sampled.tolist() == drawn
        assert rollout.finish_reason == reason
        np.testing.assert_allclose(rollout.row("behaviour_log_probs"), log_probs, rtol=0, atol=5e-5)
        assert not rollout.row("behaviour_log_probs")[~rollout.sampled].any()
        assert not rollout.row("policy_log_probs")[~rollout.sampled].any()
        reasons.add(reason)
        turns.append(len(partner.heard[row]))
        # What the partner heard are the drawn tokens, in their order; the last turn may be cut off.
        heard = [token for turn, _ in partner.heard[row] for token in turn]
        said = rollout.response_ids[rollout.sampled].tolist()
        assert said[: len(heard)] == heard
        assert len(said) == len(heard) or reason == "length"
    assert max(turns) > 2
    if how != "greedy":
        assert reasons == {"eos", "length"}
    assert engine.statistics.tokens == sum(rollout.sampled.sum() for rollout in by_sample(groups).values())
    assert engine.statistics.partner_s > 0


@pytest.mark.parametrize("how", EACH)
def test_log_probs_are_those_of_the_train_graph(subjects, alone, how):
    groups, _, _ = alone[how]
    temperature = {"filtered": FILTERS["temperature"], "greedy": 1.0}.get(how, TEMPERATURE)
    for group, scored in zip(groups, subjects[how].score(groups, temperature), strict=True):
        for rollout, expected in zip(group.rollouts, scored, strict=True):
            drawn = rollout.sampled
            np.testing.assert_allclose(rollout.row("policy_log_probs")[drawn], expected[drawn], rtol=0, atol=1e-4)


SLOTS = [("fused", 2)]
MORE_SLOTS = [
    *(("fused", slots) for slots in (3, 7, 64)),
    *(("filtered", slots) for slots in (2, 3, 7, 64)),
    *(("composed", slots) for slots in (2, 3, 7, 64)),
]


@pytest.mark.parametrize(("how", "slots"), few_of(SLOTS, MORE_SLOTS))
def test_slots_and_the_time_of_replies_do_not_matter(subjects, alone, how, slots):
    gc.collect()  # compiled graphs of other engines
    engine = subjects[how].engine(slots, BUCKET, no_text, max_new_tokens=LIMIT, **HOW[how])
    expected, known, _ = alone[how]
    late = 0
    for partner in (ScriptedPartner(order=slots), ScriptedPartner(order=slots + 1), ScriptedPartner(lazy=True)):
        for group, other in zip(generate(engine, subjects[how], partner), expected, strict=True):
            for rollout, one in zip(group.rollouts, other.rollouts, strict=True):
                np.testing.assert_array_equal(rollout.response_ids, one.response_ids)
                np.testing.assert_array_equal(rollout.sampled, one.sampled)
                assert rollout.finish_reason == one.finish_reason
                for name in ("behaviour_log_probs", "policy_log_probs"):
                    np.testing.assert_allclose(rollout.row(name), one.row(name), rtol=0, atol=2e-5)
        assert partner.heard == known.heard
        late += partner.waited
    assert late  # some replies came when no slot could go on


def test_a_silent_partner_changes_nothing(subjects, alone):
    """A turn is the whole response then, as without a partner, bit for bit."""
    subject, (*_, engine) = subjects["fused"], alone["fused"]
    conversations = by_sample(generate(engine, subject, ScriptedPartner(silent=True)))
    for key, rollout in by_sample(engine.generate(subject.prompts, SAMPLES, STEP)).items():
        one = conversations[key]
        assert rollout.sampled.all()
        assert one.finish_reason == rollout.finish_reason
        assert one.response_ids.tobytes() == rollout.response_ids.tobytes()
        assert one.tokens.keys() == rollout.tokens.keys()
        for name, array in rollout.tokens.items():
            assert one.tokens[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("how", ["fused", pytest.param("filtered", marks=pytest.mark.slow)])
def test_conversations_cut_off_in_every_place(subjects, alone, how):
    """A shorter limit gives the beginning of the same conversation, and one drawn token at least."""
    groups, _, engine = alone[how]
    whole, known, kinds = by_sample(groups), engine.sampling, set()
    try:
        for limit in range(1, LIMIT):
            engine.sampling = known.model_copy(update={"max_new_tokens": limit})
            for key, rollout in by_sample(generate(engine, subjects[how], ScriptedPartner(order=limit))).items():
                expected, begun = whole[key], len(first_words(*key))
                assert len(rollout.response_ids) == min(limit, len(expected.response_ids))
                assert rollout.sampled.any()
                if limit <= begun:
                    assert rollout.response_ids[:-1].tolist() == first_words(*key)[: limit - 1]
                    assert rollout.sampled.tolist() == [False] * (limit - 1) + [True]
                    continue
                np.testing.assert_array_equal(rollout.response_ids, expected.response_ids[:limit])
                np.testing.assert_array_equal(rollout.sampled, expected.sampled[:limit])
                cut = limit < len(expected.response_ids)
                assert rollout.finish_reason == ("length" if cut else expected.finish_reason)
                kinds.add((cut, bool(rollout.sampled[-1]), int(rollout.response_ids[-1]) in STOP))
    finally:
        engine.sampling = known
    assert {(True, True, False), (True, True, True), (True, False, False), (True, False, True)} <= kinds


def test_a_stop_string_ends_a_turn(subjects):
    """Only in what the policy says: not in the partner's words, nor in an earlier turn, nor across them."""
    subject, texts = subjects["fused"], []

    def text(ids):
        texts.append(list(ids))
        return "".join(chr(ord("0") + i) for i in ids)

    plain = by_sample(subject.engine(2, max_new_tokens=LIMIT).generate(subject.prompts, SAMPLES, STEP))
    longest = max((rollout.response_ids for rollout in plain.values()), key=len)
    stops = (text(longest[3:4]), text(longest[4:5]), text(longest[6:8]))
    engine = subject.engine(7, decode_text=text, max_new_tokens=LIMIT, stop_strings=stops[:1])
    partner = ScriptedPartner(order=5, stop_strings=stops[1:])
    texts.clear()
    groups = by_sample(generate(engine, subject, partner))
    ended = set()
    for row, rollout in enumerate(groups.values()):
        response, end = rollout.response_ids.tolist(), 0
        for turn, length in partner.heard[row]:
            assert response[length - len(turn) : length] == turn
            assert rollout.sampled[length - len(turn) : length].all()
            assert not rollout.sampled[end : length - len(turn)].any()
            said = any(stop in text(turn) for stop in stops)
            assert said or turn[-1] in STOP
            assert not any(stop in text(turn[:-1]) for stop in stops)
            ended.add(said)
            end = length
        if rollout.finish_reason != "length":
            last = partner.heard[row][-1][0]
            assert rollout.finish_reason == ("eos" if last[-1] in STOP else "stop")
    assert ended == {True, False}


def test_ranks_that_share_a_partner_hear_the_same(subjects):
    prompts = subjects["fused"].prompts

    def work(rank):
        own = ScriptedPartner(order=3, stop_strings=("x",)) if rank.rank == 1 else None
        if own:
            own.tokens = [{"turn_rewards": {8: 0.5}}] * 10
        partner = SharedPartner(own, lambda value: rank.gather(value)[1])
        opened, first = partner.begin(prompts, 2, STEP)
        replies = list(first)
        for row in range(10):
            partner.submit(row, [row, 5], 9)
        while len(replies) < 20:
            replies += partner.collect(wait=True)
        said = [(reply.row, reply.token_ids.tolist(), reply.over) for reply in replies]
        assert [prompt.id for prompt in opened] == [prompt.id for prompt in prompts]
        given = len(partner.rewards()), len(partner.tokens)
        return partner.stop_strings, said, given, own

    first, second = on_ranks(2, work)
    assert first[:2] == second[:2]
    assert first[0] == ("x",)
    assert (first[2], second[2]) == ((0, 0), (10, 10))
    assert second[3].heard == {row: [([row, 5], 9)] for row in range(10)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begin": lambda prompts, *_: (prompts, [])}, "begins every conversation once"),
        ({"begin": lambda prompts, *_: (prompts, [Reply(row, np.zeros(0), True) for row in range(15)])}, "ends none"),
        ({"collect": lambda wait: [Reply(14, np.zeros(0, np.int32))]}, "reply to row 14, which waits for none"),
        (
            {"begin": lambda prompts, *_: (prompts, [Reply(row, np.array([64])) for row in range(15)])},
            "outside of 0 to 63",
        ),
        ({"stop_strings": ("x",)}, "decode_text"),
    ],
)
def test_a_partner_out_of_step_is_refused(subjects, alone, change, message):
    engine, partner = alone["fused"][2], ScriptedPartner()
    for name, value in change.items():
        setattr(partner, name, value)
    text, engine.decode_text = engine.decode_text, None
    try:
        with pytest.raises(ValueError, match=message):
            generate(engine, subjects["fused"], partner)
    finally:
        engine.decode_text = text


@pytest.mark.parametrize("how", EACH)
def test_a_listener_hears_every_drawn_token_and_may_end_a_turn(subjects, alone, how):
    engine, partner, heard = alone[how][2], ScriptedPartner(), {}
    known, engine.statistics = engine.statistics, None

    def listen(row, turn):
        heard.setdefault(row, []).append(turn)
        return len(turn) == 3

    groups = engine.generate(subjects[how].prompts, SAMPLES, STEP, partner=partner, listen=listen)
    engine.statistics, lengths = known, []
    for row, ((prompt_id, sample), rollout) in enumerate(by_sample(groups).items()):
        prompt = next(one for one in subjects[how].prompts if one.id == prompt_id)
        ids, drawn, *_ = conversation(subjects[how], prompt, sample, most=3, **HOW[how])
        assert rollout.response_ids.tolist() == ids
        assert rollout.sampled.tolist() == drawn
        assert rollout.response_ids[rollout.sampled].tolist() == [turn[-1] for turn in heard[row]]
        ended = [turn for turn, _ in partner.heard[row]]
        assert [turn for turn in heard[row] if turn in ended] == ended
        lengths += map(len, ended)
    assert max(lengths) == 3
    assert min(lengths) < 3 or how == "filtered", "some turns end by themselves"
