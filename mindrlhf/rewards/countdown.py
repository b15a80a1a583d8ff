"""Countdown (TinyZero, Pan et al. 2025): reach the target with given numbers."""

import ast
import json
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction

from mindrlhf.rewards import answers

MAX_LENGTH = 256  # characters of an expression; also bounds the depth of the tree
_ALLOWED = frozenset("0123456789+-*/() ")
# Other signs of the operations; TinyZero's verifier takes + - * / alone.
_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "\n": " "}
_SIGNS |= dict.fromkeys("×·⋅∙∗✕", "*") | dict.fromkeys("÷∕⁄", "/") | dict.fromkeys("\u2212\u2013", "-")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_PREFIXES: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def countdown(
    prompt: str, completion: str, fields: Mapping[str, str], format_score: float = 0.0, use_all: bool = True
) -> float:
    """Reward 1 for an expression with the target's value, else 0.

    The ground truth is JSON, `{"target": 24, "numbers": [3, 8]}`. The stated expression (`answers.stated`) may use each
    number once, and with `use_all` (TinyZero's verifier) has to. format_score: for a well-formed expression that is
    wrong (0.1 in TinyZero).
    """
    truth = fields["ground_truth"]
    problem = truth if isinstance(truth, Mapping) else json.loads(truth)
    answer = answers.stated(prompt, completion)
    solved = evaluate(answer) if answer is not None else None
    if solved is None:
        return 0.0
    given = Counter(map(int, problem["numbers"]))
    used = Counter(solved[1])
    fair = used == given if use_all else used <= given
    return 1.0 if fair and solved[0] == Fraction(str(problem["target"])) else format_score


def evaluate(expression: str) -> tuple[Fraction | None, list[int]] | None:
    """Evaluate an expression of whole numbers exactly; returns (value, its numbers).

    An expression has + - * / (also as × · ÷ and in LaTeX) and parentheses, and is parsed, never run; `= 24` after it,
    other digits and other brackets make it none. Returns None for anything else, or more than
    MAX_LENGTH characters; the value is None if it divides by zero.
    """
    for sign, plain in _SIGNS.items():
        expression = expression.replace(sign, plain)
    expression = expression.strip()
    if not 0 < len(expression) <= MAX_LENGTH or not _ALLOWED.issuperset(expression):
        return None
    numbers: list[int] = []
    try:
        tree = ast.parse(expression, mode="eval").body
        return _value(tree, numbers), numbers
    except ZeroDivisionError:
        return None, numbers
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the parser has three ways to refuse deep nesting
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _PREFIXES:
            return _PREFIXES[type(sign)](_value(operand, numbers))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left, numbers), _value(right, numbers))
    raise ValueError(node)
