"""Text that people can read: without control characters, and not too long."""

import unicodedata
from collections.abc import Container

LAYOUT = "\n\t\u200c\u200d"  # line ends, tabs, and the joiners that emoji and some scripts are written with
# Control characters, invisible formatting, halves of surrogate pairs, line and paragraph separators.
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str, keep: Container[str] = "") -> str:
    r"""Escape control characters: an escape character becomes `\u001b`.

    keep: characters that stay as they are, for example line ends.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _STEERING else f"\\u{ord(c):04x}" for c in text)


def shortened(text: str, most: int, space: str = "\n") -> str:
    """Shorten a text to its beginning and end, where answers stand."""
    if len(text) <= most:
        return text
    half = most // 2
    return space.join((text[:half], f"[... {len(text) - 2 * half} characters ...]", text[-half:]))
