"""Collection of different made-up problems."""

from collections.abc import Callable, Hashable
from typing import Any

from mindrlhf.errors import UserError

MISSES = 300  # draws in a row without a new problem after which there are taken to be no more


def distinct(count: int, draw: Callable[[], tuple[Hashable, dict[str, Any]] | None], kind: str) -> list[dict[str, Any]]:
    """Draw `count` rows with different keys, in the order of drawing.

    draw: gives (key, source row), or None when a draw came to nothing. UserError when new ones stop coming.
    """
    rows: dict[Hashable, dict[str, Any]] = {}
    misses = 0
    while len(rows) < count:
        drawn = draw()
        if drawn is not None and drawn[0] not in rows:
            rows[drawn[0]] = drawn[1]
            misses = 0
            continue
        misses += 1
        if misses == MISSES:
            raise UserError(
                f"{count} different {kind} problems are asked for, and there are about {len(rows)} with these numbers: "
                "raise --max_number or lower the sizes."
            )
    return list(rows.values())
