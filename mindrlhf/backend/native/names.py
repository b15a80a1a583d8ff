"""Names in C++: entry points of operators, and structs of `names.h`."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

HEADER = Path(__file__).with_name("names.h")
# Macro that defines an operator's entry points -> dtypes of the products that they are for.
MACROS = {
    "ENTRY_POINT": ("float32",),
    "ENTRY_POINTS": ("float32", "bfloat16"),
    "DECODE_ENTRY_POINTS": ("float32", "bfloat16", "int8"),
}
NUMBERS = {"int32_t": np.int32, "float": np.float32}


@functools.cache
def structs() -> dict[str, dict[str, str]]:
    """Read each struct's members in their order, with their types."""
    found = {}
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", HEADER.read_text(), re.DOTALL | re.MULTILINE):
        members = (line.strip().rstrip(";").partition(" ") for line in body.splitlines())
        found[name] = {member.strip(): kind for kind, _, names in members for member in names.split(",")}
    return found


@functools.cache
def entry_points() -> dict[str, tuple[str, ...]]:
    """Read the operators that the headers declare, with their dtypes."""
    text = "".join(path.read_text() for path in sorted(HEADER.parent.glob("*.h")))
    return {name: MACROS[macro] for macro, name in re.findall(r"^(\w*ENTRY_POINTS?)\((\w+)\)", text, re.MULTILINE)}


def halves() -> set[str]:
    """Collect the halves of layers that C++ computes, by their names in `models.layer`."""
    return {name.removesuffix("_half_gradient") for name in entry_points() if name.endswith("_half_gradient")}


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
