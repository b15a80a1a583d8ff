"""Conversations that go on in a later part: with tools, and with environments that are played again."""

import re
from functools import partial

import numpy as np
import pytest
from environment_talks import call, partner_of, prompts

from mindrlhf.environments.conversations import ConversationCounts
from mindrlhf.environments.pool import EnvironmentPool
from mindrlhf.rollout.partner import Begun
from mindrlhf.types import Prompt, Rollout


def transcript(sample, turns, ids=None):
    """An answer with turns of (drawn tokens, tokens of the reply)."""
    sampled = np.concatenate([np.arange(drawn + replied) < drawn for drawn, replied in turns] or [np.zeros(0, bool)])
    ids = np.zeros(len(sampled), np.int32) if ids is None else np.array(ids, np.int32)
    return Rollout(10, sample, ids, "length", 5, {"sampled": sampled})


@pytest.mark.parametrize("after", [0, 1, 3])
def test_conversations_go_on_with_tools(hostile, template, tokenizer, after):
    """With the random numbers of their next requests, up to the most turns of the whole conversation."""
    turn = [*tokenizer.encode(call("draw")), template.end_id]

    def said(partner, turns):
        """What two conversations hear in further turns."""
        heard = []
        for _ in range(turns):
            for row in range(2):
                partner.submit(row, turn, 9)
            replies = []
            while len(replies) < 2:
                replies += partner.collect(True)
            heard.append({reply.row: (tokenizer.decode(reply.token_ids), reply.over) for reply in replies})
        return heard

    (prompt,) = prompts({})
    with EnvironmentPool({"": ""}, [f"{hostile}:draw"]) as pool:
        partner = partner_of(pool, template, tokenizer, max_turns=5)
        partner.begin([prompt], 2, 3)
        whole = said(partner, 5)
        assert [one[1] for one in whole[-1].values()] == [True, True]
        assert len({text for heard in whole for text, over in heard.values() if not over}) == 8
        partner.begin([prompt], 1, 4)  # others in between
        partner.resume([Begun(prompt, transcript(sample, [(9, 1)] * after), 3) for sample in range(2)])
        assert said(partner, 5 - after) == whole[after:]
        statistics = partner.statistics
        assert (statistics.conversations, statistics.turns, statistics.calls) == (2, 2 * (5 - after), 2 * (5 - after))


def words(row, texts):
    """Turns of a conversation with `Counter`; a later row has more of them."""
    turns = [
        call("add", number=row + len(texts)),
        f"Then {call('fault', kind='raise')}{call('add', number=2, times=3)}",
    ]
    return "So it is." if len(texts) == 2 + row else turns[len(texts) % 2]


def moves(row, texts):
    """Turns of a game of guesses, which halve what is left."""
    least, most = 1, 100
    text = "".join(texts[1:])
    for number, side in zip(re.findall("<move>(.*?)</move>", text), re.findall("larger|smaller", text), strict=True):
        least, most = (int(number) + 1, most) if side == "larger" else (least, int(number) - 1)
    return f"<move>{(least + most + row) // 2}</move>"


