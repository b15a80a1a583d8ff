"""The GSM8K rewards on all of GSM8K, and on answers that are nearly right."""

import json
import random
from decimal import Decimal

import pytest

from mindrlhf.rewards import numbers, registry
from mindrlhf.rewards.gsm8k import gsm8k, gsm8k_strict

BOTH = pytest.mark.parametrize("reward", [gsm8k, gsm8k_strict])


@pytest.fixture(scope="module")
def rows(shared):
    """(solution text, ground truth text) of all rows, cut out independently of the package."""
    found = []
    for name in ("train", "test"):
        for line in (shared / "data" / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            found.append((solution, solution.split("####")[1].strip().replace(",", "")))
    return found


def score(reward, completion, ground_truth):
    return reward("", completion, {"ground_truth": ground_truth})


def test_every_ground_truth_parses(rows):
    assert len(rows) == 8792
    assert all(numbers.parse(truth) == int(truth) for _, truth in rows)


@BOTH
def test_every_reference_solution_scores_one(rows, reward):
    assert [score(reward, solution, truth) for solution, truth in rows] == [1.0] * 8792


def wrong_variant(truth: str, draw: random.Random) -> str:
    """Another number, close in writing: a digit changed, the sign, or the number inside a longer one."""
    digits, sign = truth.lstrip("-"), "-" if truth.startswith("-") else ""
    kind = draw.choice(["digit", "sign", "front", "back", "middle", "decimals", "thousands", "fraction", "exponent"])
    place = draw.randrange(len(digits))
    extra = str(draw.randint(1, 9))
    if kind == "digit":
        other = draw.choice([digit for digit in "0123456789" if digit != digits[place]])
        return sign + digits[:place] + other + digits[place + 1 :]
    if kind == "sign":
        return draw.choice(
            [digits, f"${digits}"] if sign else [f"-{digits}", f"-${digits}", f"$-{digits}", f"\u2212{digits}"]
        )
    if kind == "middle":
        return f"{sign}{extra}{digits}{extra}"
    after = {
        "back": extra,
        "decimals": f".{extra}",
        "thousands": ",000",
        "fraction": f"/1{extra}",
        "exponent": f"e{extra}",
    }
    return f"{sign}{extra}{digits}" if kind == "front" else f"{sign}{digits}{after[kind]}"


def value(text: str) -> Decimal:
    """By decimal arithmetic, not by the package."""
    numerator, _, denominator = text.replace("$", "").replace("\u2212", "-").replace(",", "").partition("/")
    return Decimal(numerator) / Decimal(denominator or 1)


def test_two_thousand_wrong_variants_score_zero(rows):
    draw = random.Random(0)
    tried = 0
    while tried < 2000:
        solution, truth = draw.choice(rows)
        wrong = wrong_variant(truth, draw)
        if value(wrong) == value(truth):  # -0, 0e3, 0/19
            continue
        tried += 1
        reasoning = solution.split("####")[0]
        for ending in (f"#### {wrong}", f"The answer is {wrong}.", rf"\boxed{{{wrong}}}", f"<answer>{wrong}</answer>"):
            assert score(gsm8k, reasoning + ending, truth) == 0.0, (truth, ending)


@pytest.mark.parametrize(
    "completion",
    [
        *("#### 18", "####18", "3+4=7 7+11=18 #### 18", "#### 18.00", "#### $18", "#### 18.", "#### 5\n#### 18", "18"),
        *("<think>#### 5</think>\n#### 18", "#### 18 dollars", "####\n18 dollars", "#### x = 18", "#### **18**"),
        *(
            "The answer is 18.",
            "The answer is 18 dollars",
            r"so \boxed{18}",
            r"\boxed{\frac{36}{2}}",
            "<answer>#### 18</answer>",
        ),
        *(r"so $\boxed{18 \text{ dollars}}$ in 3 days", "<think>#### 5</think> I get 18", r"\boxed{18^\circ}"),
        "<think>It is 5.</think><answer>18</answer> after 3 tries",
    ],
)
def test_forms_of_a_right_answer(completion):
    assert score(gsm8k, completion, "18") == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("The answer is 72.", 0.0),
        (r"\boxed{72}", 0.0),
        ("#### 72 clips altogether", 1.0),
        ("#### $72", 0.0),
        ("#### 72.", 0.0),
        ("#### 72", 1.0),
        ("####72", 0.0),
        ("####\n72", 0.0),
        ("#### 7,2", 1.0),
        ("#### 5\n#### 72", 1.0),
        ("#### 72\n#### 5", 0.0),
        ("#### 72 " + "x" * 292, 1.0),
        ("#### 72 " + "x" * 293, 0.0),  # 301 characters
        ("#### 5 <think>#### 72", 1.0),
        ("", 0.0),
    ],
)
def test_the_strict_rule_by_hand(completion, expected):
    assert score(gsm8k_strict, completion, "72") == expected
    assert score(registry.resolve("openai/gsm8k"), completion, "72") == expected


def verls_rule(text: str, truth: str) -> float:
    """verl's strict rule written anew without regular expressions, from the description of its versions 0.5 to 0.9."""
    text, found = text[max(0, len(text) - 300) :], None
    place = 0
    while (place := text.find("#### ", place)) >= 0:
        end = start = place + 5
        if text[end : end + 1] == "-":
            end += 1
        first = end
        while end < len(text) and text[end] in "0123456789.,":
            end += 1
        if end > first:
            found, place = text[start:end], end
        else:
            place += 1
    return float(found is not None and found.replace(",", "").replace("$", "") == truth)


def test_the_strict_rule_on_constructed_answers(rows):
    """2,000 answers; half of them hold the right number somewhere."""
    draw, right = random.Random(0), 0
    pieces = (
        "#### ",
        "####",
        "#### -",
        "#### $",
        "##### ",
        ".",
        ",",
        "$",
        " ",
        "\n",
        " clips",
        r"\boxed{",
        "}",
        "The answer is ",
    )
    for _ in range(2000):
        solution, truth = draw.choice(rows)
        number = truth if draw.random() < 0.6 else wrong_variant(truth, draw)
        parts = [
            draw.choice(pieces),
            draw.choice(pieces),
            number,
            draw.choice(pieces),
            draw.choice(["", "", number, "7"]),
        ]
        if draw.random() < 0.5:
            parts[0] = "#### " if draw.random() < 0.7 else "#### 1 #### "
            parts[1] = ""
        text = draw.choice(["", solution.split("####")[0]]) + "".join(parts) + draw.choice(["", "", "so it is. " * 40])
        assert score(gsm8k_strict, text, truth) == verls_rule(text, truth), (text[-80:], truth)
        right += verls_rule(text, truth)
    assert 200 < right < 1800


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "####",
        "no number",
        "18 #### 19",
        "#### eighteen, that is 9+9",
        r"\boxed{17} is not 18",
        r"\boxed{",
        "#### 9 + 9",
        "#### 18 19 20",
        "<answer>9+9</answer>",
        "#### 18 000",
        r"\boxed{18\sqrt{3}}",
        r"\boxed{18 \pi}",
        r"\boxed{\frac{-18}{1}}",
        "<answer>18 million</answer>",
        r"\boxed{1\,8}",
    ],
)
def test_other_answers_score_zero(completion):
    assert score(gsm8k, completion, "18") == 0.0


def test_a_ground_truth_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="'seven' is not a number"):
        score(gsm8k, "#### 7", "seven")
