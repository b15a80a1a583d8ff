"""Votes of answers: groups by the equality of the task's reward."""

import random

import pytest

from mindrlhf.evaluation.votes import votes


def voted(reward, *completions, prompt="", **fields):
    return votes(reward, fields, [(prompt, completion) for completion in completions])


@pytest.mark.parametrize(
    ("completion", "vote"),
    [
        ("#### 18", "18"),
        ("#### 18.0", "18"),
        (r"so \boxed{\frac{1}{2}}", "1/2"),
        ("it costs $1,000", "1000"),
        ("<think>#### 3</think><answer>x = 18</answer>", "18"),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}"),
        ("<answer>(1 + 2) * 3</answer>", "(1+2)*3"),
        ("<answer> </answer>", None),
        ("<think>18", None),
        ("no idea", None),
        ("", None),
    ],
)
def test_numbers_vote_for_their_value(completion, vote):
    for reward in ("gsm8k", "mine.py:score"):
        assert voted(reward, completion) == [vote]
    assert voted("verl", completion, task="mine") == [vote]


def test_a_thought_that_the_prompt_opens_is_no_vote():
    assert voted("gsm8k", "5", "5</think>6", prompt="Q<think>\n") == [None, "6"]
    assert voted("math", "5", "5</think>6", prompt="Q<think>\n") == [None, "6"]


def test_the_strict_rule_votes_for_its_text():
    completions = ("#### 1,8 eggs", "#### 18", "#### 18.", "18", "<think>#### 18")
    expected = ["18", "18", "18.", None, "18"]
    assert voted("gsm8k_strict", *completions) == voted("openai/gsm8k", *completions) == expected
    assert voted("verl", *completions, data_source="openai/gsm8k") == expected


def test_expressions_of_countdown_vote_for_themselves():
    assert voted("countdown", "<answer>3 * 8</answer>", "<answer>8*3</answer>", r"\boxed{24}") == ["3*8", "8*3", "24"]


def test_knights_and_knaves_vote_for_their_roles():
    """Not for the number in `(1) Ann is a knight`, which is that of every answer."""
    said = (
        "(1) Ann is a knight\n(2) Bob is a knave",
        "(1) Ann is a knave (2) Bob is a knight",
        "Bob: knave, Ann: knight",
    )
    ann, bob = "ann: knight; bob: knave", "ann: knave; bob: knight"
    assert voted("knights_and_knaves", *said, "I do not know") == [ann, bob, ann, None]


MATHEMATICAL = (
    *(
        r"\boxed{2\sqrt{3}}",
        r"\boxed{2}",
        r"\boxed{\sqrt{12}}",
        r"\boxed{\frac{4}{2}}",
        "#### 2.0",
        r"\boxed{x+1}",
        r"\boxed{1 + x}",
    ),
    *(
        r"\boxed{1 1/2}",
        r"\boxed{1}",
        r"\boxed{\frac32}",
        r"\boxed{150\%}",
        r"\boxed{(1,2)}",
        "no idea",
        r"\boxed{F_n=\sum F_k}",
    ),
)
GROUPS = [{0, 2}, {1, 3, 4}, {5, 6}, {7, 9, 10}, {8}, {11}, {13}]


def test_mathematical_answers_group_by_the_equality_of_the_reward():
    draw = random.Random(0)
    for _ in range(2):
        order = draw.sample(range(len(MATHEMATICAL)), len(MATHEMATICAL))
        found = voted("math", *(MATHEMATICAL[place] for place in order))
        groups: dict = {}
        for place, vote in zip(order, found, strict=True):
            groups.setdefault(vote, set()).add(place)
        assert groups.pop(None) == {12}
        assert sorted(map(sorted, groups.values())) == sorted(map(sorted, GROUPS))


def test_the_work_on_a_problem_has_an_end(monkeypatch):
    monkeypatch.setattr("mindrlhf.evaluation.votes.COMPARISONS", 3)
    completions = [rf"\boxed{{\sqrt{{{number}}} + x}}" for number in range(20)]
    assert len(set(voted("math", *completions, *completions))) == 20