@pytest.mark.parametrize("environment", ["Counter", "Turns", "number_guessing"])
def test_an_environment_that_is_played_again_is_where_it_was(hostile, template, tokenizer, environment):
    """Its answers to further turns, the ends of conversations and all rewards are those of one that never stopped."""
    raw = environment == "number_guessing"
    asked = template.prompt([{"role": "user", "content": "Go."}])
    problems = [Prompt(10 + number, asked, {"start": str(number)}) for number in range(2)]

    def said_by(policy, row, said):
        texts = [tokenizer.decode(ids) for _, ids in said]
        return [*tokenizer.encode(policy(row, texts)), template.end_id]

    with EnvironmentPool({"": environment if raw else f"{hostile}:{environment}"}) as pool:
        partner = partner_of(pool, template, tokenizer, max_turns=6)
        opened, openings = partner.begin(problems, 2, 3)
        assert min(len(reply.token_ids) for reply in openings) > 0
        talks = held(
            partner,
            {row: [(False, reply.token_ids.tolist())] for row, reply in enumerate(openings)},
            lambda row, said: said_by(moves if raw else words, row, said),
        )
        rewards, tokens, lost = partner.rewards(), partner.tokens, partner.statistics.lost
        assert {len(parts) for parts in talks.values()} > {len(talks[0])} or raw
        empty = [Begun(one, Rollout.empty(one.id, sample, 5), 3) for one in problems for sample in range(2)]
        again = partner.resume(empty)
        assert [ids.tolist() for _, ids in again] == [reply.token_ids.tolist() for reply in openings]
        assert [prompt.token_ids.tolist() for prompt, _ in again[::2]] == [one.token_ids.tolist() for one in opened]

        for after in (0, 2, 4):
            begun = {row: parts[: after + 1] for row, parts in talks.items() if len(parts) > after + 1}
            answers = [part_of(opened[row // 2], row % 2, parts) for row, parts in begun.items()]
            assert [len(ids) for _, ids in partner.resume(answers)] == [0] * len(begun)
            assert (partner.statistics.turns, partner.statistics.lost) == (0, 0)
            known = [talks[row] for row in begun]
            further = held(partner, dict(enumerate(begun.values())), partial(recorded, known))
            assert [*further.values()] == known
        whole = [part_of(opened[row // 2], row % 2, parts, ended=True) for row, parts in talks.items()]
        np.testing.assert_equal((partner.recall(whole), partner.tokens), (rewards, tokens))
        assert partner.statistics == ConversationCounts(lost=lost)
    assert any(reward > 0 for reward in rewards)


def recorded(talks, row, said):
    return talks[row][len(said)][1]


def held(partner, begun, policy):
    """Hold conversations to their ends; returns of each row its parts: (whether drawn, ids).

    policy: (row, its parts) -> ids of a turn.
    """
    talks = {row: list(parts) for row, parts in begun.items()}
    due, waiting = list(talks), set(talks)
    while waiting:
        for row in due:
            turn = policy(row, talks[row])
            talks[row].append((True, turn))
            partner.submit(row, turn, sum(len(ids) for _, ids in talks[row]))
        due = []
        for reply in partner.collect(True):
            talks[reply.row].append((False, reply.token_ids.tolist()))
            if reply.over:
                waiting.remove(reply.row)
            else:
                due.append(reply.row)
    return talks


def part_of(prompt, sample, parts, ended=False):
    ids = np.array([token for _, own in parts for token in own], np.int32)
    sampled = np.array([drawn for drawn, own in parts for _ in own], bool)
    return Begun(prompt, Rollout(prompt.id, sample, ids, "length", 5, {"sampled": sampled}), 3, ended)


UNLIKE = """
import os


class Unlike:
    def reset(self, place: str):
        self.place = place
        return f"It is {os.getpid() if place == 'first' else 1}."

    def reply(self, text: str):
        return str(os.getpid() if self.place == "reply" else 2)

    def get_reward(self):
        return 0.5
"""


def test_an_environment_that_answers_otherwise_is_lost(template, tokenizer, tmp_path, capsys):
    """When it is played again: in its first text, or in a reply. The others keep their rewards; it is said once."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    asked = template.prompt([{"role": "user", "content": "Go."}])
    problems = [Prompt(10 + i, asked, {"place": place}) for i, place in enumerate(("none", "first", "reply"))]
    with EnvironmentPool({"": f"{tmp_path / 'unlike.py'}:Unlike"}) as pool:
        partner = partner_of(pool, template, tokenizer, max_turns=3)
        opened, openings = partner.begin(problems, 1, 3)
        talks = held(
            partner,
            {row: [(False, reply.token_ids.tolist())] for row, reply in enumerate(openings)},
            lambda row, said: [*tokenizer.encode("x"), template.end_id],
        )
        assert partner.rewards() == [0.5] * 3
        partner.resume([part_of(opened[row], 0, parts[:3]) for row, parts in talks.items()])
        assert partner.statistics.lost == 2
        for row, parts in talks.items():
            partner.submit(row, parts[3][1], 40)
        replies = []
        while len(replies) < 3:
            replies += partner.collect(True)
        assert {reply.row for reply in replies if reply.over and not len(reply.token_ids)} == {1, 2}
        whole = [part_of(opened[row], 0, parts, ended=True) for row, parts in talks.items()]
        assert capsys.readouterr().out.count("its environment answered otherwise than before") == 1
        np.testing.assert_equal(partner.recall(whole), [0.5, np.nan, np.nan])
        assert partner.statistics.lost == 2
    assert not capsys.readouterr().out
