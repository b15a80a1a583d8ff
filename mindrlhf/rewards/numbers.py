r"""Numbers in answers, and their equality: the one definition for all rewards.

A number is an exact fraction. `5.0` is 5, `1,000` and `1 000` are 1000, `\frac{1}{2}` and `1/2` are 0.5, `2 1/2` is
2.5, `$18.00` is 18, `1e3` is 1000, `5 million` is 5,000,000. Currency and percent signs are units and change nothing:
`50%` is 50, not 0.5, because GSM8K's ground truths leave out the sign. There is no rounding: 0.33 is not 1/3.

A number is read whole or not at all: `1,0000`, `1.2.3`, `12:30` and `2^18` are no numbers, and no part of them is.
"""

import re
import unicodedata
from collections import deque
from fractions import Fraction

MAX_LENGTH = 1000  # characters; longer runs of digits are no answer
MAX_EXPONENT = 1000

CURRENCY = "$€£¥₹"
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ ][0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_VALUE = re.compile(
    rf"(?:(?P<whole>{_INTEGER})[ ]+(?P<part>[0-9]+/[0-9]+)"
    rf"|(?P<numerator>{_DECIMAL})(?:/(?P<denominator>{_DECIMAL})|[eE](?P<exponent>[-+]?[0-9]+))?)"
)
# Everything that is joined to a digit belongs to the same run, so that a number is never cut out of a longer text.
_RUN = re.compile(
    rf"""
    (?<![A-Za-z0-9_]) (?<![0-9][.,/:]) (?<![\^_¤]\{{) (?<![\^_¤]\{{[-+])
    # not inside a word, a longer number, an exponent, a command
    (?: (?<![)\]}}%]) (?P<sign>[-+]) )?                 # after these it is a subtraction or a range
    (?: [{CURRENCY}] (?: (?P<inner_sign>[-+]) | [ ] )? )?
    (?P<value>
        [0-9]{{1,3}} (?: [ ][0-9]{{3}} )+ (?: \.[0-9]+ )? (?! [0-9] | [.,/:][0-9] )
        | (?: [0-9] | (?<!\.)\.[0-9] )
          (?: [0-9] | [.,/:](?=[0-9]) | [eE][-+]?(?=[0-9]) | [ ]+(?=[0-9]+/[0-9]) )*
    )
    (?P<joined> [\^_²³] | [ ]*·¤ )? (?: [ ]? (?P<scale>{"|".join(SCALES)}) (?![A-Za-z]) )? (?: [ ]?% )?
    """,
    re.VERBOSE,
)
# Another operand or item, or a thousand: `9 + 9`, `2(3)`, `3 or 4`, `3, 4`, `5k`.
_MORE_FOLLOWS = re.compile(
    rf"\s*(?:[+^×÷·]\s*[0-9({{$¤]|[-*/xX]\s*[0-9$]|,\s*[{CURRENCY}]?[0-9]|(?:or|to|and)\s+[{CURRENCY}]?[0-9])|[ ]+[0-9]"
    r"|\(\s*[0-9]|[kKMB](?![A-Za-z])"
)

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|boxed|emph|underline)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}|([0-9])\s*([0-9]))")
_FACTOR = re.compile(r"\\(?:sqrt|pi|[dtc]?frac|binom|log|ln|sin|cos|tan|theta|phi|infty)(?![A-Za-z])\s*")
_COMMAND = re.compile(r"\\[A-Za-z]+\s*")
# Minus signs, the fraction slash, the full-width digits and signs of Chinese and Japanese texts, and narrow spaces.
_NARROW = "\u00a0\u2005\u2006\u2008\u2009\u200a\u202f"
_TYPOGRAPHY = str.maketrans(
    "\u2212\u2013\uff0d\u2044０１２３４５６７８９％＄￥" + _NARROW, "---/0123456789%$¥" + " " * len(_NARROW)
)
_VULGAR = re.compile("[¼-¾⅐-⅞]")  # a fraction in one character
_LATEX = (
    *((r"\$", "$"), (r"\%", "%"), ("{,}", ","), (r"\!", ""), (r"\,", " "), (r"\:", " "), (r"\;", " "), (r"\ ", " ")),
    *((r"\quad", " "), (r"\qquad", " "), ("~", " "), (r"^{\circ}", " "), (r"^\circ", " "), (r"\degree", " ")),
    *((r"\(", " "), (r"\)", " "), (r"\[", " "), (r"\]", " ")),
    *((r"\left", ""), (r"\right", ""), (r"\times", "×"), (r"\cdot", "·"), (r"\div", "÷")),
)


