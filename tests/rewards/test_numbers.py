"""What counts as a number, and which texts are the same one."""

from fractions import Fraction

import pytest

from mindrlhf.rewards import numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("5.0", 5),
        ("007", 7),
        ("+18", 18),
        ("-18", -18),
        ("\u221218", -18),
        ("- 18", -18),
        ("18.", 18),
        (" 18\n", 18),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1,000", 1000),
        ("1,234,567.50", Fraction("1234567.5")),
        ("1 000", 1000),
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        ("1e3", 1000),
        ("1.5e-2", Fraction(3, 200)),
        ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        (r"\frac12", Fraction(1, 2)),
        ("2 1/2", Fraction(5, 2)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("$18.00", 18),
        (r"\$18.00", 18),
        ("$ 18", 18),
        ("-$18", -18),
        ("$-18", -18),
        ("€5", 5),
        ("$18$", 18),
        ("$$18$$", 18),
        (r"\text{18}", 18),
        ("50%", 50),
        (r"50\%", 50),
        ("50 %", 50),
        ("１８", 18),
        ("9" * 101, int("9" * 101)),
        ("1e-200", Fraction(1, 10**200)),
        ("1\u2009234", 1234),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        ("$5 million", 5_000_000),
        ("5万", 50_000),
        (r"90^\circ", 90),
    ],
)
def test_a_number_has_one_value(text, value):
    assert numbers.parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "eighteen", "18 dollars", "18a", "a18", "1,00", "1,0000", "1.2.3", "12:30", "1_000", "--18", "-$-18"),
        *(
            "2^18",
            "18²",
            "1/0",
            "1/2/3",
            "18 19",
            "9+9",
            "18-20",
            "x18",
            r"\sqrt{18}",
            r"2\sqrt{18}",
            r"2 \pi",
            r"1\,2",
            "1e9999",
            "9" * 1001,
            "$",
            "-",
            ".",
        ),
    ],
)
def test_anything_else_is_no_number(text):
    assert numbers.parse(text) is None


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("5.0", "5", True),
        ("1,000", "1000", True),
        (r"\frac{1}{2}", "0.5", True),
        ("$18.00", "18", True),
        ("50%", "50", True),
        ("50%", "0.5", False),
        ("0.33", "1/3", False),
        ("118", "18", False),
        ("180", "18", False),
        ("18.5", "18", False),
        ("18,000", "18", False),
        ("-18", "18", False),
        ("no", "no", False),
    ],
)
def test_equality_is_of_numbers(first, second, same):
    assert numbers.equal(first, second) is same
    assert numbers.equal(second, first) is same


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("18 dollars", 18),
        ("$18.00 per hour", 18),
        ("$18/day", 18),
        ("60 km/h", 60),
        ("x = 18", 18),
        ("x=-18", -18),
        ("9 * 2 = 18", 18),
        ("The answer is 18.", 18),
        ("**$18**", 18),
        (r"18\text{ dollars}", 18),
        (r"\approx 18", 18),
        ("18 (since 9+9 = 18)", 18),
        ("答案是18元", 18),
        ("Rs.18", 18),
        ("18 000", 18000),
        ("- 18", -18),
        ("x-18", 18),
        ("2½", 2.5),
        ("¾ cup", 0.75),
        ("18 (18 or 19 were asked for)", 18),
        ("18 knives", 18),
    ],
)
def test_a_short_answer_states_its_first_number(answer, value):
    assert numbers.stated(answer) == value


@pytest.mark.parametrize(
    "answer",
    [
        "9+9",
        "9 + 9",
        "18 - 2",
        "18-20",
        "2^{18}",
        "18^2",
        "18:30",
        "18 19 20",
        "1 8",
        r"\frac{18}{x}",
        r"\sqrt{18}",
        r"18\sqrt{3}",
        r"18\pi",
        *("18 or 19", "18 to 19", "18, 19", "18 and $19", "18 x 2", "2(3)", "18k", "$18M"),
        "no",
    ],
)
def test_a_short_answer_that_is_not_worked_out_states_none(answer):
    assert numbers.stated(answer) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48+24 = <<48+24=72>>72 clips", 72),
        ("so the answer is ...18", 18),
        ("first 3, then 4, then 18.", 18),
        ("In 2023 100 people", 100),
        ("it costs $5-$18", 18),
        ("(18)", 18),
        ("version 1.2.3", None),
        ("A18", None),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, value):
    assert numbers.last(text) == value


def test_long_texts_take_linear_time():
    for piece in ("1", "1,", "1 ", "1/", "1e", "-$", r"\frac{", r"\frac12", "=", "1   "):
        text = piece * 50_000
        for read in (numbers.parse, numbers.stated, numbers.last):
            read(text)
