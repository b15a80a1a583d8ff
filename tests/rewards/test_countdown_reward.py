"""Countdown's verifier against brute force and against Python's own arithmetic."""

import json
import random
import re
from fractions import Fraction

import pytest

from mindrlhf.data.tasks import countdown as task
from mindrlhf.rewards.countdown import countdown, evaluate


def score(expression, target, numbers, **args):
    fields = {"ground_truth": json.dumps({"target": target, "numbers": numbers})}
    return countdown("", f"<answer>{expression}</answer>", fields, **args)


def all_expressions(terms):
    """Every way to join the terms [(value, text)] pairwise by + - * /, as (value, text)."""
    if len(terms) == 1:
        yield terms[0]
        return
    for i, (left, left_text) in enumerate(terms):
        for j, (right, right_text) in enumerate(terms):
            if i == j:
                continue
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign, result in (("+", left + right), ("-", left - right), ("*", left * right)):
                yield from all_expressions([*rest, (result, f"({left_text}{sign}{right_text})")])
            if right:
                yield from all_expressions([*rest, (left / right, f"({left_text}/{right_text})")])


@pytest.mark.parametrize("numbers", [[3, 8], [2, 5, 7], [3, 3, 8], [1, 1, 4]])
def test_brute_force_agrees(numbers):
    found = list(all_expressions([(Fraction(number), str(number)) for number in numbers]))
    targets = sorted({value for value, _ in found if value.denominator == 1})
    assert len(targets) > 3
    for target in targets[:: max(1, len(targets) // 12)]:
        for value, text in found:
            assert score(text, int(target), numbers) == float(value == target), (text, target)


def test_exact_rational_arithmetic():
    assert score("8 / (3 - 8/3)", 24, [3, 3, 8, 8]) == 1.0  # floats miss it: 23.99...
    assert score("(1/3) * 3", 1, [1, 3, 3]) == 1.0
    assert score("10000000000000000/3*3", 10000000000000001, [10000000000000000, 3, 3]) == 0.0


def oracle(text):
    """Python's own evaluation with fractions for whole numbers; None for what is not + - * / and parentheses."""
    if "**" in text or "//" in text:
        return None
    try:
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except (SyntaxError, TypeError):
        return None
    except ZeroDivisionError:
        return "division by zero"
    return value if isinstance(value, Fraction) else None


def test_python_agrees_on_random_texts():
    draw = random.Random(0)
    tokens = ["/0", "1", "2", "7", "10", "03", "+", "-", "*", "/", "(", ")", " ", "+", "*"]
    texts = ["".join(draw.choices(tokens, k=draw.randint(1, 9))) for _ in range(20_000)]
    kinds = {None: 0, "zero": 0, "value": 0}
    for text in texts:
        expected, given = oracle(text.strip()), evaluate(text)
        if expected is None:
            assert given is None, text
        elif expected == "division by zero":
            assert given is not None, text
            assert given[0] is None, text
        else:
            assert given is not None, text
            assert given[0] == expected, text
            assert sorted(given[1]) == sorted(map(int, re.findall(r"\d+", text))), text
        kinds[None if expected is None else "zero" if isinstance(expected, str) else "value"] += 1
    assert min(kinds.values()) > 50, kinds


def test_generated_problems_are_solved_by_their_answers():
    for row in task.generate(200, seed=1):
        truth = task.parse(row).ground_truth
        assert countdown("", row["answer"], {"ground_truth": truth}) == 1.0


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("3*8", 1.0),
        ("3 × 8", 1.0),
        ("3 ⋅ 8", 1.0),
        ("３*8", 0.0),
        ("[3]*8", 0.0),
        ("3*8 = 24", 0.0),
        ("8\n*\n3", 1.0),
        ("-3*-8", 1.0),
        ("3+8", 0.1),
        ("24", 0.1),
        ("3*8*1", 0.1),
        ("3*8+8-8", 0.1),
        ("8/0", 0.1),
        ("3*8=24", 0.0),
        ("3**8", 0.0),
        ("8//3", 0.0),
        ("3*8.0", 0.0),
        ("3_0*8", 0.0),
        ("__import__('os')", 0.0),
        ("3 8", 0.0),
        ("3(8)", 0.0),
        ("()", 0.0),
        ("", 0.0),
        ("(" * 100 + "3*8" + ")" * 100, 1.0),
        ("(" * 250 + "24", 0.0),
        ("-" * 250 + "24", 0.1),
        ("1+" * 200 + "1", 0.0),
    ],
)
def test_partial_credit_is_for_well_formed_expressions(expression, right):
    assert score(expression, 24, [3, 8], format_score=0.1) == right


def test_each_number_once_and_all_of_them_by_default():
    assert score("5*4", 20, [5, 4, 3]) == 0.0
    assert score("5*4", 20, [5, 4, 3], use_all=False) == 1.0
    assert score("5+5*3", 20, [5, 4, 3], use_all=False) == 0.0
    assert score("5+5*3", 20, [5, 5, 3]) == 1.0


@pytest.mark.parametrize(
    "completion", ["<think>#### 1</think><answer>3*8</answer>", "so #### 3*8", r"\boxed{8 \cdot 3}"]
)
def test_where_the_expression_stands(completion):
    fields = {"ground_truth": '{"target":24,"numbers":[3,8]}'}
    assert countdown("", completion, fields) == 1.0
    assert countdown("", "3*8", fields) == 0.0  # stated nowhere
