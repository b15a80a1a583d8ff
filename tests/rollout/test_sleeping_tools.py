"""Conversations with tools in processes of their own, which take 0 to 500 ms: the same for any number of slots."""

import random

import numpy as np
import pytest
from engine_subject import STEP, Subject, by_sample
from slow_cases import few_of

from mindrlhf.data.tool_formats import ToolCall, ToolFormat
from mindrlhf.environments.conversations import Conversations
from mindrlhf.environments.pool import EnvironmentPool

LIMIT, MOST_S = 48, 0.5
TOOL = '''
import random
import time


def look_up(key: str, most: float) -> str:
    """Take a time that depends on the key, up to `most` seconds, and answer by something that depends on it too."""
    draw = random.Random(key)
    time.sleep(draw.random() * most)
    return "".join(draw.choices("abcdefgh", k=draw.randint(0, 6)))
'''


class Calls(ToolFormat):
    """A turn's ids decide how many calls it has; several run one after the other in their conversation."""

    def __init__(self, most: float):
        self.most = most

    def parse(self, text: str) -> list[ToolCall]:
        count = random.Random(text).choice([0, 1, 1, 2])
        return [ToolCall("look_up", {"key": f"{number} {text}", "most": self.most}) for number in range(count)]


class Letters:
    """In place of a chat template: an id for each letter, and one between two answers."""

    plain_text = staticmethod(str)

    def __init__(self, most: float):
        self.tool_format = Calls(most)
        self.calls = self.tool_format.parse

    def answers_to(self, turns):
        said = ["|".join(message["content"] for message in messages) for messages, _ in turns]
        return [np.array([ord(letter) % 64 for letter in text], np.int32) for text in said]


@pytest.fixture(scope="module")
def subject():
    return Subject.random()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(TOOL)
    with EnvironmentPool({"": ""}, [f"{path}:look_up"], workers=64) as pool:
        yield pool


def conversations(subject, pool, slots, samples, most):
    partner = Conversations(pool, Letters(most), lambda ids: " ".join(map(str, ids)), seed=0, max_turns=4)
    engine = subject.engine(slots, max_new_tokens=LIMIT)
    found = by_sample(engine.generate(subject.prompts, samples, STEP, partner=partner))
    assert partner.statistics.failures == 0
    return found, partner.statistics


@pytest.fixture(scope="module")
def alone(subject, pool):
    """One conversation at a time, by tools that answer at once."""
    return conversations(subject, pool, 1, 13, 0.0)


@pytest.mark.parametrize(
    ("slots", "samples"),
    few_of([(4, 3)], [(16, 3), *((slots, 13) for slots in (1, 4, 16, 64))]),
)
def test_the_time_of_tools_and_the_number_of_slots_do_not_matter(subject, pool, alone, slots, samples):
    known, _ = alone
    found, statistics = conversations(subject, pool, slots, samples, MOST_S)
    assert len(found) == samples * len(subject.prompts)
    for key, rollout in found.items():
        np.testing.assert_array_equal(rollout.response_ids, known[key].response_ids)
        np.testing.assert_array_equal(rollout.sampled, known[key].sampled)
        assert rollout.finish_reason == known[key].finish_reason
    assert statistics.calls > len(found) / 2
    assert statistics.seconds > 0.1 * statistics.calls * MOST_S


def test_conversations_of_several_kinds(alone):
    """Otherwise the test above sees too little of them."""
    found, statistics = alone
    assert {rollout.finish_reason for rollout in found.values()} == {"eos", "length"}
    turns = [np.count_nonzero(np.diff(rollout.sampled.astype(int)) > 0) for rollout in found.values()]
    assert max(turns) >= 2
    assert statistics.turns > statistics.conversations
