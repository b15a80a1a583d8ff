"""Mathematical answers: numbers compared exactly, others by math-verify within limits."""

import logging
import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import math_verify
from sympy import Basic, nan, oo, zoo

from mindrlhf.rewards import answers, exact, numbers
from mindrlhf.rewards.work_limit import MAX_TEXT, TooMuchWorkError, check_size, check_text, work_limit

# math-verify's time limits need the alarm signal, and the reward runner has its own. It would warn that they are off.
for _part in ("parser", "grader"):
    logging.getLogger(f"math_verify.{_part}").setLevel(logging.ERROR)
# Preparations and the import of half of sympy, which are no answer's work: it would be too much for the first one.
for _pair in ((r"2 \le x \le 5", "[2,5]"), (r"[-\pi/2,1]", r"[-\frac{\pi}{2},1]")):
    _first, _second = (math_verify.parse(rf"\boxed{{{_text}}}", parsing_timeout=None) for _text in _pair)
    math_verify.verify(_first, _second, timeout_seconds=None)

DIGITS = 500  # of comparisons: decimals are not rounded
_MIXED = re.compile(
    r"(?<![\w^_.}/\\])(?!(?<=,)[0-9]{3}\b)([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)|\s*\\frac\{([0-9]+)\}\{([0-9]+)\})(?![0-9]|[.][0-9])"
)
# After a comma: another item of a list (`3, 5 and 7`, `a = 3, b = 4`), and no word of a sentence that goes on.
_ITEM = r"\s*(?:(?:and|or)\s+)?(?:[-+\u2212$\\(\[{}0-9]|[a-z](?![a-z]|\s+[a-z]))"
_SAID = re.compile(
    rf"answer\s*(?:is|[:：=])+(?![\s:：=]*(?:the\s+)?(?:final\s+)?answer\b)\s*(?:\\\[\s*(.*?)\s*\\\]|\$\$\s*(.*?)\s*\$\$"
    rf"|(.*?)(?=\n|[,;](?!{_ITEM})|\.(?:\s|$)|\s(?:because|since|as|so|which)\b|$))",
    re.I | re.S,
)
_DOLLARS = re.compile(r"\$([^$]*[^$\\])\$")
_NO_WORDS = re.compile(r"\\[A-Za-z]+|\b(?:and|or)\b")  # letters that make no sentence
_SEQUENCE = re.compile("«?[A-Z]{3,}»?")  # an order, or names of points: no product of variables
_LONE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z_])")  # a letter that is a variable
_CHOICE = re.compile(r"\W*[A-Za-z]\W*")  # `(b)` is the choice B
_RELATIONS = {
    name: re.compile(rf"\s*(?:{form})")
    for name, form in {
        "<": r"<|\\lt\b",
        ">": r">|\\gt\b",
        "<=": r"≤|\\le(?:q|qslant)?\b",
        ">=": r"≥|\\ge(?:q|qslant)?\b",
        "!=": r"≠|\\neq?\b",
    }.items()
}
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9])")


