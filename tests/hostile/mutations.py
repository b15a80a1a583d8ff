"""Seeded damage to files: bytes, places in the file system, and values inside JSON and YAML.

Every function takes the random numbers and the file, changes the file in place, and says in a few words what it did.
"""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mindrlhf.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredFile, describe
from mindrlhf.data.mindrecord import read_columns, read_schema, write_columns

Mutation = Callable[[random.Random, Path], str]

DEEP = 100_000  # brackets, far more than any reader's stack
ESCAPES = "\x1b[31mred\x1b[0m\x07\x9b2J"
# Values as JSON text, because some have no JSON value: NaN, numbers of 5,000 digits, halves of surrogate pairs.
ODD_VALUES = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "minus a half": "-0.5",
    "10**30": "1" + "0" * 30,
    "2**63": str(2**63),
    "5,000 digits": "7" * 5000,
    "1e999": "1e999",
    "denormal": "1e-320",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "YAML's NaN": ".nan",
    "empty text": '""',
    "text": '"twelve"',
    "number as text": '"12"',
    "long text": json.dumps("x" * 70_000),
    "escape codes": json.dumps(ESCAPES),
    "half a surrogate pair": '"a\\ud800b"',
    "NUL": '"a\\u0000b"',
    "two lines": '"first\\nsecond"',
    "outside": '"../outside"',
    "right to left": '"\\u202eabc"',
    "empty list": "[]",
    "list": "[1, [2, null]]",
    "empty group": "{}",
    "group": '{"a": {"b": 1}}',
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep group": '{"a":' * DEEP + "1" + "}" * DEEP,
}
ODD_KEYS = ("", "unknown", ESCAPES, "a.b", "\ud800", "../outside", "__class__", "0")
FOREIGN = (
    b"\x89PNG\r\n\x1a\n" + bytes(40),
    b"\x7fELF" + bytes(60),
    b"PK\x03\x04" + bytes(30),
    b"\x1f\x8b\x08" + b"q" * 50,
)


def _span(rng: random.Random, size: int, most: int = 64) -> tuple[int, int]:
    start = rng.randrange(size)
    return start, min(size, start + rng.randint(1, most))


def _bytes(name: str, change: Callable[[random.Random, bytes], bytes]) -> Mutation:
    def mutate(rng: random.Random, file: Path) -> str:
        content = file.read_bytes()
        if content:
            file.write_bytes(change(rng, content))
        return name

    return mutate


def _flip(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 4, 16))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _zeros(rng: random.Random, content: bytes) -> bytes:
    start, stop = _span(rng, len(content), 512)
    return content[:start] + bytes(stop - start) + content[stop:]


def _noise(rng: random.Random, content: bytes) -> bytes:
    start, stop = _span(rng, len(content))
    return content[:start] + rng.randbytes(stop - start) + content[stop:]


def _swap(rng: random.Random, content: bytes) -> bytes:
    first, second = sorted(rng.randrange(len(content)) for _ in range(2))
    changed = bytearray(content)
    changed[first], changed[second] = changed[second], changed[first]
    return bytes(changed)


def _remove(rng: random.Random, content: bytes) -> bytes:
    start, stop = _span(rng, len(content))
    return content[:start] + content[stop:]


def _repeat(rng: random.Random, content: bytes) -> bytes:
    start, stop = _span(rng, len(content), 512)
    return content[:stop] + content[start:stop] + content[stop:]


