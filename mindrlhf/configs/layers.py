"""Settings in layers: later ones win, and each value knows its origin."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.configs.yaml_file import NOT_YAML, KeyPath, Layer, dotted, parse
from mindrlhf.errors import UserError

COMMAND_LINE = "command line"


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge copies: groups key by key, all else, lists too, replaced whole.

    A group with nothing below it (`optimizer:`, which YAML reads as null) says nothing.
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and value is None:
            continue
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


@dataclass(frozen=True)
class Layered:
    """Merged settings (`values`, nested) with the layers they come from, in order."""

    values: Mapping[str, Any]
    layers: tuple[Layer, ...]

    def where(self, path: KeyPath) -> str:
        """Find the place of the value at `path`, or of the nearest group above."""
        found = []
        for layer in reversed(self.layers):
            depth, hides = _reach(layer.values, path)
            found.append((depth, layer))
            if hides:
                break
        depth, layer = max(found, key=lambda one: one[0])
        return layer.where(path[:depth])


def merge(layers: Iterable[Layer], overrides: Iterable[str] = ()) -> Layered:
    """Merge settings in order, then apply dotted overrides (`group.key=value`).

    An override may reach into a list by index (`reward.functions.0.weight=2`); the index after the last appends.
    Raises UserError for an override that cannot be read or placed.
    """
    kept = list(layers)
    values: dict[str, Any] = {}
    for layer in kept:
        values = deep_merge(values, layer.values)
    values = copy.deepcopy(values)
    for text in overrides:
        path, value = parse_override(text)
        for part in reversed(_put(values, path, value)):
            value = {part: value}
        kept.append(Layer(COMMAND_LINE, value))
    return Layered(values, tuple(kept))


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse `group.key=value` to (("group", "key"), value). Raises UserError."""
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"{COMMAND_LINE}: override {text!r} cannot be read; write group.key=value.")
    try:
        return path, parse(raw)[0]
    except NOT_YAML:
        raise UserError(
            f"{COMMAND_LINE}: the value of override {text!r} is not valid YAML; put text with special signs in quotes."
        ) from None


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> KeyPath:
    """Set `value` at `path`, making groups; returns the path with list indices as numbers."""
    target: Any = values
    placed: list[str | int] = []
    for depth, name in enumerate(path, 1):
        whole, above = dotted(path), dotted(path[: depth - 1])
        part: str | int = name
        if isinstance(target, dict):
            target.setdefault(part)
        elif not isinstance(target, list):
            raise UserError(
                f"{COMMAND_LINE}: override {whole} goes into {above}, which is a value and no group; write "
                f"{above}=value."
            )
        elif not name.isdecimal() or int(name) > len(target):
            raise UserError(
                f"{COMMAND_LINE}: override {whole} has {name!r} where {above} is a list of {len(target)}; give an "
                f"index from 0 to {len(target)} ({len(target)} appends)."
            )
        else:
            part = int(name)
            target += [None] * (part == len(target))
        placed.append(part)
        if depth == len(path):
            target[part] = value
        elif target[part] is None:
            target[part] = {}
        target = target[part]
    return tuple(placed)


def _reach(values: Any, path: KeyPath) -> tuple[int, bool]:
    """Count the parts of `path` in a layer; test for hidden lower layers.

    A list on the way, or a value in place of a group, does.
    """
    hides = False
    for depth, part in enumerate(path):
        if isinstance(values, list):
            values, hides = dict(enumerate(values)), True
        if not isinstance(values, Mapping):
            return depth, values is not None
        if part not in values:
            return depth, hides
        values = values[part]
    return len(path), hides
