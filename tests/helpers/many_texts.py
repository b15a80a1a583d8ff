"""Texts of many kinds for comparisons of tokenizers: prose, code, numbers, scripts of the world, control tokens."""

import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPACES = ("", " ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "   \n\n  ", "\u00a0", "\u3000")
WORDS = (
    "it's",
    "I'LL",
    "they've",
    "don't",
    "Hello",
    "naïve",
    "straße",
    "Übermut",
    "x",
    "_",
    "3.14",
    "1000000",
    "٣٤",
    "Ⅻ",
)


def many_texts(count: int, special: Sequence[str], seed: int = 0, composed: bool = False) -> list[str]:
    """So many seeded texts; `special` tokens are in every fourth. composed: in the normal form NFC."""
    draw = random.Random(seed)
    lines = [line for file in sorted(ROOT.glob("mindrlhf/*/*.py"))[:60] for line in file.read_text().splitlines()]
    lines += (ROOT / "docs" / "zh" / "quickstart.md").read_text(encoding="utf-8").splitlines()
    letters = [
        chr(code) for code in range(32, sys.maxunicode) if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")
    ]
    kinds = (
        lambda: draw.choice(lines),
        lambda: "".join(draw.choices(letters, k=draw.randrange(1, 12))),
        lambda: "".join(chr(draw.randrange(32, 0x500)) for _ in range(draw.randrange(1, 30))),
        lambda: "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randrange(1, 8))),
        lambda: "".join(draw.choice("0123456789.,+-*/=()[]{}<>|~^$`'\"!?;: \n") for _ in range(draw.randrange(1, 30))),
        lambda: "\n".join(draw.choices(lines, k=4)),
    )
    texts = []
    for number in range(count):
        parts = [draw.choice(kinds)() for _ in range(draw.randrange(1, 4))]
        if special and number % 4 == 0:
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(special))
        text = draw.choice(SPACES).join(parts)
        texts.append(unicodedata.normalize("NFC", text) if composed else text)
    return texts