def parse(text: str) -> Fraction | None:
    """Parse a text that is one number, in `$...$` or before a full stop."""
    found = _RUN.fullmatch(_signed(_plain(text).strip("$ \n")).rstrip("$ ."))
    return _value(found) if found else None


def equal(first: str, second: str) -> bool:
    """Test that both texts are numbers, and the same one."""
    number = parse(first)
    return number is not None and number == parse(second)


def stated(answer: str) -> Fraction | None:
    """Find the number that a short answer gives, the first after the last `=`.

    Examples: `18`, `x = 18`, `$18 per day`. None for an operand (`9 + 9`, `2^18`) or one of several (`18 19 20`).
    """
    answer = _signed(_plain(answer).rpartition("=")[2].strip())
    found = _RUN.search(answer)
    if not found or _MORE_FOLLOWS.match(answer, found.end()):
        return None
    return _value(found)


def every(text: str) -> set[Fraction | None]:
    """Collect the numbers of a text."""
    return set(map(_value, _RUN.finditer(_plain(text))))


def last(text: str) -> Fraction | None:
    """Find the last number in a text; None for a last one like `1.2.3`."""
    found = deque(_RUN.finditer(_plain(text)), maxlen=1)
    return _value(found[0]) if found else None


def _plain(text: str) -> str:
    r"""Replace LaTeX's and typography's forms of numbers; `¤` stands for other commands."""
    text = typed(text)
    if "\\" not in text and "{,}" not in text and "~" not in text:
        return text
    text = _FRACTION.sub(_plain_fraction, text)
    text = _WRAPPER.sub(r" \1 ", text)
    for command, plain in _LATEX:
        text = text.replace(command, plain)
    return _COMMAND.sub("¤", _FACTOR.sub("·¤", text))


def typed(text: str) -> str:
    """Replace typography's digits, signs and fractions (`2½` is `2 1/2`)."""
    return _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text).translate(_TYPOGRAPHY)


def _signed(answer: str) -> str:
    """Read `- 18` at the start of an answer as a negative number."""
    return re.sub(r"^([-+])\s+", r"\1", answer)


def _plain_fraction(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - 1) : found.start()]
    space = " " if before.isdigit() else ""  # 2\frac{1}{2} is a mixed number
    return f"{space}{found[1] or found[3]}/{found[2] or found[4]}"


def _value(run: re.Match[str]) -> Fraction | None:
    value = run["value"]
    sign = (run["sign"] or "") + (run["inner_sign"] or "")
    if len(value) > MAX_LENGTH or run["joined"] or len(sign) > 1:
        return None
    parts = _VALUE.fullmatch(value)
    if not parts:
        return None
    plain = {name: re.sub("[, ]", "", text) for name, text in parts.groupdict().items() if text}
    exponent = int(plain.get("exponent", 0))
    if abs(exponent) > MAX_EXPONENT:
        return None
    try:
        number = Fraction(plain.get("whole") or plain["numerator"]) + Fraction(plain.get("part", 0))
        number = number * Fraction(10) ** exponent / Fraction(plain.get("denominator", 1)) * SCALES.get(run["scale"], 1)
    except ZeroDivisionError:
        return None
    return -number if sign == "-" else number
