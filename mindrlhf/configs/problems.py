"""Pydantic's errors as one sentence each: value, place, and remedy."""

import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mindrlhf.configs.base import BOUNDS, Settings, is_group
from mindrlhf.configs.yaml_file import KeyPath, Layer, dotted, not_finite
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest

Group = TypeVar("Group", bound=Settings)
# (settings, unknown dotted key, its value) -> words with our name for it, if it is another suite's.
OtherNames = Callable[[type[Settings], str, Any], str | None]

WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", dict: "a group of keys"}


def build(
    settings: type[Group],
    values: Mapping[str, Any],
    layer: Layer,
    written: Mapping[str, KeyPath] | None = None,
    strict: bool = True,
    other_names: OtherNames | None = None,
) -> Group:
    """Validate a nested mapping; a UserError explains a failure in one sentence.

    An unknown key is reported first.
    layer: has the place of each value.
    written: field of `settings` -> the key path under which the user wrote it, if it differs.
    strict: convert only whole numbers to floats and lists to tuples; if False, all that pydantic converts.
    other_names: explains keys that are another suite's.
    """
    if (path := not_finite(values)) is not None:
        shown = (*(written or {}).get(path[0], path[:1]), *path[1:])
        _, annotation, info = _walk(settings, path)
        right = f", {expected(annotation, info)}" if annotation else ""
        found = brief(reduce(getitem, path, values))
        raise UserError(f"{layer.where(shown)}: {dotted(shown)} is {found}, and must be finite{right}.")
    try:
        # JSON mode is pydantic's only strict mode that takes a list for a tuple.
        text = json.dumps(values, default=str) if strict else ""
        return settings.model_validate_json(text, strict=True) if strict else settings.model_validate(values)
    except ValidationError as error:
        raise UserError(_explained(settings, error, values, layer, written or {}, other_names)) from None


def _explained(
    settings: type[Settings],
    error: ValidationError,
    values: Mapping[str, Any],
    layer: Layer,
    written: Mapping[str, KeyPath],
    other_names: OtherNames | None,
) -> str:
    findings = error.errors(include_url=False, include_context=False)
    finding = min(findings, key=lambda one: one["type"] != "extra_forbidden")
    path, annotation, info = _walk(settings, finding["loc"])
    shown = (*written[path[0]], *path[1:]) if path and path[0] in written else path
    key = dotted(shown)
    place = layer.where(shown)
    if finding["type"] == "extra_forbidden":
        return f"{place}: {_unknown_key(settings, path, key, reduce(getitem, path, values), other_names)}"
    if finding["type"] == "value_error":
        message = finding["msg"].removeprefix("Value error, ")
        return f"{place}: {key}: {message}." if key else f"{place}: {message}."
    right = expected(annotation, info)
    if finding["type"] == "missing":
        return f"{place}: {key} is missing, and must be {right}."
    return f"{place}: {key} is {brief(reduce(getitem, path, values))}, and must be {right}."


def unknown_name(name: str, own: Iterable[str], prefix: str = "", also: Iterable[str] = ()) -> str:
    """Explain that a group lacks a key, with the nearest of `own` and `also`."""
    dot = f"{prefix}." if prefix else ""
    near = nearest(name, {*own, *also})
    hint = f"did you mean {dot}{near}?" if near else f"known here are {', '.join(sorted(own))}."
    return f"unknown key {dot}{dotted((name,))}; {hint}"


def expected(annotation: Any, info: FieldInfo | None = None) -> str:
    """Describe a right value: `a whole number, at least 1`, `one of 'a', 'b'`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return expected(args[0], next((item for item in args if isinstance(item, FieldInfo)), info))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expected(part, info) for part in args if part is not type(None))
    if origin is typing.Literal:
        return repr(args[0]) if len(args) == 1 else f"one of {', '.join(map(repr, args))}"
    filled = ", not empty" if info and any(getattr(item, "min_length", None) for item in info.metadata) else ""
    if origin is tuple:
        return f"a list (each entry {expected(args[0])}){filled}"
    if origin is dict and args[1] is not Any:
        return f"{WORDS[dict]} (each {expected(args[1])})"
    if is_group(annotation):
        return WORDS[dict]
    words = WORDS.get(origin or annotation, "a value") + filled
    if annotation in (int, float) and info:
        limits = [(text, getattr(item, sign, None)) for sign, text in BOUNDS.items() for item in info.metadata]
        bounds = [f"{text} {number(limit)}" for text, limit in limits if limit is not None]
        words += f", {' and '.join(bounds)}" if bounds else ""
    if annotation is str and info and info.examples:
        words += f" like {' or '.join(map(repr, info.examples))}"
    return words


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def brief(value: Any) -> str:
    """Format a value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown_key(settings: type[Settings], path: KeyPath, key: str, value: Any, other_names: OtherNames | None) -> str:
    """Explain an unknown key: its group, or our name for another suite's."""
    name = str(path[-1])
    elsewhere = [leaf for leaf in _leaves(settings) if leaf.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown key {key}; did you mean {elsewhere[0]}?"
    if other_names and (ours := other_names(settings, key, value)):
        return f"{ours}."
    _, annotation, _ = _walk(settings, path[:-1])
    group = _group_of(annotation).model_fields
    leaves = {leaf.rpartition(".")[2]: leaf for leaf in reversed([*_leaves(settings)])}
    if not nearest(name, group) and (near := nearest(name, leaves, cutoff=0.8)):
        return f"unknown key {key}; did you mean {leaves[near]}?"
    return unknown_name(name, group, key.rpartition(".")[0])


def _group_of(annotation: Any) -> type[Settings] | None:
    return next(filter(is_group, (annotation, *typing.get_args(annotation))), None)


def _walk(settings: type[Settings], location: KeyPath) -> tuple[KeyPath, Any, FieldInfo | None]:
    """Follow pydantic's location to (key path, annotation, field), both None for an unknown key.

    Pydantic appends the tag of a union's member to a location. The tag is not a key, so the walk ends before it.
    """
    path: KeyPath = ()
    annotation: Any = settings
    info: FieldInfo | None = None
    for part in location:
        group = _group_of(annotation)
        if typing.get_origin(annotation) is tuple:
            annotation = typing.get_args(annotation)[0]
            info = None
        elif group:
            info = group.model_fields.get(part)
            annotation = info.annotation if info else None
        else:
            break
        path = (*path, part)
    return path, annotation, info


def _leaves(settings: type[Settings], prefix: str = "") -> Iterator[str]:
    for name, info in settings.model_fields.items():
        yield prefix + name
        if is_group(info.annotation):
            yield from _leaves(info.annotation, f"{prefix}{name}.")
