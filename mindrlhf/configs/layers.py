"""Settings in layers: later layers win, and each value keeps its place."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import yaml

from mindrlhf.configs.yaml_file import NOT_YAML, KeyPath, Layer, dotted, parse
from mindrlhf.errors import UserError

COMMAND_LINE = "command line"


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge copies of groups key by key; other values, also lists, are replaced.

    An empty group (`optimizer:`, which YAML reads as null) changes nothing.
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and value is None:
            continue
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested groups; a list is one value."""
    if isinstance(value, Mapping):
        for part, below in value.items():
            yield from leaves(below, f"{key}.{part}" if key else str(part))
    else:
        yield key, value


def flatten(settings: Any, name: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted names with values as text; lists stay whole."""
    if isinstance(settings, Mapping) and settings:
        inner = [flatten(value, f"{name}.{key}" if name else str(key)) for key, value in settings.items()]
        return {key: value for group in inner for key, value in group.items()}
    return {name: "null" if settings is None else str(settings)} if name else {}


def merge(layers: Iterable[Layer], overrides: Iterable[str] = ()) -> Layer:
    """Merge settings in order, then apply dotted overrides (`group.key=value`).

    An override may reach into a list by index (`reward.functions.0.weight=2`); the index after the last appends.
    Raises UserError for an override that cannot be read or placed.
    """
    layers = list(layers)
    places = {}
    values: dict[str, Any] = {}
    for layer in layers:
        values = deep_merge(values, layer.values)
    values = copy.deepcopy(values)
    for text in overrides:
        path, value = parse_override(text)
        path = _put(values, path, value)
        for part in reversed(path):
            value = {part: value}
        layers.append(Layer(value, {path[:depth]: COMMAND_LINE for depth in range(len(path) + 1)}))
    for layer in layers:
        places = {path: place for path, place in places.items() if not _hides(layer.values, path)} | layer.places
    return Layer(values, places)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse `group.key=value` to (("group", "key"), value). Raises UserError."""
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"{COMMAND_LINE}: override {text!r} cannot be read; write group.key=value.")
    try:
        return path, parse(raw)[0]
    except NOT_YAML:
        raise UserError(f"{COMMAND_LINE}: override {text!r} is not valid YAML; put special signs in quotes.") from None


def write_override(key: str, value: Any) -> str:
    """Write `group.key=value`, which `parse_override` reads."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n")
    return f"{key}={text.strip()}"


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> KeyPath:
    """Set `value` at `path`, making groups; returns the path with list indices as numbers."""
    target: Any = values
    placed: KeyPath = ()
    for part, after in pairwise((*path, None)):
        if isinstance(target, list):
            count = len(target)
            if not part.isdecimal() or int(part) > count:
                found = (
                    f"{COMMAND_LINE}: override {dotted(path)} has {part!r} where {dotted(placed)} is a list of {count}"
                )
                raise UserError(f"{found}; give an index from 0 to {count} ({count} appends).")
            part = int(part)
            target.extend([None] * (part + 1 - count))
        elif isinstance(target, dict):
            target.setdefault(part)
        else:
            above = dotted(placed)
            found = f"{COMMAND_LINE}: override {dotted(path)} goes into {above}, which is a value and no group"
            raise UserError(f"{found}; write {above}=value.")
        placed = (*placed, part)
        if after is None:
            target[part] = value
        elif target[part] is None:
            target[part] = {}
        target = target[part]
    return placed


def _hides(values: Any, path: KeyPath) -> bool:
    """Tell whether a layer has a value or a list above a path."""
    for part in path:
        if not isinstance(values, Mapping):
            return values is not None
        values = values.get(part)
    return False
