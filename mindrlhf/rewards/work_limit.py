"""Limits on computer algebra, in operations and sizes: no score depends on a clock.

A single operation on enormous numbers cannot be interrupted, so it is refused beforehand (`check_text`, `check_size`);
small operations are counted while they run (`work_limit`).
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from math import inf, isinf, log2
from types import FrameType
from typing import Any

import sympy
from math_verify import parser
from sympy.core.cache import clear_cache

from mindrlhf.rewards.exact import MAX_DEPTH

MAX_TEXT = 1000  # characters
MAX_DIGITS = 100  # of one number as written
MAX_BITS = 4096  # of a number that would be computed
MAX_POWER = 64  # of a sum, which may be multiplied out
MAX_FACTORIAL = 400
MAX_NODES = 400  # of an expression
MAX_EVENTS = 2_000_000  # function calls and returns: about half a second

# Functions that latex2sympy evaluates while it parses, before any size can be checked.
_EAGER = re.compile(r"(?=.*(gcd|lcm|binom|choose|det))(?=.*(\^|!|[0-9]{5}))", re.DOTALL)
_DIGITS = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}|[0-9][eE][-+]?[0-9]{{4}}")
_UNBOUNDED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_COMBINATORIAL = (
    *(sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.binomial, sympy.gamma),
    *(sympy.RisingFactorial, sympy.FallingFactorial, sympy.fibonacci, sympy.catalan, sympy.bernoulli),
)


class TooMuchWorkError(BaseException):
    """Work beyond the limits; not an `Exception`, because math-verify and sympy swallow these."""


def check_text(text: str) -> None:
    """Refuse text that is too long, too nested, or has too long numbers."""
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    if len(text) > MAX_TEXT or max(depths, default=0) > MAX_DEPTH or _DIGITS.search(text) or _EAGER.match(text):
        raise TooMuchWorkError


def check_size(expressions: Iterable[Any]) -> None:
    """Refuse parsed expressions whose numbers or terms would grow without bound."""
    for expression in expressions:
        if isinstance(expression, sympy.Basic | sympy.MatrixBase):
            for count, node in enumerate(sympy.preorder_traversal(expression)):
                if count > MAX_NODES or isinstance(node, _UNBOUNDED):
                    raise TooMuchWorkError
            bits(expression)


def bits(node: Any) -> float:
    """Bound log2 of the numbers that evaluating `node` computes; symbols count as 2."""
    if not isinstance(node, sympy.Basic):
        return 1.0
    parts = [bits(part) for part in node.args]
    if isinstance(node, sympy.Rational):
        size = float(max(abs(node.p).bit_length(), node.q.bit_length()))
    elif isinstance(node, sympy.Float):
        size = abs(log2(abs(node))) if node and not isinf(node) else 1.0
    elif isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = (2.0, parts[0]) if isinstance(node, sympy.exp) else parts
        factor = 2.0 ** min(exponent, 64.0)
        expanded = isinstance(node, sympy.Pow) and node.base.free_symbols and factor > MAX_POWER
        size = inf if expanded else base * factor
    elif isinstance(node, _COMBINATORIAL):
        largest = 2.0 ** min(max(parts), 64.0)
        size = inf if largest > MAX_FACTORIAL else largest * max(parts)
    elif isinstance(node, sympy.Add):
        size = max(parts) + len(parts)
    else:
        size = sum(parts, 1.0)
    if size > MAX_BITS:
        raise TooMuchWorkError
    return size


@contextmanager
def work_limit(events: int = MAX_EVENTS) -> Iterator[None]:
    """Raise TooMuchWorkError in the body after this many calls and returns."""
    left = events
    before = sys.getprofile()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooMuchWorkError

    sys.setprofile(count)
    try:
        yield
    except TooMuchWorkError:
        sys.setprofile(before)
        _forget()
        raise
    finally:
        sys.setprofile(before)


def _forget() -> None:
    """Clear the caches of sympy and math-verify, which may hold half an answer."""
    clear_cache()
    parser.parse_latex_cached.cache_clear()
    parser.extract_latex.cache_clear()
    for name in dir(sympy.S):  # infinity and the like outlive the caches
        singleton = getattr(sympy.S, name)
        if isinstance(singleton, sympy.Basic):
            singleton._assumptions = singleton.default_assumptions
