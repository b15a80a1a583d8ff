"""Requests of a session: each is answered as if it were alone, whatever comes before, with or after it."""

from dataclasses import replace

import numpy as np
import pytest
from engine_subject import FILTERS, NEW, SEED, STEP, STOP, TEMPERATURE, Subject
from scripted_partner import ScriptedPartner, first_words
from slow_cases import few_of

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.errors import UserError
from mindrlhf.memory.exchange import ID, OF_ANSWERS
from mindrlhf.rollout.request import Request
from mindrlhf.token_arrays import TOKEN_ARRAYS
from mindrlhf.types import Prompt

SAMPLING = (
    {},
    {"temperature": 0.0},
    {"temperature": 1.6, "max_new_tokens": 5},
    {"top_k": 9},
    {"top_p": 0.8, "min_p": 0.01, "temperature": 1.1},
    {"min_new_tokens": 6},
    FILTERS | {"min_new_tokens": 4},
)


def text(ids):
    return "".join(chr(ord("0") + i) for i in ids)


@pytest.fixture(scope="module", params=few_of(["fused"], ["composed"]))
def subject(request) -> Subject:
    return Subject.random(COMPOSED if request.param == "composed" else None)


@pytest.fixture(scope="module")
def engine(subject):
    return subject.engine(slots=4, bucket=16, decode_text=text)


def settings(**options) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": NEW, "temperature": TEMPERATURE} | options)


@pytest.fixture(scope="module")
def requests(subject) -> list[Request]:
    return [
        Request(prompt, settings(**SAMPLING[(i + j) % len(SAMPLING)]), 1 + (i + j) % 3, SEED, STEP)
        for i, prompt in enumerate(subject.prompts)
        for j in range(2)
    ]


def answered(session) -> dict:
    found = {}
    while session.busy:
        session.step()
        found |= dict(session.poll())
    return found