def math(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    r"""Reward 1 for an answer equal to the ground truth, else 0.

    The ground truth is LaTeX or plain text; of a worked solution, it is what the only `\boxed{}` holds. The stated
    answer (`answers.stated`) counts, else what follows the last `answer is` or `answer:`, a list as a whole, else the
    answer that math-verify finds; both in the last 1,000 characters after the thinking. Equality is that of `same`.
    """
    truth = _truth(answers.truth_of(fields))
    answer = answer_of(prompt, completion)
    return float(answer is not None and same(truth, answer))


def answer_of(prompt: str, completion: str) -> str | None:
    """Find the answer that is compared, as text."""
    answer = answers.stated(prompt, completion)
    return _found(answers.after_thinking(prompt, completion)[-MAX_TEXT:]) if answer is None else answer


def same(gold: str, answer: str) -> bool:
    r"""Test two answers for equality.

    Two values (`exact.read`) are equal if exact arithmetic finds them equal, so that nothing is rounded: 0.33 is not
    1/3. math-verify decides on all else, without rounding; an answer that takes more work than `work_limit` allows is
    wrong. A text that it cannot read, and a number that only people can (`exact.doubtful`), equals the same text only,
    as does a sequence of capital letters: `ACB` is not `ABC`.
    """
    gold, answer = _tidy(gold), _tidy(answer)
    if gold == answer:
        return True
    first, second = exact.read(gold), exact.read(answer)
    if first and second:
        return first.equals(second)
    if exact.doubtful(gold) or exact.doubtful(answer):
        if first or second or "_" in gold + answer:
            return False
    elif _letters(gold) == _letters(answer):
        return True
    elif _SEQUENCE.fullmatch(exact.plain(gold)) or _relation(gold) != _relation(answer):
        return False
    with suppress(TooMuchWorkError), work_limit():
        expected, found = (_parse(rf"\boxed{{{_spelled(text)}}}") for text in _with_cases(gold, answer))
        if expected and (_infinite(expected) or not _infinite(found)):  # math-verify finds \infty^{\infty} equal to 18
            digits = {"float_rounding": DIGITS, "numeric_precision": DIGITS}
            return math_verify.verify(expected, found, timeout_seconds=None, **digits)
    return False


def _truth(text: str) -> str:
    """Find the answer in a ground truth.

    ValueError for a group of values, and for a text that is too long for an answer: no answer would equal it.
    """
    boxes = answers.boxes(text)
    truth = boxes[0] if len(boxes) == 1 else text
    if truth.startswith('{"'):
        raise ValueError(f"the ground truth {truth[:80]!r} is a group of values, and should be an answer alone")
    if len(truth) > MAX_TEXT:
        raise ValueError(
            f"the ground truth has {len(truth)} characters, and should be an answer, or have one \\boxed{{}}"
        )
    return truth


def _found(text: str) -> str | None:
    """Find an answer that is not stated in one of the forms: its text."""
    said = next(("".join(filter(None, found.groups())) for found in deque(_SAID.finditer(text), maxlen=1)), "")
    if exact.read(said) or exact.doubtful(said) or _is_formula(said):
        return said
    with suppress(TooMuchWorkError), work_limit():
        found = _parse(text)
        if found and isinstance(found[-1], str):
            return _whole(found[-1], text)
    return None


def _is_formula(said: str) -> bool:
    """Test for a formula without a sentence.

    Examples: `5x`, `(3, 4)`, `B`; also a list with words in it.
    """
    worded = re.search("[A-Za-z]{2}", _NO_WORDS.sub(" ", said))
    return re.search("[0-9A-Za-z]", said) is not None and (worded is None or re.search("[,;]", said) is not None)


def _tidy(text: str) -> str:
    """Leave out bold type, dollar signs, and the full stop."""
    text = text.strip("* \t\r\n")
    text = text if text.endswith("..") else text.removesuffix(".").rstrip("* \t\r\n")
    formula = _DOLLARS.fullmatch(text)
    return formula[1].strip() if formula else text


def _relation(text: str) -> str | None:
    r"""Name the relation at the beginning of a text.

    math-verify finds `\geq 5` equal to 5.
    """
    return next((name for name, form in _RELATIONS.items() if form.match(text)), None)


def _letters(text: str) -> str:
    """Leave out spaces and commands for type, and the case of words."""
    letters = re.sub("[\\s«»]", "", exact.plain(text))
    return letters.lower() if letters.isalpha() and len(letters) > 2 else letters


def _whole(found: str, text: str) -> str | None:
    """Replace a number that was cut out of a longer one.

    For the `3` of `x = 3\\frac12` it is the last number of the text.
    """
    value = exact.read(found)
    if value is None or value.number in numbers.every(text):
        return f"{found}%" if re.search(rf"{re.escape(found)}\s*\\?%", text) else found
    last = numbers.last(text)
    return None if last is None else str(last)


def _with_cases(gold: str, answer: str) -> tuple[str, str]:
    """Mark capital variables that a small one stands beside.

    math-verify takes `R` and `r` for one variable. A choice has either case.
    """
    if _CHOICE.fullmatch(gold) and _CHOICE.fullmatch(answer):
        return gold, answer
    lone = set(_LONE.findall(gold + " " + answer))
    both = {letter for letter in lone if letter.isupper() and letter.lower() in lone}
    first, second = (_LONE.sub(lambda one: f"{one[0]}_{{0}}" if one[0] in both else one[0], t) for t in (gold, answer))
    return first, second


def _spelled(text: str) -> str:
    """Spell mixed numbers and thousands in a way that math-verify reads right."""
    plain = text.replace(r"\,", " ").replace("{,}", ",")
    return _MIXED.sub(_fraction, _GROUPED.sub(lambda found: found[0].replace(" ", ""), plain))


def _fraction(found: re.Match[str]) -> str:
    whole = int(found[1])
    part = int(found[2] or found[4])
    parts = int(found[3] or found[5])
    return rf"\frac{{{whole * parts + part}}}{{{parts}}}"


def _parse(text: str) -> list:
    check_text(text)
    found = math_verify.parse(text, parsing_timeout=None)
    check_size(found)
    return found


def _infinite(found: list) -> bool:
    return any(one.has(oo, -oo, zoo, nan) for one in found if isinstance(one, Basic))
