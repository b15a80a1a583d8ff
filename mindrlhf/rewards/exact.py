r"""Exact values of answers: arithmetic of numbers, in plain text and LaTeX.

`11 5/6`, `11\frac{5}{6}`, `71/6` and `\frac{71}{6}` are one value; `1{,}234`, `1\,234`, `1.234e3`, `\$1,234.00` and
`1.234 \times 10^3` are another. Roots count where they are exact, `101_2` is 5, `0.\overline{3}` is 1/3, and a scale
is part of a number (`5 million`). Units are left out: `5\text{ cm}^2` is 5. `28\%` equals both 28 and 0.28.

Nothing is rounded, and a text is read whole or not at all: not `2\sqrt{3}` (no fraction), `(1,234)` (an interval),
`5xy`, `12:30`, `1 2` or `3 and a half`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from mindrlhf.rewards.numbers import CURRENCY, MAX_LENGTH, SCALES, typed

MAX_DEPTH = 24  # brackets within brackets
MAX_BITS = 1 << 14  # of a power, and half of those of a sum

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_COMMAND = r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf)|mbox|[bf]box|boxed|emph|underline|operatorname)\s*"
_WRAPPER = re.compile(rf"{_COMMAND}\{{([^{{}}]*)\}}")
_PLAIN = (
    (re.compile(rf"{_COMMAND}(?=\{{)"), ""),
    (re.compile(r"\\(?:left|right|displaystyle|textstyle|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])|\\!|\\[()\[\]]"), ""),
    (re.compile(r"\\(?:[,:; ]|thinspace|quad|qquad|hspace\{[^{}]*\})|~"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(\\log\s*_)\s*([0-9])\s*"), r"\1{\2}"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])|[×·⋅∙]|(?<=[0-9])\s*[xX]\s*(?=10\s*\^)"), "*"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°"), " «degrees» "),
    (re.compile(rf"^\s*(?:USD?|EUR|GBP|Rs\.?)\s*(?=[\\{CURRENCY}0-9])|\\\$|[{CURRENCY}]"), " "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"√|(?<![\\A-Za-z])sqrt(?=\s*\()"), r"\\sqrt "),
    (re.compile(r"^\s*\\approx(?![A-Za-z])"), " "),
)
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![ ]?[0-9]|\s*/)|[0-9]+)"
_TOKEN = re.compile(
    rf"""\s*(?:
    (?P<whole>[0-9]+)\s+(?P<part>[0-9]+)\s*/\s*(?P<parts>[0-9]+)(?![0-9.,])
    | (?P<fixed>[0-9]*)\.(?P<start>[0-9]*)\s*\\(?:overline|bar|dot)\s*(?:\{{(?P<period>[0-9]+)\}}|(?P<digit>[0-9]))
    | (?P<number>{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})(?![0-9A-Za-z]))?
    | (?P<sign>\\frac(?![A-Za-z])|\\sqrt(?![A-Za-z])|[-+*/^(){{}}\[\]])
    )""",
    re.VERBOSE,
)
_LETTER, _DIGIT = re.compile(r"\s*[«A-Za-z]"), re.compile(r"\s*([0-9])")
_BASED = re.compile(r"([-+]?)\s*\(?([0-9A-Za-z]*[0-9][0-9A-Za-z]*|[A-F]{2,})\)?_\s*\{?\(?([0-9]{1,2})\)?\}?")
# Parts of a name with digits: the arguments in `f(2)`, the index in `a_{10}`.
_INDEX = re.compile(r"(?<=[A-Za-z])\s*(?:\([^()=]*\)|_\s*(?:[0-9]|\{[0-9]+\}))")
_NAME = re.compile(r"[\\A-Za-z(){}_,'«»+\s-]+")
_RELATION = re.compile(r"[<>≤≥≠!±]|\\(?:neq?|leq?|geq?|lt|gt|approx|pm|in|to|sim|equiv)(?![A-Za-z])")
_UNITS = re.compile(
    r"\s*(?:[/(]\s*)?(?:$|(?=[«]|[^\W\d_])(?:«[^»]*»|[^\W\d_]+(?![^\W\d_])|[\s.*()/-]|\^\s*\{?\s*-?[1-9]\s*\}?)*)"
)
_WORD = re.compile(r"«[^»]*»|(?P<word>[^\W\d_]+)")
_SCALE = re.compile(rf"\s*«?\s*({'|'.join(SCALES)})(?![A-Za-z])")
_PERCENT = re.compile(r"\s*(?:%|«?\s*per ?cent(?![A-Za-z]))")
# Units and words of fewer than four letters; others may be variables (`5xy`). One letter is a unit after a space.
_SHORT = re.compile(
    "[cmkdn]m|in|ft|yd|mi|[km]g|lbs?|oz|[mcd][lL]|gal|hrs?|min|m?sec|ms|[mkr]ph|rpm|USD|EUR|GBP|RMB|CNY|usd|[kM]?Hz|k?Pa"
    "|k[WJ]|sq|cu|deg|rad|mol|day|men|[ap]m|is|the|of|per|for|on|at|by|an|it"
)
_LETTERS = frozenset("mgshLlAVWJNKCF")
# Words that make another number of the one before them, or no number at all.
_OPERANDS = re.compile(
    r"(?<![A-Za-z])(?:hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?"
    r"|hundredths?|thousandths?|plus|minus|over|root|divided|pi|and|or|to|point|factorial|than|infinity|power|mod|modulo"
    r"|base|not|from|without|remainder|negative)(?![A-Za-z])|^[\s«]*(?:squared|cubed)"
)
_DOUBTFUL = re.compile(r"[0-9]\s+[0-9]|[0-9][)}]?\s*_|[0-9]\.[0-9]+\.[0-9]|\.\.|…|\\[lc]?dots|[0-9]\s*«[^»]*»\s*[0-9]")


@dataclass(frozen=True)
class Value:
    """Exact value of an answer.

    percent: a percent sign follows. name: what is said to equal it (`x = 5`), without spaces, or "".
    """

    number: Fraction
    percent: bool = False
    name: str = ""

    def equals(self, other: "Value") -> bool:
        """Test for equal values; a percentage equals its number and its hundredth."""
        if self.name and other.name and self.name != other.name:
            return False
        if self.percent and not other.percent:
            return self.number in (other.number, 100 * other.number)
        return other.equals(self) if other.percent and not self.percent else self.number == other.number


def read(answer: str) -> Value | None:
    """Read an answer as a value; None for anything else."""
    if len(answer) > MAX_LENGTH:
        return None
    text = plain(answer)
    if _RELATION.search(text):
        return None
    name, *between, right = text.split("=") if "=" in text else ("", text)
    name = _INDEX.sub("", name)
    given = _without_units(right)
    named = _NAME.fullmatch(name) is not None
    if given is None or any(_number(part) is None for part in [*between, *([] if named or not name else [name])]):
        return None
    return Value(given.number, given.percent, "".join(text.partition("=")[0].split()) if named else "")


def doubtful(answer: str) -> bool:
    """Test for numbers that only people can read.

    Examples: `1 2`, `101_two`, `3 and a half`, `2x = 10`.
    """
    if len(answer) > MAX_LENGTH:
        return True
    text = plain(answer)
    left = _INDEX.sub("", text.rpartition("=")[0])
    if _DOUBTFUL.search(text) or (re.search("[0-9]", left) and re.search("[A-Za-z]", left)):
        return True
    return bool(re.search("[0-9]", text) and _OPERANDS.search(text))


def plain(text: str) -> str:
    """Replace LaTeX's and typography's forms; words of a text command stand in «»."""
    text = typed(text).strip("* \n")
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    for _ in range(3):
        text = _WRAPPER.sub(_unwrapped, text)
    for form, replacement in _PLAIN:
        text = form.sub(replacement, text)
    return text.strip().rstrip(". ") if not text.rstrip().endswith("..") else text.strip()


def _unwrapped(found: re.Match[str]) -> str:
    content = found[1]
    worded = re.search(r"[^\W\d_]", content) and not re.search(r"[0-9«]", content)
    return f"«{content}»" if worded else content


def _without_units(text: str) -> Value | None:
    """Read a number, its scale, a percent sign, and units."""
    based = _BASED.fullmatch(text.strip())
    if based:
        return _in_base(*based.groups())
    reader = _Reader(text)
    number = reader.number()
    if number is None:
        return None
    rest = text[reader.end :]
    while scale := _SCALE.match(rest):
        number *= SCALES[scale[1]]
        rest = _after(scale, rest)
    percent = _PERCENT.match(rest)
    rest = _after(percent, rest) if percent else rest
    if not _UNITS.fullmatch(rest) or _OPERANDS.search(rest) or not all(map(_is_unit, _WORD.finditer(rest))):
        return None
    return Value(number, percent is not None)


def _after(found: re.Match[str], rest: str) -> str:
    """Return the text after a word, with a text command's words still in «»."""
    rest = rest[found.end() :].lstrip()
    return rest.removeprefix("»") if rest.startswith("»") or "«" not in found[0] else f"«{rest}"