def _insert(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    return (
        content[:start]
        + rng.choice((b"\xff", b"\0", b"\x1b[31m", b"\xed\xa0\x80", b"[" * 5000, b"{}"))
        + content[start:]
    )


def _encoded(encoding: str, prefix: str = "") -> Callable[[random.Random, bytes], bytes]:
    return lambda rng, content: (prefix + content.decode("latin-1") + "é").encode(encoding, "replace")


def _folder(rng: random.Random, file: Path) -> str:
    file.unlink()
    file.mkdir()
    return "a folder in place of the file"


def _nowhere(rng: random.Random, file: Path) -> str:
    file.unlink()
    target = rng.choice(("no/such/file", file.name))
    file.symlink_to(target)
    return f"a symbolic link to {'itself' if target == file.name else 'nowhere'}"


def _missing(rng: random.Random, file: Path) -> str:
    file.unlink()
    return "missing"


def _forbidden(rng: random.Random, file: Path) -> str:
    os.chmod(file, 0)
    return "no permission"


CORRUPTIONS: tuple[Mutation, ...] = (
    *(_bytes("cut", lambda rng, content: content[: rng.randrange(len(content))]) for _ in range(3)),
    *(_bytes("flipped bits", _flip) for _ in range(3)),
    _bytes("zeros", _zeros),
    _bytes("noise", _noise),
    _bytes("two bytes swapped", _swap),
    _bytes("bytes removed", _remove),
    _bytes("bytes repeated", _repeat),
    _bytes("bytes inserted", _insert),
    _bytes("the first byte gone", lambda rng, content: content[1:]),
    _bytes("the last byte gone", lambda rng, content: content[:-1]),
    _bytes("empty", lambda rng, content: b""),
    _bytes("white space", lambda rng, content: b" \n\n"),
    _bytes("another format", lambda rng, content: rng.choice(FOREIGN)),
    _bytes("UTF-16", _encoded("utf-16")),
    _bytes("Latin-1", _encoded("latin-1")),
    _bytes("a byte order mark", lambda rng, content: b"\xef\xbb\xbf" + content),
    _bytes("half a surrogate pair in UTF-8", lambda rng, content: content[:40] + b"\xed\xa0\x80" + content[40:]),
    _bytes("old Mac's line ends", lambda rng, content: content.replace(b"\n", b"\r")),
    _bytes("deep brackets", lambda rng, content: b"[" * DEEP),
    _folder,
    _nowhere,
    _missing,
    _forbidden,
)


def odd_value(rng: random.Random, file: Path) -> str:
    """Replace, remove, add or rename a value or key of a JSON, JSONL or YAML file."""
    lines = file.read_text(encoding="utf-8").split("\n")
    whole = file.suffix in (".json", ".yaml")
    number = 0 if whole else rng.randrange(max(1, len([line for line in lines if line])))
    document = yaml.safe_load(file.read_text(encoding="utf-8")) if whole else json.loads(lines[number])
    path, parent, key = _place(rng, document)
    kind = rng.choice(("replace", "replace", "replace", "replace", "remove", "add", "rename", "wrap", "root"))
    name, raw = rng.choice(list(ODD_VALUES.items()))
    done = f"{path}: {name}"
    mark = "@@odd@@"
    if kind == "root":
        document, done = mark, f"the whole: {name}"
    elif kind == "remove":
        del parent[key]
        done = f"{path} removed"
    elif kind == "add" and isinstance(parent, dict):
        added = rng.choice(ODD_KEYS)
        parent[added] = mark
        done = f"{added!r} added to the group of {path}: {name}"
    elif kind == "rename" and isinstance(parent, dict):
        renamed = rng.choice((*ODD_KEYS, key.upper(), f"{key}s"))
        parent[renamed] = parent.pop(key)
        done = f"{path} renamed to {renamed!r}"
    elif kind == "wrap":
        parent[key] = [parent[key]]
        done = f"{path} wrapped in a list"
    else:
        parent[key] = mark
    text = json.dumps(document).replace(json.dumps(mark), raw)
    if whole:
        file.write_text(text, encoding="utf-8")
    else:
        lines[number] = text
        file.write_text("\n".join(lines), encoding="utf-8")
        done = f"line {number + 1}, {done}"
    return done


def odd_header(rng: random.Random, file: Path) -> str:
    """An odd value in the JSON header of a safetensors file, whose length stays right."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = file.with_suffix(".json")
    header.write_bytes(content[8 : 8 + length])
    done = odd_value(rng, header)
    changed = header.read_bytes()
    header.unlink()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    return done


def odd_state(rng: random.Random, file: Path) -> str:
    """An odd value in a checkpoint's state.json, with a manifest that fits it."""
    done = odd_value(rng, file)
    manifest = file.parent / MANIFEST_FILE
    content = json.loads(manifest.read_text())
    files = {name: StoredFile(entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
    Manifest(content["step"], files | {file.name: describe(file)}).write(file.parent)
    return f"{done}, and the manifest made anew"


def odd_record(rng: random.Random, file: Path) -> str:
    """An odd value in one cell of a MindRecord."""
    columns, schema = read_columns(file), read_schema(file)
    name, row = rng.choice(list(columns)), rng.randrange(len(next(iter(columns.values()))))
    kind = schema[name]
    if "shape" in kind:
        dtype = columns[name][row].dtype
        odd = {
            "nothing": columns[name][row][:0],
            "minus one": np.full_like(columns[name][row], -1),
            "huge": np.full_like(columns[name][row], 2**31 - 1),
            "longer": np.resize(columns[name][row], len(columns[name][row]) + 7),
        } | ({"NaN": np.full(3, np.nan, dtype)} if dtype.kind == "f" else {})
    elif kind["type"] == "string":
        odd = {key: text for key, text in ODD_VALUES.items() if key not in ("deep list", "deep group", "NUL")}
        odd |= {"deep list": "[" * 3000 + "]" * 3000, "escape codes": ESCAPES, "nothing": ""}
    else:
        odd = {"minus one": -1, "huge": 2**62 if kind["type"] == "int64" else 2**30}
    what = rng.choice(list(odd))
    columns[name][row] = odd[what]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    floats = [key for key, one in schema.items() if one["type"].startswith("float") and "shape" not in one]
    for each in rows:
        each |= {key: float(each[key]) for key in floats}  # MindSpore reads 1.0 as the whole number 1
    kinds = {key: {part: one[part] for part in ("type", "shape") if part in one} for key, one in schema.items()}
    write_columns(file, kinds, rows)
    return f"row {row}, {name}: {what}"


ODD_FILES: dict[str, Mutation] = {
    "state.json": odd_state, ".json": odd_value, ".jsonl": odd_value, ".yaml": odd_value,
    ".safetensors": odd_header, ".mindrecord": odd_record,
}  # fmt: skip


def odd_content(file: str) -> Mutation | None:
    """What puts an odd value into a file of this name."""
    return next((mutation for ending, mutation in ODD_FILES.items() if file.endswith(ending)), None)


def _place(rng: random.Random, document: Any) -> tuple[str, Any, Any]:
    """(dotted path, container, key) of a value, every depth as likely as the ones above it."""
    places = []

    def walk(value: Any, path: str) -> None:
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in list(entries)[:60]:
            places.append((f"{path}.{key}" if path else str(key), value, key))
            walk(inner, places[-1][0])

    walk(document, "")
    return rng.choice(places)
