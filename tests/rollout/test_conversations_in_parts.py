"""Conversations drawn in parts by one set of weights: those that are drawn whole, wherever a part ends."""

import numpy as np
import pytest
from engine_subject import SEED, STEP, STOP, TEMPERATURE, Subject, by_sample
from scripted_partner import ScriptedPartner, answer, first_words

from mindrlhf.configs.grpo import RolloutSettings
from mindrlhf.rollout.partner import Begun, Reply, SharedPartner
from mindrlhf.rollout.unfinished import (
    continued,
    count_tokens,
    not_begun,
    requests_of,
    unfinished,
)
from mindrlhf.types import Prompt, Rollout

LIMIT, SAMPLES, BUCKET, SLOTS = 40, 3, 16, 4
SETTINGS = RolloutSettings(max_new_tokens=LIMIT, temperature=TEMPERATURE, num_generations=SAMPLES)


class Speaker(ScriptedPartner):
    """Like a chat template, it never says nothing in reply; it keeps what it is told of conversations that go on."""

    def resume(self, begun):
        self.begun = list(begun)
        words = [first_words(one.prompt.id, one.answer.sample_index) for one in begun]
        return [
            (one.prompt, np.array([] if one.begun else said, np.int32)) for one, said in zip(begun, words, strict=True)
        ]

    def submit(self, row, turn, length):
        one = self.begun[row] if hasattr(self, "begun") else None
        key = (one.prompt.id, one.answer.sample_index) if one else row
        self.heard.setdefault(key, []).append((list(turn), length))
        ids, over = answer(turn, length)
        self._ready.append(Reply(row, np.array(ids or [7], np.int32), over))


@pytest.fixture(scope="module")
def subject():
    return Subject.random()


@pytest.fixture(scope="module")
def engine(subject):
    return subject.engine(SLOTS, BUCKET, max_new_tokens=LIMIT)


@pytest.fixture(scope="module")
def whole(subject, engine):
    partner = Speaker()
    groups = by_sample(engine.generate(subject.prompts, SAMPLES, STEP, partner=partner))
    assert max(map(len, partner.heard.values())) > 2
    return groups, dict(zip(groups, partner.heard.values(), strict=True))


def in_parts(subject, engine, share: int, partner):
    """The groups, and of each part the lengths that its answers have at its end."""
    groups = [not_begun(prompt, SETTINGS, SEED) for prompt in subject.prompts]
    parts = []
    while going := [i for i, group in enumerate(groups) if unfinished(group, LIMIT)]:
        requests = requests_of([(STEP, groups[i], share) for i in going], SETTINGS, SEED, partner)
        for i, drawn in zip(going, engine.answer(requests), strict=True):
            groups[i] = continued(groups[i], drawn, LIMIT, len(parts) + 1)
        parts.append(by_sample(groups))
    return by_sample(groups), parts


@pytest.mark.parametrize("share", [1, 3, 5, 11, LIMIT])
def test_parts_are_the_whole_conversation(subject, engine, whole, share):
    partner = Speaker(order=share)
    groups, parts = in_parts(subject, engine, share, partner)
    expected, heard = whole
    for key, rollout in groups.items():
        one = expected[key]
        assert rollout.response_ids.tolist() == one.response_ids.tolist()
        assert rollout.sampled.tolist() == one.sampled.tolist()
        assert rollout.finish_reason == one.finish_reason
        for name in ("behaviour_log_probs", "policy_log_probs"):
            np.testing.assert_allclose(rollout.row(name), one.row(name), rtol=0, atol=2e-5)
            assert not rollout.row(name)[~rollout.sampled].any()
    assert partner.heard == {key: turns for key, turns in heard.items() if turns}
    assert count_tokens([]) == 0
    ends = [not one.sampled[-1] for part in parts[:-1] for one in part.values() if one.finish_reason == "length"]
    assert len(parts) > 1 or share == LIMIT
    assert {*ends} == ({True, False} if share < LIMIT else set()), "parts end within turns, and behind replies"


@pytest.mark.parametrize("share", [3, 5])
def test_a_reply_is_never_cut_by_the_end_of_a_part(subject, engine, share):
    """Only by the limit of the answer: a part ends behind it, and each token has the version of its part."""
    _, parts = in_parts(subject, engine, share, Speaker())
    longer = 0
    before = {}
    for number, part in enumerate(parts, 1):
        for key, one in part.items():
            known = before.get(key, 0)
            more = one.sampled[known:] if known else one.sampled[int(np.argmax(one.sampled)) :]
            assert (one.row("policy_steps")[known:] == number).all()
            if len(more) > share:
                longer += 1
                assert not more[share:].any()
            before[key] = len(one.response_ids)
    assert longer


def test_ranks_that_share_a_partner_resume_it_once():
    owner = Speaker()
    one = Begun(Prompt(3, np.ones(2, np.int32)), answer_of("xx."), 1)
    for partner in (owner, None):
        SharedPartner(partner, lambda value: value).resume([one])
    assert owner.begun == [one]


def answer_of(sampled: str) -> Rollout:
    mask = np.array([letter == "x" for letter in sampled], bool)
    return Rollout(1, 0, np.arange(len(mask), dtype=np.int32), "length", SEED, {"sampled": mask})


@pytest.mark.parametrize(
    ("sampled", "turns", "first", "opening"),
    [
        ("", [], 0, 0),
        ("xxx", [], 0, 0),
        ("xx..", [(0, 2)], 4, 0),
        ("xx..x", [(0, 2)], 4, 0),
        ("xx.xxx..xx", [(0, 2), (3, 6)], 8, 0),
        ("..xx", [], 2, 2),
        (".xx..", [(1, 3)], 5, 1),
    ],
)
def test_turns_of_a_transcript(sampled, turns, first, opening):
    answer = answer_of(sampled)
    begun = Begun(Prompt(3, np.ones(2, np.int32)), answer, 1)
    assert (begun.turns, answer.turn_first) == (turns, first)
    assert begun.opening.tolist() == answer.response_ids[:opening].tolist()
    for number, (_, end) in enumerate(turns):
        later = [begin for begin, _ in turns[number + 1 :]] or [first]
        assert begun.reply_to(number).tolist() == answer.response_ids[end : later[0]].tolist()
    ended = Begun(begun.prompt, answer, 1, ended=True)
    unanswered = sampled.endswith("x")
    assert ended.turns == [*turns, *([(first, len(sampled))] if unanswered else ())]
    if unanswered:
        assert not len(ended.reply_to(len(turns)))


def test_the_stop_tokens_of_the_subject_end_turns(whole):
    groups, heard = whole
    assert all(turn[-1] in STOP for turns in heard.values() for turn, _ in turns)
    assert {one.finish_reason for one in groups.values()} == {"eos", "length"}
