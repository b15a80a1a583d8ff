"""2,000 random pairs of spellings of numbers, against exact arithmetic on the numbers they were made from."""

import random
from fractions import Fraction

from mindrlhf.rewards.math import math

PAIRS = 2000
UNITS = (
    " dollars",
    r"\text{ cm}",
    " km/h",
    r"\,\text{m}^2",
    " apples",
    r"\text{ hours}",
    "°",
    r"^\circ",
    " per day",
    "元",
)


def grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


def whole(number: int, draw: random.Random) -> str:
    """A natural number in digits, with or without thousands apart."""
    return draw.choice([str(number), *(grouped(number, sign) for sign in (",", "{,}", r"\,", " ", "\u2009", r",\!"))])


def fraction(value: Fraction, draw: random.Random) -> str:
    factor = draw.choice([1, 1, 2, 3, 10])
    top, bottom = value.numerator * factor, value.denominator * factor
    forms = [f"{top}/{bottom}", f"{top} / {bottom}"]
    forms += [rf"\{name}{{{top}}}{{{bottom}}}" for name in ("frac", "dfrac", "tfrac", "cfrac")]
    forms += [rf"\frac{top}{bottom}"] if top < 10 and bottom < 10 else []
    forms += [rf"\frac{{\sqrt{{{top**2}}}}}{{{bottom}}}", rf"\sqrt{{\frac{{{top**2}}}{{{bottom**2}}}}}"]
    if value.denominator > 1 and value > 1:
        rest = value - int(value)
        a, b = rest.numerator * factor, rest.denominator * factor
        forms += [
            f"{int(value)} {a}/{b}",
            rf"{int(value)}\frac{{{a}}}{{{b}}}",
            rf"{int(value)}\,\dfrac{{{a}}}{{{b}}}",
        ] * 2
        forms += [rf"{int(value)}\ {a}/{b}"]
    return draw.choice(forms)


def decimal(value: Fraction, draw: random.Random) -> str:
    """A number of digits and a point; `value` has an end."""
    places = next(n for n in range(500) if (value * 10**n).denominator == 1)
    digits = str(value * 10**places).zfill(places + 1)
    left, right = (digits[:-places], digits[-places:]) if places else (digits, "")
    right += "0" * draw.choice([0, 0, 1, 2])
    left = whole(int(left), draw) if int(left) or draw.random() < 0.5 or not right else ""
    return f"{left}.{right}" if right else draw.choice([left, f"{left}.", f"0{left}" if left.isdigit() else left])


def scientific(value: Fraction, draw: random.Random) -> str:
    exponent = draw.randint(-12, 12) if value < 10**15 else len(str(int(value))) - 1
    exponent = draw.choice([exponent, -30]) if value < Fraction(1, 10**9) else exponent
    digits = decimal(value / Fraction(10) ** exponent, draw).rstrip(".")
    power = f"10^{{{exponent}}}"
    forms = [rf"{digits} \times {power}", rf"{digits}\cdot {power}", f"{digits}×10^{exponent}" if exponent >= 0 else ""]
    forms += [f"{digits}e{exponent}", f"{digits}E{exponent:+d}"] if digits.replace(".", "").isdigit() else []
    return draw.choice([form for form in forms if form])


def ended(value: Fraction) -> bool:
    """Whether the decimal digits of a fraction have an end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def spelled(value: Fraction, draw: random.Random) -> tuple[str, bool]:
    """A spelling of a value, and whether it is a percentage."""
    size = abs(value)
    ways = [fraction] if size.denominator < 10**6 and size < 10**9 else []
    ways += [decimal, decimal, scientific] if ended(size) else []
    percent = ended(size) and draw.random() < 0.08
    if percent:
        text = decimal(size * 100, draw) + draw.choice(["%", r"\%", " percent", r"\text{ percent}"])
    else:
        text = draw.choice(ways or [fraction])(size, draw)
    if value < 0:
        text = draw.choice(["-", "-", "\u2212", "- "]) + text
    elif draw.random() < 0.1:
        text = f"+{text}"
    if not percent and draw.random() < 0.15:
        text += draw.choice(UNITS)
    elif not percent and draw.random() < 0.1:
        text = draw.choice(
            [rf"\${text}", f"${text}$", rf"\({text}\)", f"x = {text}", rf"\mathbf{{{text}}}", f" {text} ."]
        )
    return text, percent


def drawn(draw: random.Random) -> Fraction:
    kind = draw.randrange(8)
    value = (
        Fraction(draw.randint(0, 20)),
        Fraction(draw.randint(1000, 10**7)),
        Fraction(draw.randint(1, 99), draw.randint(1, 99)),
        Fraction(draw.randint(1, 10**6), 10 ** draw.randint(1, 6)),
        Fraction(draw.randint(10**19, 10**21), 10 ** draw.choice([0, 5, 20])),
        Fraction(draw.randint(1, 99), 10**30),
        Fraction(draw.randint(1, 9) * 10**30),
        draw.randint(1, 30) + Fraction(draw.randint(1, 11), 12),
    )[kind]
    return -value if draw.random() < 0.3 else value


def near(value: Fraction, draw: random.Random) -> Fraction:
    """Another number that a careless reading takes for this one."""
    tiny = Fraction(1, 10**20) * (1 if value.denominator < 1000 and ended(value) else 0)
    return draw.choice(
        [
            *(value + 1, -value, value * 10, value / 10, value * 1000, value * 2),
            *(Fraction(int(value)), value - int(value), 1 / value if value else value + 2, value + tiny),
        ]
    )


def test_two_thousand_pairs_of_spellings():
    draw = random.Random(20261125)
    wrong, equal = [], 0
    for _ in range(PAIRS):
        first = drawn(draw)
        second = first if draw.random() < 0.5 else near(first, draw)
        (gold, gold_percent), (answer, percent) = spelled(first, draw), spelled(second, draw)
        ratio = {(True, False): 100 * first, (False, True): 100 * second}.get((gold_percent, percent))
        right = first == second or ratio == (second if gold_percent else first)  # 28% is also 28
        equal += right
        if math("", rf"The answer is \boxed{{{answer}}}.", {"ground_truth": gold}) != right:
            wrong.append((gold, answer, right))
    assert not wrong[:10]
    assert PAIRS / 3 < equal < PAIRS * 2 / 3
