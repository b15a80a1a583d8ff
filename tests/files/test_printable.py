"""Text for a terminal."""

import pytest

from mindrlhf.errors import MOST_CHARACTERS, UserError
from mindrlhf.files.printable import printable


@pytest.mark.parametrize("text", ["plain", "déjà vu", "快速上手　全角", "a b", "🙂", ""])
def test_ordinary_text_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\u001b[31mred"),
        ("\x9b2J", "\\u009b2J"),
        ("a\nb\tc", "a\\u000ab\\u0009c"),
        ("\u202eabc", "\\u202eabc"),
        ("\u2028", "\\u2028"),
        ("a\ud800b", "a\\ud800b"),
        ("\x7f", "\\u007f"),
    ],
)
def test_what_steers_a_terminal_becomes_a_code(text, shown):
    assert printable(text) == shown


def test_some_characters_may_stay():
    assert printable("a\nb\x1b", keep="\n\t") == "a\nb\\u001b"


def test_a_mistake_is_one_readable_line_whatever_it_quotes():
    assert str(UserError("--out a\nb\x1b[2J: is no folder.")) == "--out a\\u000ab\\u001b[2J: is no folder."
    long = str(UserError(f"key is {'x' * 70_000}, and must be a number."))
    assert len(long) < MOST_CHARACTERS + 40
    assert long.startswith("key is xxx")
    assert long.endswith("xxx, and must be a number.")
