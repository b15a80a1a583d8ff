"""Cases of a test of which the default run takes a part, and `--slow` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(few: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """The values or tuples of both; those of `rest` are marked slow. `few` should have each value, and each edge."""
    return [*few, *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in rest)]
