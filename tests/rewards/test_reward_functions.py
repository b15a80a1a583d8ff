"""The shipped rewards other than GSM8K's and countdown's."""

import json
import subprocess
import sys

import pytest

from mindrlhf.rewards.form import environment, format, length, repetition_penalty, soft_overlong
from mindrlhf.rewards.knights_and_knaves import knights_and_knaves
from mindrlhf.rewards.math import math
from mindrlhf.rewards.work_limit import TooMuchWorkError, work_limit


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\nb</think>\n\n<answer>\nb\n</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("well <think>a</think><answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>\n</answer>", 0.0),
        ("<think>a<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("b", 0.0),
        ("", 0.0),
    ],
)
def test_think_answer_form(completion, score):
    assert format("question", completion, {}) == score


def test_a_prompt_may_have_opened_the_thinking():
    assert format("question\n<think>\n", "a</think><answer>b</answer>", {}) == 1.0
    assert format("question", "a</think><answer>b</answer>", {}) == 0.0


TRUTH = {"ground_truth": "(1) Zoey is a knight\n(2) Oliver is a knave\n(3) Mia is a knight"}


@pytest.mark.parametrize(
    ("completion", "score", "people"),
    [
        ("<answer>(1) Zoey is a knight\n(2) Oliver is a knave\n(3) Mia is a knight</answer>", 1.0, 1.0),
        ("(2) oliver is a KNAVE, Mia is a knight, and Zoey is a knight.", 1.0, 1.0),
        ("<answer>**Zoey** is a **knight**\nOliver: knave\nMia = knight</answer>", 1.0, 1.0),
        ("<think>Zoey is a knave? no</think> Zoey is a knight, Oliver is a knave, Mia is a knight", 1.0, 1.0),
        ("<answer>Zoey is a knight, Oliver is a knight, Mia is a knight</answer>", 0.0, 2 / 3),
        ("<answer>Zoey is a knight, Oliver is a knave</answer>", 0.0, 2 / 3),
        ("Zoey is a knave. Zoey is a knight, Oliver is a knave, Mia is a knight", 0.0, 2 / 3),
        ("Zoey is not a knight", 0.0, 0.0),
        ("Mizoey is a knight", 0.0, 0.0),
        ("Zoey is a knightly person", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_knights_and_knaves(completion, score, people):
    given = knights_and_knaves("", completion, TRUTH)
    assert given["score"] == score
    assert given["people"] == pytest.approx(people)


def test_knights_and_knaves_takes_linear_time_and_needs_a_ground_truth():
    assert knights_and_knaves("", "a" * 200_000, TRUTH)["score"] == 0.0
    with pytest.raises(ValueError, match="names no knight"):
        knights_and_knaves("", "", {"ground_truth": "who knows"})


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (90000, -1.0)],
)
def test_soft_overlong_is_dapos_ramp(tokens, expected):
    """The paper's setting: 16,384 expected tokens and 4,096 of soft punishment."""
    fields = {"response_length": str(tokens), "max_new_tokens": "20480"}
    for args in ({"buffer": 4096}, {}):
        assert soft_overlong("", "", fields, **args) == pytest.approx(expected)
    assert soft_overlong("", "", fields, buffer=4096, factor=0.25) == pytest.approx(expected / 4)


def test_the_environment_gives_its_own_reward():
    assert environment("", "0.5", {"environment_reward": "-0.25"}) == -0.25
    with pytest.raises(ValueError, match="ended early, or failed"):  # a loss is no abstention
        environment("", "0.5", {"environment_reward": "nan"})
    assert environment("", "0.5", {}) is None


def test_soft_overlong_names_what_is_wrong():
    with pytest.raises(ValueError, match="buffer is 101"):
        soft_overlong("", "", {"response_length": "5", "max_new_tokens": "100"}, buffer=101)
    with pytest.raises(ValueError, match="'response_length'"):
        soft_overlong("", "", {"max_new_tokens": "100"})


@pytest.mark.parametrize(("tokens", "expected"), [(100, 1.0), (50, 0.5), (150, 0.5), (0, 0.0), (200, 0.0), (999, 0.0)])
def test_length_falls_with_the_distance(tokens, expected):
    assert length("", "", {"response_length": str(tokens)}, target=100) == expected


def test_length_needs_a_target_above_zero():
    with pytest.raises(ValueError, match="target is 0"):
        length("", "", {"response_length": "1"}, target=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("one two", 0.0),
        ("one two three four", 0.0),
        ("one two three one two three", -0.25),  # 4 trigrams, 3 distinct
        ("One TWO three one two three", -0.25),
        ("no no no no no", -2 / 3),
        ("!!!!!", -2 / 3),
        ("不不不不不", -2 / 3),
    ],
)
def test_repetition_penalty(text, expected):
    assert repetition_penalty("", text, {}) == pytest.approx(expected)
    assert repetition_penalty("", text, {}, max_penalty=0.5) == pytest.approx(expected / 2)