def assert_same(group, other):
    """The same tokens; the number of prompts that are prefilled together moves the last bits of log-probs."""
    for one, its in zip(group.rollouts, other.rollouts, strict=True):
        assert one.finish_reason == its.finish_reason
        np.testing.assert_array_equal(one.response_ids, its.response_ids)
        np.testing.assert_array_equal(one.sampled, its.sampled)
        for name in ("behaviour_log_probs", "policy_log_probs"):
            np.testing.assert_allclose(one.row(name), its.row(name), rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def together(engine, requests):
    """All at once: the second one of a prompt is another request, with another rule."""
    session = engine.session()
    numbers = [session.submit(one) for one in requests]
    found = answered(session)
    assert sorted(found) == sorted(numbers)
    return [found[number] for number in numbers]


def test_every_request_has_the_tokens_of_its_own_rule(subject, requests, together):
    """Against the simulation in float64, which knows no other requests."""
    ended = set()
    for request, group in zip(requests, together, strict=True):
        assert group.prompt is request.prompt
        assert len(group.rollouts) == request.samples
        options = request.sampling.model_dump(exclude_unset=True)
        limit = options.pop("max_new_tokens")
        for sample, rollout in enumerate(group.rollouts):
            if options["temperature"]:
                response, log_probs = subject.simulated(request.prompt, sample, **options)
                np.testing.assert_allclose(rollout.row("behaviour_log_probs"), log_probs[:limit], rtol=0, atol=5e-5)
            else:
                response = greedy(subject, request.prompt, limit)
            assert rollout.response_ids.tolist() == response[:limit]
            assert (rollout.sample_index, rollout.seed) == (sample, SEED)
            ended.add(rollout.finish_reason)
    assert ended == {"eos", "length"}


def test_an_answer_has_the_arrays_that_the_plan_of_a_split_job_counts(together):
    for group in together:
        for rollout in group.rollouts:
            assert set(rollout.tokens) == set(OF_ANSWERS)
            assert rollout.response_ids.itemsize == ID.itemsize
            assert all(rollout.tokens[name].dtype == TOKEN_ARRAYS[name].dtype for name in OF_ANSWERS)


def greedy(subject, prompt, limit):
    ids = prompt.token_ids.tolist()
    while len(ids) - len(prompt.token_ids) < limit:
        ids.append(int(np.argmax(subject.model.logits(ids)[-1])))
        if ids[-1] in STOP:
            break
    return ids[len(prompt.token_ids) :]


@pytest.mark.parametrize("order", few_of([1], [2, 4]))
def test_order_and_time_of_submission_do_not_matter(engine, requests, together, order):
    """Submitted one after another while others are being answered."""
    session, rng = engine.session(), np.random.default_rng(order)
    places, waiting, found = {}, rng.permutation(len(requests)).tolist(), {}
    while waiting or session.busy:
        for _ in range(rng.integers(0, 3) if session.busy else 1):
            if waiting:
                place = waiting.pop()
                places[session.submit(requests[place])] = place
        session.step()
        found |= dict(session.poll())
    assert len(found) == len(requests)
    for number, group in found.items():
        assert_same(group, together[places[number]])


@pytest.mark.slow
def test_alone_and_in_other_slots(subject, engine, requests, together):
    wide = subject.engine(slots=13)
    for place in (0, 5, 6):
        for one in (engine, wide):
            session = one.session()
            session.submit(requests[place])
            (found,) = answered(session).values()
            assert_same(found, together[place])


def cut(request: Request, tokens: int) -> Request:
    """The request, whose responses end after some tokens, a different number each."""
    limits = [min(tokens + sample, request.sampling.max_new_tokens) for sample in range(request.samples)]
    return replace(request, limits=limits)


def begun_again(request: Request, group) -> tuple[Request | None, list[int]]:
    """A request that goes on with the responses that a limit has cut, and their places."""
    limit = request.sampling.max_new_tokens
    places = [
        i
        for i, one in enumerate(group.rollouts)
        if (one.finish_reason, len(one.response_ids) < limit) == ("length", True)
    ]
    begun = [group.rollouts[place].response_ids for place in places]
    return replace(request, samples=len(places), begun=begun, keys=places) if places else None, places


@pytest.mark.parametrize("tokens", [1, 4])
def test_cut_answers_go_on_with_the_tokens_of_whole_ones(engine, requests, together, tokens):
    """Tokens that are there already are computed again, and not drawn; stop strings reach over the cut."""
    stop = together[-1].rollouts[0].response_ids[tokens - 1 : tokens + 1]
    stopping = replace(requests[-1], sampling=requests[-1].sampling.model_copy(update={"stop_strings": (text(stop),)}))
    (ended,) = engine.answer([stopping])
    assert ended.rollouts[0].finish_reason == "stop"
    given = [*requests, stopping]
    first = engine.answer([cut(one, tokens) for one in given])
    again = [begun_again(*pair) for pair in zip(given, first, strict=True)]
    rest = iter(engine.answer([one for one, _ in again if one]))
    for whole, before, (request, places) in zip([*together, ended], first, again, strict=True):
        after = dict(zip(places, next(rest).rollouts if request else (), strict=True))
        for place, (one, rollout) in enumerate(zip(whole.rollouts, before.rollouts, strict=True)):
            rollout = after.get(place, rollout)
            np.testing.assert_array_equal(rollout.response_ids, one.response_ids)
            assert rollout.finish_reason == one.finish_reason
            known = ~rollout.sampled
            assert known.sum() == (len(before.rollouts[place].response_ids) if place in after else 0)
            for name in ("behaviour_log_probs", "policy_log_probs"):
                np.testing.assert_allclose(rollout.row(name)[~known], one.row(name)[~known], rtol=0, atol=2e-5)
    assert sum(len(places) for _, places in again) > 5


def test_a_short_answer_is_collected_before_a_long_one(engine, subject):
    session = engine.session()
    long = session.submit(Request(subject.prompts[1], settings(top_k=9, min_new_tokens=NEW), 1, SEED, STEP))
    short = session.submit(Request(subject.prompts[2], settings(top_k=9, max_new_tokens=2), 2, SEED, STEP))
    while not (done := session.poll()):
        session.step()
    assert [number for number, _ in done] == [short]
    assert session.busy
    later = session.submit(Request(subject.prompts[0], settings(top_k=9), 1, SEED, STEP))
    assert sorted(answered(session)) == [long, later]
    assert session.poll() == []


def test_seed_stop_strings_and_conversations_of_one_request(engine, subject, requests, together):
    """They are a request's own: another one with the same prompt and rule does not notice."""
    session, partner = engine.session(), ScriptedPartner(order=3)
    base = requests[0]
    whole = together[0].rollouts[0].response_ids.tolist()
    stop = text(whole[len(whole) // 2 : len(whole) // 2 + 1])
    prompts, replies = partner.begin([base.prompt], 2, STEP)
    spoken = replace(base, samples=2, partner=partner, openings=replies)
    numbers = [
        session.submit(one)
        for one in (base, replace(base, seed=SEED + 1), replace(base, sampling=settings(stop_strings=(stop,))), spoken)
    ]
    found = answered(session)
    assert_same(found[numbers[0]], together[0])
    assert found[numbers[1]].rollouts[0].response_ids.tolist() != whole
    said = found[numbers[2]].rollouts[0]
    assert said.finish_reason == "stop"
    assert said.response_ids.tolist() == whole[: whole.index(ord(stop) - ord("0")) + 1]
    for sample, rollout in enumerate(found[numbers[3]].rollouts):
        opening = first_words(prompts[0].id, sample)[: NEW - 1]
        assert rollout.response_ids[: len(opening)].tolist() == opening
        assert not rollout.sampled[: len(opening)].any()
        assert rollout.sampled.any()
    assert partner.heard[0]


@pytest.mark.parametrize("order", range(4))
def test_cancelled_requests_leave_the_others_as_they_are(engine, requests, together, order):
    """They are cancelled while they wait, half-way, or answered and not collected; most more than once."""
    session, rng = engine.session(), np.random.default_rng(order)
    waiting, places, gone, found, most = rng.permutation(len(requests)).tolist(), {}, set(), {}, 0
    while waiting or session.busy:
        if waiting and rng.random() < 0.7:
            place = waiting.pop()
            places[session.submit(requests[place])] = place
        for number in rng.permutation(sorted(places.keys() - gone - found.keys()))[: rng.integers(0, 3)].tolist():
            session.cancel(number)
            session.cancel(number)
            gone.add(number)
            if most < 40:
                most += 1
                waiting.insert(0, places[number])
        session.step()
        if rng.random() < 0.5:
            found |= dict(session.poll())
    found |= dict(session.poll())
    assert len(gone) > 10
    assert sorted(found) == sorted(places.keys() - gone)
    assert session.tokens == session.most
    for number, group in found.items():
        assert_same(group, together[places[number]])


def test_a_cancelled_request_frees_its_slots_and_its_prompts(engine, requests, together):
    """Each is half-way: more of them than slots, with responses that no slot holds yet."""
    session = engine.session()
    for place in (*range(len(requests)), *range(len(requests))):
        number = session.submit(replace(requests[place], samples=7))
        session.step()
        assert session.busy
        session.cancel(number)
        assert not session.busy
        assert session.poll() == []
    assert session.tokens == session.most > 0
    numbers = [session.submit(one) for one in requests]
    found = answered(session)
    for number, group in zip(numbers, together, strict=True):
        assert_same(found[number], group)


def test_the_reply_to_a_cancelled_request_is_dropped(engine, subject):
    """Two conversations wait for the same partner, whose first reply is to the cancelled one."""

    def conversations(cancelled):
        session, partner = (
            engine.session(),
            ScriptedPartner(lazy=True, stop_strings=[chr(i) for i in range(48, 112, 3)]),
        )
        prompts, replies = partner.begin(subject.prompts[:2], 1, STEP)
        numbers = [
            session.submit(Request(prompt, settings(), 1, SEED, STEP, partner, row, [replies[row]]))
            for row, prompt in enumerate(prompts)
        ]
        while not all(partner.heard.values()):
            session.step()
        if cancelled is not None:
            session.cancel(numbers[cancelled])
        return answered(session), numbers

    whole, numbers = conversations(None)
    assert len(whole) == 2
    for cancelled, other in (numbers, numbers[::-1]):
        found, _ = conversations(numbers.index(cancelled))
        assert found.keys() == {other}
        assert_same(found[other], whole[other])


def test_what_no_slot_holds_is_refused(engine, subject):
    session = engine.session()
    with pytest.raises(ValueError, match="max_new_tokens 13 of a request is above the session's 12"):
        session.submit(Request(subject.prompts[0], settings(max_new_tokens=13)))
    with pytest.raises(UserError, match="prompt 42 has 18 tokens and the limit is 17"):
        session.submit(Request(Prompt(42, np.zeros(18, np.int32)), settings()))
    assert not session.busy