def _is_unit(found: re.Match[str]) -> bool:
    word = found["word"]
    rest = found.string
    if word is None or len(word) > 3 or _SHORT.fullmatch(word) or not word.isascii():
        return True
    return word in _LETTERS and rest[: found.start()].endswith((" ", "/")) and not rest.lstrip().startswith("/")


def _in_base(sign: str, digits: str, base: str) -> Value | None:
    try:
        return Value(Fraction(int(sign + digits, int(base)))) if int(base) > 1 else None
    except ValueError:
        return None


def _number(text: str) -> Fraction | None:
    """Read a text that is arithmetic of numbers as a whole."""
    reader = _Reader(text)
    number = reader.number()
    return number if number is not None and not text[reader.end :].strip() else None


class _NotANumberError(Exception):
    """Raised where the text is no arithmetic."""


class _Reader:
    """Recursive descent over the beginning of a text.

    end: the first character that is not read.
    """

    def __init__(self, text: str):
        self._text = text
        self.end = 0
        self._depth = 0
        self._look()

    def number(self) -> Fraction | None:
        """Read a sum at the beginning of the text."""
        try:
            return self._sum()
        except (_NotANumberError, ZeroDivisionError):
            return None

    def _look(self) -> None:
        """Look at the next token: `_next`, "" at another character, and `_sign`."""
        self._next = _TOKEN.match(self._text, self.end)
        self._sign = (self._next and self._next["sign"]) or ""

    def _take(self, sign: str | None = None) -> re.Match[str]:
        if self._next is None or (sign is not None and self._sign != sign):
            raise _NotANumberError
        taken = self._next
        self.end = taken.end()
        self._look()
        return taken

    def _sum(self) -> Fraction:
        negative = self._signed()
        total = -self._product() if negative else self._product()
        while self._sign in ("+", "-") and not self._before_word():
            negative = self._take()["sign"] == "-"
            part = self._product()
            total = _small(total - part if negative else total + part)
        return total

    def _signed(self) -> bool:
        if self._sign in ("+", "-"):
            return self._take()["sign"] == "-"
        return False

    def _product(self) -> Fraction:
        total = self._power()
        while self._sign in ("*", "/", "(", "\\sqrt") and not self._before_word():
            division = self._sign == "/"
            if self._sign in ("*", "/"):
                self._take()
            part = -self._power() if self._signed() else self._power()
            total = _small(total / part if division else total * part)
        if self._sign == "\\frac" or (self._next and not self._sign):
            raise _NotANumberError  # two numbers side by side
        return total

    def _before_word(self) -> bool:
        """Test for a sign that belongs to units: `18/day`, `18 (days)`."""
        return self._next is not None and _LETTER.match(self._text, self._next.end()) is not None

    def _power(self) -> Fraction:
        base = self._atom()
        if self._sign != "^":
            return base
        self._take()
        exponent = self._group() if self._sign == "{" else -self._atom() if self._signed() else self._atom()
        if self._sign == "^" or abs(exponent.numerator) * (_bits(base) - 1) > MAX_BITS or exponent.denominator > 64:
            raise _NotANumberError
        return _root(base, exponent.denominator) ** exponent.numerator

    def _atom(self) -> Fraction:
        if self._sign == "(":
            text = self._text
            start = self.end
            inner = self._group("(", ")")
            if "," in text[start : self.end]:
                raise _NotANumberError  # (1,234) is a point or an interval
            return inner
        if self._sign == "{":
            return self._group()
        if self._sign == "\\frac":
            self._take()
            return self._argument() / self._argument()
        if self._sign == "\\sqrt":
            self._take()
            degree = self._group("[", "]") if self._sign == "[" else Fraction(2)
            if degree.denominator > 1 or not 1 < degree <= 64:
                raise _NotANumberError
            return _root(self._group("(", ")") if self._sign == "(" else self._argument(), int(degree))
        if self._sign:
            raise _NotANumberError
        number, whole = self._literal(self._take())
        if whole and self._sign == "\\frac":
            part = self._atom()
            if part < 0 or part.denominator == 1:
                raise _NotANumberError
            return number + part
        return number

    def _group(self, opening: str = "{", closing: str = "}") -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotANumberError
        self._take(opening)
        inner = self._sum()
        self._take(closing)
        self._depth -= 1
        return inner

    def _argument(self) -> Fraction:
        r"""Read a group, or the single digit that `\frac12` and `\sqrt2` take."""
        if self._sign == "{":
            return self._group()
        digit = _DIGIT.match(self._text, self.end)
        if not digit:
            raise _NotANumberError
        self.end = digit.end()
        self._look()
        return Fraction(digit[1])

    def _literal(self, found: re.Match[str]) -> tuple[Fraction, bool]:
        """Convert a number as written; True for a whole number of digits alone."""
        if found["whole"]:
            if found["part"].startswith("0"):  # 10 000/3
                return Fraction(int(found["whole"] + found["part"]), int(found["parts"])), False
            return Fraction(found["whole"]) + Fraction(int(found["part"]), int(found["parts"])), False
        if found["number"] is None:
            start = found["start"]
            period = found["period"] or found["digit"]
            below = Fraction(int(start + period) - int(start or 0), 10 ** len(start) * (10 ** len(period) - 1))
            return int(found["fixed"] or 0) + below, False
        text = found["number"].replace(",", "").replace(" ", "").rstrip(".")
        exponent = int(found["exponent"] or 0)
        return Fraction(text) * Fraction(10) ** exponent, text.isdecimal() and not exponent


def _small(number: Fraction) -> Fraction:
    if _bits(number) > 2 * MAX_BITS:
        raise _NotANumberError
    return number


def _bits(number: Fraction) -> int:
    return max(abs(number.numerator).bit_length(), number.denominator.bit_length())


def _root(number: Fraction, degree: int) -> Fraction:
    """Take a root that is a fraction."""
    if degree == 1:
        return number
    if number < 0:
        if degree % 2 == 0:
            raise _NotANumberError
        return -_root(-number, degree)
    return Fraction(_whole_root(number.numerator, degree), _whole_root(number.denominator, degree))


def _whole_root(number: int, degree: int) -> int:
    """Take an exact root by Newton's method from above."""
    root = 1 << -(-number.bit_length() // degree)
    while (lower := ((degree - 1) * root + number // root ** (degree - 1)) // degree) < root:
        root = lower
    if root**degree != number:
        raise _NotANumberError
    return root