def test_repetition_penalty_by_words():
    assert repetition_penalty("", "a b a c", {}, ngram=1) == pytest.approx(-0.25)
    with pytest.raises(ValueError, match="ngram is 0"):
        repetition_penalty("", "a", {}, ngram=0)


BOMBS = (
    *("9**9**9**9", "9^{9^{9^{9}}}", "(10^9)!", "1000000000!", "(((5!)!)!)!", "10^{10^{10}}", "2^{1000000000}"),
    *("(" * 50_000 + "1" + ")" * 50_000, "{" * 50_000, "7" * 5000, f"{'7' * 5000}^{'7' * 5000}", "1e1000000000"),
    *(r"\frac{1}{" * 300 + "2" + "}" * 300, r"\sqrt{" * 300 + "2" + "}" * 300, "(x+1)^{10000}", "+".join("1" * 20_000)),
    *(r"\binom{1000000000}{500000000}", r"\gcd(10^{1000000},2)", r"\sum_{i=1}^{10^{10}} i^2", r"\log_{2}{(9^{9^{9}})}"),
    *(r"\sin(10^{10^{10}})", r"e^{e^{e^{e^{10}}}}", r"\infty^{\infty}"),
)


def test_mathematical_answers_that_would_never_end_are_wrong():
    """The alarm only ends a test that hangs: each is refused by its size, or stopped by a count."""
    code = """
import json, signal, sys
from mindrlhf.rewards.math import math
signal.alarm(240)
forms = ("\\\\boxed{%s}", "The answer is $%s$.", "%s")
bombs = json.load(sys.stdin)
print([bomb[:40] for bomb in bombs for form in forms if math("", form % bomb, {"ground_truth": "18"})])
"""
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(BOMBS), capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr[-500:]


def test_what_was_interrupted_leaves_no_trace():
    def scores():
        pairs = ((r"2\sqrt{2}", r"\sqrt{8}"), ("x+1", "x+2"))
        return [math("", rf"\boxed{{{answer}}}", {"ground_truth": truth}) for answer, truth in pairs]

    before = scores()
    with pytest.raises(TooMuchWorkError), work_limit(events=50):
        [abs(number) for number in range(1000)]
    assert math("", r"\boxed{\int_0^1 \sin(x^{x^x}) dx}", {"ground_truth": "18"}) == 0.0
    assert scores() == before == [1.0, 0.0]


@pytest.mark.parametrize(
    ("ground_truth", "completion", "score"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", "#### 1/2", 1.0),
        ("0.5", "<answer>50%</answer>", 1.0),
        ("1000", r"\boxed{1,000}", 1.0),
        ("18", r"\boxed{\$18.00}", 1.0),
        ("18", r"\boxed{18 \text{ dollars}}", 1.0),
        ("x^2+1", r"\boxed{1+x^2}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        (r"\text{Monday}", r"\boxed{\text{Monday}}", 1.0),
        ("18", "The answer is $18$.", 1.0),
        ("18", r"\boxed{118}", 0.0),
        ("18", r"\boxed{18.5}", 0.0),
        ("18", r"\boxed{-18}", 0.0),
        ("18", r"\boxed{17, 18, 19}", 0.0),
        ("(1,2)", r"\boxed{(2,1)}", 0.0),
        ("x^2+1", r"\boxed{x^2-1}", 0.0),
        ("18", r"<think>\boxed{18}</think> \boxed{19}", 0.0),
        ("18", "nothing", 0.0),
        ("18", r"\boxed{\frac{1}{", 0.0),
    ],
)
def test_mathematical_answers(ground_truth, completion, score):
    assert math("", completion, {"ground_truth": ground_truth}) == score
