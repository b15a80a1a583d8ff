"""Calculator of one expression, exact, and bounded in the sizes of numbers."""

import ast
import operator
import re
from fractions import Fraction

MOST_TEXT = 200  # characters
MOST_BITS = 4096  # of a number
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, for example (3 + 4) * 12 / 5.

    Args:
        expression: Numbers, the operators + - * / // % **, and parentheses.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", expression).translate({0xD7: "*", 0xF7: "/", 0x2212: "-", ord("^"): "**"})
    if len(text) > MOST_TEXT:
        raise ValueError(f"the expression is longer than {MOST_TEXT} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError):
        raise ValueError("the expression cannot be read") from None
    value = _value(tree)
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number)) if isinstance(number, float) else Fraction(number)
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in _OPERATIONS:
            value = _OPERATIONS[type(operation)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            first = _value(left)
            second = _value(right)
            if isinstance(operation, ast.Pow) and _bits(first) * abs(second) > MOST_BITS:
                raise ValueError("the power is too large")
            result = _OPERATIONS[type(operation)](first, second)
            if isinstance(result, complex):
                raise ValueError("the result is no real number")
            value = Fraction(result)
        case _:
            raise ValueError("the expression has more than numbers, + - * / // % ** and parentheses")
    if _bits(value) > MOST_BITS:
        raise ValueError("the number is too large")
    return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()
