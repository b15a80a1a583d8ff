"""Results of tools as the texts that a model reads."""

import json
import sys
from collections.abc import Set
from datetime import date, time
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID


def result_text(result: Any) -> str:
    """Write a tool's result: text as it is, anything else as JSON.

    A tuple or a set is a list there, numbers and arrays of NumPy are numbers and lists, dates, decimal numbers and
    paths are texts. Raises TypeError for a value without a JSON form.
    """
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_in_json)


def _in_json(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, Decimal | Fraction | date | time | UUID | PurePath):
        return str(value)
    raise TypeError(f"it returned {type(value).__name__}, and not text")
