"""Values of a row's columns as texts, and back with their types.

Texts are what files and processes carry. A text stands for itself, a decimal, a date or bytes for what it spells, and
everything else is JSON. `json_fields` names the types of the other columns: {"level": "json", "price": "decimal",
"source": "none"}; earlier files have a list of those that are JSON. Imports only the standard library.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

JSON_FIELDS = "json_fields"  # field of a row: the types of its other fields, as JSON
JSON, ABSENT = "json", "none"
TYPE, TEXT = "$type", "$text"  # of a value inside JSON that JSON has no form for
PAIRS = "pairs"  # type of a group with other keys than texts

# name -> (class, its text, the value of a text); a datetime is a date too, so it comes first
_TYPES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "microseconds": (
        timedelta,
        lambda span: str(span // timedelta(microseconds=1)),
        lambda text: timedelta(microseconds=int(text)),
    ),
    "base64": (bytes, lambda content: base64.b64encode(content).decode(), base64.b64decode),
}


def encode(values: Mapping[str, Any]) -> dict[str, str]:
    """Write values as texts, with their types in `json_fields`."""
    texts = {}
    types = {}
    for name, value in values.items():
        kind = None if isinstance(value, str) else ABSENT if value is None else _type_of(value) or JSON
        if kind is not None:
            types[name] = kind
        if value is not None:
            texts[name] = value if kind is None else json_text(value) if kind == JSON else _TYPES[kind][1](value)
    return texts | ({JSON_FIELDS: json.dumps(types)} if types else {})


def decode(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that `encode` has written."""
    types = _types(fields)
    if not types:
        return {name: text for name, text in fields.items() if name != JSON_FIELDS}
    absent = {name: None for name, kind in types.items() if kind == ABSENT}
    return absent | {name: _decoded(text, types.get(name)) for name, text in fields.items() if name != JSON_FIELDS}


def value_of(fields: Mapping[str, str], name: str) -> Any:
    """Return one value with its type; KeyError for a row without it."""
    return _decoded(fields[name], _types(fields).get(name))


def json_text(value: Any) -> str:
    """Write a value as JSON, tagged where JSON has no form."""
    return json.dumps(json_ready(value, tags=True), ensure_ascii=False)


def json_ready(value: Any, tags: bool = False) -> Any:
    """Return a value in JSON's types; others become texts, with their types if tagged."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [json_ready(one, tags) for one in value]
    if isinstance(value, Mapping):
        named = all(isinstance(key, str) for key in value) and TYPE not in value
        if named or not tags:
            return {str(key): json_ready(one, tags) for key, one in value.items()}
        return {TYPE: PAIRS, TEXT: [[json_ready(key, tags), json_ready(one, tags)] for key, one in value.items()]}
    kind = _type_of(value)
    if kind is None:
        raise ValueError(f"{type(value).__name__} has no text")
    text = _TYPES[kind][1](value)
    return {TYPE: kind, TEXT: text} if tags else text


def _types(fields: Mapping[str, str]) -> dict[str, str]:
    if JSON_FIELDS not in fields:  # without a look into JSON, because it is asked for each sample
        return {}
    types = json.loads(fields[JSON_FIELDS])
    return types if isinstance(types, dict) else dict.fromkeys(types, JSON)


def _decoded(text: str, kind: str | None) -> Any:
    if kind is None:
        return text
    return _no_nan(json.loads(text, object_hook=_untagged)) if kind == JSON else _TYPES[kind][2](text)


def _no_nan(value: Any) -> Any:
    """Replace a NaN, which earlier files may have, by None."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _type_of(value: Any) -> str | None:
    return next((name for name, (kind, _, _) in _TYPES.items() if isinstance(value, kind)), None)


def _untagged(group: dict[str, Any]) -> Any:
    if set(group) != {TYPE, TEXT}:
        return group
    kind = group[TYPE]
    text = group[TEXT]
    return dict(map(tuple, text)) if kind == PAIRS else _TYPES[kind][2](text)
