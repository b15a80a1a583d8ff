"""Values of other libraries as Python's: numbers of NumPy, arrays, missing values."""

from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np


def plain(value: Any, kept: tuple[type, ...] = ()) -> Any:
    """Return a value as Python's own, also inside of lists and groups.

    NumPy's numbers become Python's, arrays become lists, and whatever stands for a missing value (NaN, NaT, pandas' NA)
    becomes None. kept: classes whose objects stay as they are. Raises ValueError for an object of another kind, and for
    halves of surrogate pairs.
    """
    if value is None or isinstance(value, kept):
        return value
    if isinstance(value, str):
        return _character_text(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one, kept) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, kept) for one in value]
    if isinstance(value, np.ndarray):
        return [plain(one, kept) for one in value] if value.ndim else plain(value[()])
    if isinstance(value, np.datetime64 | np.timedelta64):  # Python's have microseconds
        return plain(value.astype(f"{value.dtype.kind}8[us]").item())
    if isinstance(value, np.generic):
        return plain(float(value) if isinstance(value, np.floating) else value.item())
    if _is_missing(value):
        return None
    if isinstance(value, Decimal | int | float | date | time | timedelta | bytes):
        return value
    raise ValueError(f"is a {type(value).__name__}; give text, numbers, dates, lists or groups")


def _character_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no character; remove it") from None
    return str.__str__(text)


def _is_missing(value: Any) -> bool:
    if isinstance(value, Decimal):
        return value.is_nan()
    return type(value).__name__ == "NAType" or (isinstance(value, float | date | timedelta) and value != value)
