"""Text of files, and texts for people."""

import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindrlhf.errors import UserError


def read_text(path: str | Path, kind: str) -> str:
    """Read a UTF-8 file; `kind` is the right file in words, for messages."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give the path of {kind}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text; give {kind}.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give {kind} that can be read.") from None


def is_there(path: Path) -> bool:
    """Test for a file, a folder or a link, also one to nowhere."""
    return path.exists() or path.is_symlink()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors about reading a file into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def some(names: Sequence[str], most: int = 1) -> str:
    """List the first names and count the others: `a and 2 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that is most like a mistaken one, or None."""
    return next(iter(difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=cutoff)), None)


def folded(text: str, indent: int) -> str:
    """Break long lines between words at a terminal's width.

    indent: spaces before the rest of a line. Outside of a terminal the text stays as it is.
    """
    width = shutil.get_terminal_size((0, 0)).columns
    if width <= 2 * indent:
        return text
    rules = {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join("\n".join(textwrap.wrap(line, width, **rules)) for line in text.split("\n"))


def aligned(rows: Iterable[Sequence[object]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *right)))
    return "\n".join(lines)


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Name one thing by its number, or several consecutive ones."""
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]} to {numbers[-1]}"
