"""The reward `math` on pairs of answers with their right values by exact mathematics."""

import subprocess
import sys

import pytest

from mindrlhf.rewards import exact
from mindrlhf.rewards.math import math, same

# Of each pair of numbers exact arithmetic says whether they are equal.
NUMBERS = [
    *(("2", "2 2/3", 0), ("10", "4 10/3", 0), (r"\frac{71}{6}", "11 5/6", 1), (r"11\frac{5}{6}", r"\frac{71}{6}", 1)),
    *(("3", r"3\frac{1}{2}", 0), ("5/6", "11 5/6", 0), ("11", "11 5/6", 0), ("1", "1 1/2", 0), ("x = 1", "1 1/2", 0)),
    *(("1 3/4", "1", 0), (r"\frac{-7}{5}", "-1 2/5", 1), ("-1.4", r"-1\frac25", 1), ("-0.6", "-1 2/5", 0)),
    *(
        ("11/2", "1 1/2", 0),
        ("1 1/2", "11/2", 0),
        ("2½", "2.5", 1),
        (r"2\,1/2", "2.5", 1),
        ("12", r"1\,2", 0),
        ("3", r"1\,2", 0),
    ),
    *(
        ("1,234", "1234", 1),
        ("1{,}234", "1234", 1),
        (r"1\,234", "1234", 1),
        (r"1,\!234", "1\u2009234", 1),
        ("1234", "1 234", 1),
    ),
    *(
        ("1234", "(1,234)", 0),
        ("12345", "1,2345", 0),
        ("1234", "12,34", 0),
        ("10 000/3", "10000/3", 1),
        ("53", "5 3", 0),
    ),
    *(("1e-30", "2e-30", 0), ("10^{-30}", "1e-30", 1), ("10^{400}", "1" + "0" * 400, 1), ("10^{400}", "10^{401}", 0)),
    *(("0.12345678901234567890", "0.12345678901234567891", 0), ("12345678901234567890", "12345678901234567891", 0)),
    *((r"\frac{10^{400}+1}{10^{400}}", "1", 0), ("0.333333", r"\frac{1}{3}", 0), (r"0.\overline{3}", "1/3", 1)),
    *(("0.3", r"0.\overline{3}", 0), ("0.333", "0.333...", 0), ("1.5 x 10^3", "1500", 1), ("10⁻³", "0.001", 1)),
    *(("999", "999 dollars", 1), ("999 dollars", "999", 1), (r"10\text{ cm}", "10.", 1), (r"5\text{ cm}^2", "5", 1)),
    *(
        ("60", "60 km/h", 1),
        ("18", "18/day", 1),
        ("90", r"90^{\circ}", 1),
        ("5", r"5\mathrm{~cm}", 1),
        ("5", "5xy", 0),
        ("5", "5x", 0),
    ),
    *(
        ("5", "5 million", 0),
        (r"\$5\text{ million}", "5,000,000", 1),
        ("5", r"5\text{ million}", 0),
        ("50000", "5万", 1),
    ),
    *(
        ("3", "3 and a half", 0),
        ("3", r"3\text{ and a half}", 0),
        ("12", r"12\text{ feet }3\text{ inches}", 0),
        ("5", r"5\text{ or }6", 0),
    ),
    *(
        (r"28\%", "28", 1),
        (r"28\%", "0.28", 1),
        (r"28\%", "28 percent", 1),
        (r"28\%", "2.8", 0),
        ("0.28", "28", 0),
        ("28%", "0.28%", 0),
    ),
    *(
        ("101_2", "101_3", 0),
        ("101_2", "5", 1),
        ("101_{2}", "101_2", 1),
        ("101", "101_2", 0),
        ("42", "2A_{16}", 1),
        ("255", "FF_{16}", 1),
    ),
    *((r"101_{\text{two}}", r"101_{\text{three}}", 0), (r"101_{\text{two}}", "101", 0), ("103_2", "103_2", 1)),
    *(
        ("x=5", "y=5", 0),
        ("x=5", "5", 1),
        ("a_{10} = 5", "5", 1),
        ("f(2)=5", "5", 1),
        ("5", "2x=5", 0),
        ("18", "9+9 = 18", 1),
    ),
    *(
        ("2", r"\sqrt{4}", 1),
        (r"\frac{2}{3}", r"\sqrt{\frac{4}{9}}", 1),
        ("2", r"\sqrt[3]{8}", 1),
        ("2", "8^{1/3}", 1),
        ("4", "(-2)^2", 1),
    ),
    *(
        ("0.5", r"\mathbf{\frac12}", 1),
        ("0.5", r"{1 \over 2}", 1),
        ("-5", "- 5", 1),
        ("-5", "\u22125", 1),
        ("0", "-0", 1),
        ("1/0", "2/0", 0),
    ),
    *(
        (r"10^{100000}", r"10^{100000}", 1),
        (r"10^{100000}", r"10^{100001}", 0),
        ("1.2.3", "1.23", 0),
        ("007", "7", 1),
        ("0.5", ".5", 1),
    ),
]
# math-verify decides, without rounding.
OTHERS = [
    *((r"2\sqrt{3}", r"\sqrt{12}", 1), ("2", r"2\sqrt{3}", 0), (r"\sqrt{2}", "1.414214", 0), ("3.141593", r"\pi", 0)),
    *(
        (r"\sqrt{2}+10^{-30}", r"\sqrt{2}", 0),
        ("(1 1/2,3)", "(1,3)", 0),
        ("(1 1/2,3)", "(3/2,3)", 1),
        (r"(1\,234, 5)", "(1234,5)", 1),
    ),
    *(
        ("0.5x", "x/2", 1),
        ("0.5x", "0.50000001x", 0),
        ("x > 3", r"x \geq 3", 0),
        ("n=2,3,4", "n=1,2,3", 0),
        ("(0,1)", "[0,1]", 0),
    ),
    *(
        (r"19, 46, \text{ and } 82", "19, 46, 82", 1),
        (r"\{1,2,3\}", r"\{3,2,1\}", 1),
        (r"\pm 2021", "2021", 0),
        ("12:00", "1:00", 0),
    ),
    *(
        (r"\text{Monday}", "Monday", 1),
        (r"\text{(A)}", "A", 1),
        ("2+3i", "2-3i", 0),
        ("1234", "1, 234", 0),
        ("120", "5!", 1),
    ),
    *(  # a full stop, bold type and dollars around an answer; words with numbers
        ("(2,12)", "(2,12).", 1),
        ("C", "C.", 1),
        (r"\text{(E)}", "**E**.", 1),
        ("x^2-1", "$(x-1)(x+1)$.", 1),
        (r"\text{June 20}", "June 20", 1),
        (r"\text{June 20}", "20", 0),
        ("true", "True", 1),
        ("Yes", "YES", 1),
    ),
    *((r"\log_2 8", "3", 1), (r"\log_2 3", r"\log_{2}{3}", 1), (r"\log_2 3", r"\log_2 5", 0)),
    *(  # an order, and the signs of relations, are no product and no decoration
        ("ABC", "ACB", 0),
        (r"\text{BCA}", "CAB", 0),
        ("ABC", r"\text{ABC}", 1),
        ("5", r"\geq 5", 0),
        (r"\leq 5", r"\geq 5", 0),
        (r"\leq 5", r"\le 5", 1),
    ),
    *(("R-r", "0", 0), ("R-r", "r-R", 0), ("R-r", "-r+R", 1), (r"\frac{R}{2}", "R/2", 1), ("(B)", "b", 1)),
]
# What an answer says without a box, its value, and another one that a careless reading finds in it.
SAID = [
    ("The answer is 3, 5, and 7.", "3, 5, 7", "3"),
    ("So the answer is $1,-2$.", "1, -2", "1"),
    ("The answer is $a = 3, b = 4$.", "a=3, b=4", "3"),
    ("The answer is (1,2); (3,4)", "(1,2), (3,4)", "(1,2)"),
    ("The answer is (3, 4).", "(3,4)", "4"),
    ("The answer is\n\\[\n5x \\]", "5x", "5"),
    ("Final Answer: The final answer is $(2,3)$. I hope it is correct.", "(2,3)", "3"),
    ("Therefore, the answer is (B).", "B", "A"),
    ("The answer is 18, because 9 + 9 is 18.", "18", "9"),
    ("The answer is 18, and we are done with 9.", "18", "9"),
    ("The answer is 1,234, a large number of 5.", "1234", "5"),
    ("The answer is 12 apples, 5 of them red.", "12 apples, 5 of them red", "5"),
]


