"""Structs of `names.h`: the C++ operators' names of numbers and arrays."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

HEADER = Path(__file__).with_name("names.h")
NUMBERS = {"int32_t": np.int32, "float": np.float32}


@functools.cache
def structs() -> dict[str, dict[str, str]]:
    """Read each struct's members in their order, with their types."""
    found = {}
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", HEADER.read_text(), re.DOTALL | re.MULTILINE):
        members = (line.strip().rstrip(";").partition(" ") for line in body.splitlines())
        found[name] = {member.strip(): kind for kind, _, names in members for member in names.split(",")}
    return found


def members(struct: str) -> tuple[str, ...]:
    """List the members' names in their order."""
    return tuple(structs()[struct])


def filled(struct: str, values: Mapping[str, float]) -> np.ndarray:
    """Fill a struct of numbers by member names; returns its int32 words."""
    fields = structs()[struct]
    if fields.keys() != values.keys():
        raise ValueError(f"{struct} has {', '.join(fields)}; given are {', '.join(values)}")
    record = np.zeros(1, np.dtype([(name, NUMBERS[kind]) for name, kind in fields.items()]))
    for name, value in values.items():
        record[name] = value
    return record.view(np.int32)
