"""Reader for untrusted JSON text, with one kind of error."""

import json
import sys
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 200  # of lists and groups inside each other: what writes values again goes no deeper

_DECODER = json.JSONDecoder()


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises ValueError for broken syntax, endless nesting and numbers of endless length.
    Broken syntax is a json.JSONDecodeError, with its place; bytes that are not UTF-8 are a UnicodeDecodeError.
    """
    return _read(lambda: (json.loads(text), 0))[0]


def parse_json_at(text: str, position: int) -> tuple[Any, int]:
    """Parse the JSON at a position of a text; returns (value, end position).

    Errors as `parse_json`.
    """
    return _read(lambda: _DECODER.raw_decode(text, position))


def is_number(value: Any) -> bool:
    """Test that a JSON value is a finite number within float64.

    True and False, NaN and infinities are not.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _read(parse: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
    deep = ValueError(f"lists and groups more than {MOST_LEVELS} levels deep")
    try:
        value, end = parse()
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise deep from None
    except ValueError:  # Python's limit, whose message is advice to programmers
        raise ValueError("a number with thousands of digits") from None
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for group in level for inner in _inside(group)]
        if not level:
            return value, end
    raise deep


def _inside(value: Any) -> list[Any]:
    """List the lists and groups that a list or group holds."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]