@pytest.mark.parametrize(("gold", "answer", "right"), [*NUMBERS, *OTHERS])
def test_pairs_of_answers(gold, answer, right):
    assert same(gold, answer) == right


@pytest.mark.parametrize(("completion", "right", "wrong"), SAID)
def test_answers_said_without_a_box(completion, right, wrong):
    assert [math("", completion, {"ground_truth": gold}) for gold in (right, wrong)] == [1.0, 0.0]


def test_a_worked_solution_is_its_box():
    """The solutions of Hendrycks' MATH have no column with the answer alone."""
    solution = "First we factor. " * 100 + r"Hence it is $\boxed{\frac{1}{2}}$."
    assert [math("", rf"\boxed{{{answer}}}", {"ground_truth": solution}) for answer in ("0.5", "2")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("truth", "reason"), [("proof " * 200, "has 1200 characters"), ('{"target": "3"}', "is a group of values")]
)
def test_no_answer_can_equal_such_a_truth(truth, reason):
    with pytest.raises(ValueError, match=f"the ground truth .*{reason}"):
        math("", r"\boxed{3}", {"ground_truth": truth})


def test_the_first_answer_of_a_process_pays_for_no_import():
    """Imports of sympy count as work: the first pair in a process would be too much of it, and the next one not."""
    pair = r"same('[-\\pi/2,\\pi/2]', '[-\\frac{\\pi}{2}, \\frac{\\pi}{2}]')"
    command = [sys.executable, "-c", f"from mindrlhf.rewards.math import same; print({pair})"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


def test_pairs_of_numbers_are_symmetric():
    assert [pair for pair in NUMBERS if same(pair[1], pair[0]) != pair[2]] == []


def test_no_text_takes_for_ever():
    """Each of these is read in linear time, or at most in that of its square; they are within the limits of length."""
    pieces = (
        "a ",
        "a/",
        "a (",
        "f(x)",
        "a_1",
        "1 1/2 ",
        "1,",
        "(",
        "{",
        r"\text{a}",
        r"\frac",
        "1=",
        "a=",
        "-",
        "^{2}",
        "«a",
        "a=1",
    )
    for piece in pieces:
        for text in (piece * 100, f"5 {piece * 100}1", f"{piece * 100}!=5"):
            exact.read(text), exact.doubtful(text)
    assert not same("+".join("1" * 20_000), "20000")


@pytest.mark.parametrize("gold", [r"F_n=\sum_{k=0}^{n-1}F_k", "the empty set of sets {", "$$", r"\frac{1}{"])
def test_a_truth_that_cannot_be_read_equals_its_own_text_alone(gold):
    for answer, score in ((gold, 1.0), (f" {gold}\n", 1.0), (r"F_n=\sum_{k=0}^{n-2}F_k", 0.0), ("18", 0.0)):
        assert math("", f"<answer>{answer}</answer>", {"ground_truth": gold}) == score


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        ("The answer is 1 1/2.", "1", 0.0),
        ("The answer is 1 1/2.", "1.5", 1.0),
        ("The answer is 1e-30.", "1", 0.0),
        ("The answer is 3 and a half", "3", 0.0),
        (r"So x=3\frac12", "3.5", 1.0),
        ("they pay 5 million dollars", "5", 0.0),
        ("so 50%.", "0.5", 1.0),
        ("The answer is 73 because 5 + 68 = 73, and not 74.", "73", 1.0),
        ("So **73**.\n\n---\nFinal Answer: **73**", "73", 1.0),
        ("The answer is 12:30", "12", 0.0),
    ],
)
def test_an_answer_that_is_not_stated_is_found_whole(completion, gold, score):
    assert math("", completion, {"ground_truth": gold}) == score
