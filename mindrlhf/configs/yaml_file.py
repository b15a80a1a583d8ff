"""YAML files as mappings with line numbers, and chains of them.

A chain may contain the name of a shipped file (`mindrlhf.files.shipped`) instead of a path.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.algorithms.methods import unknown_name
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import shipped_file, shipped_yamls
from mindrlhf.files.text import read_text

BASE_KEY = "base_config"
MOST_VALUES = 1_000_000  # in a file or setting, with its aliases expanded

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Join a key path in one line: `("reward", "functions", 0)` -> `reward.functions.0`."""
    return ".".join(text if text.isprintable() else repr(text) for text in map(str, path))


def not_finite(values: Any, path: KeyPath = ()) -> KeyPath | None:
    """Find the key path of the first number that is NaN or infinite."""
    if isinstance(values, float) and not math.isfinite(values):
        return path
    below = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    found = (not_finite(value, (*path, key)) for key, value in below)
    return next((each for each in found if each is not None), None)


@dataclass(frozen=True)
class Layer:
    """Nested settings, as written, with their places.

    places: key path -> `file.yaml:12`; () -> the place of all keys without one.
    """

    values: dict[str, Any]
    places: Mapping[KeyPath, str]

    def where(self, path: KeyPath) -> str:
        """Find the place of the value at `path`, or of the nearest group above."""
        return next(self.places[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in self.places)


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)$",
    "tag:yaml.org,2002:float": (
        r"([-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+"
        r"|[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with keys as text, and numbers as YAML 1.2 has them.

    `1e-6` is a number and `0100` is 100; `1:30` and dates are text, not numbers of base 60 and objects.
    """

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in found if tag not in {*_NUMBERS, "tag:yaml.org,2002:timestamp"}]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node):
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 0 if re.match("[-+]?0[xb]", text) else 10)

    def construct_mapping(self, node, deep=False):
        self.flatten_mapping(node)
        return {self.construct_scalar(key): self.construct_object(value, deep=deep) for key, value in node.value}


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_form), list("-+.0123456789"))
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: an integer of thousands of digits


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse a YAML document: its value, and the line of every key.

    Raises one of NOT_YAML, also for a key that is given twice, and for an alias inside of its own value.
    """
    root = yaml.compose(text, _Loader)
    lines: dict[KeyPath, int] = {}
    sizes: dict[int, int] = {}

    def size(node: yaml.Node | None, path: KeyPath, mark: yaml.Mark | None) -> int:
        known = sizes.get(id(node))
        if known == 0:  # not yet counted: the node is inside of itself
            problem = f"{dotted(path)} contains itself; remove the alias"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if known:
            return known
        sizes[id(node)] = 0
        total = 1
        for part, mark, below in _entries(node):
            here = (*path, part)
            if here in lines:
                problem = f"key {dotted((part,))} is given twice in its group; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            lines[here] = mark.line + 1
            total += size(below, here, mark)
        sizes[id(node)] = total
        return total

    if size(root, (), None) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values by its aliases")
    return root and _Loader("").construct_document(root), lines


def _entries(node: yaml.Node | None) -> list[tuple[str | int, yaml.Mark, yaml.Node]]:
    """List (key or index, position, node) of a mapping or a list."""
    if isinstance(node, yaml.MappingNode):
        return [(str(key.value), key.start_mark, item) for key, item in node.value]
    items = node.value if isinstance(node, yaml.SequenceNode) else ()
    return [(index, item.start_mark, item) for index, item in enumerate(items)]


def read_yaml(path: str | Path) -> Layer:
    """Read one YAML file whose content is a mapping. Raises UserError."""
    text = read_text(path, "a YAML file")
    try:
        values, lines = parse(text)
    except NOT_YAML as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML ({problem}).") from None
    if not isinstance(values, dict):
        what = "empty" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: the file is {what}, and must hold `key: value` lines.")
    return Layer(values, {(): str(path)} | {key: f"{path}:{line}" for key, line in lines.items()})


def read_chain(path: str | Path) -> tuple[Layer, ...]:
    """Read a YAML file and its chain of `base_config` files, the base first.

    A base is a path relative to the file that names it. Any of the files may be the name of a shipped one. UserError.
    """
    return _chain(_file_of(str(path)), ())


def _file_of(text: str, folder: Path = Path(), where: str = "") -> Path:
    file = shipped_file(folder / text)
    known = shipped_yamls()
    if file.exists() or (text not in known and not re.fullmatch(r"\w+(:\w*)?", text)):
        return file
    if text not in known:
        kind = text[: text.find(":") + 1]
        names = [name for name in known if name.startswith(kind)]
        raise UserError(f"{where}{unknown_name('YAML', text, names)}")
    return known[text]


def _chain(file: Path, above: tuple[Path, ...]) -> tuple[Layer, ...]:
    layer = read_yaml(file)
    seen = (*above, file.resolve())
    base = layer.values.pop(BASE_KEY, None)
    if base is None:
        return (layer,)
    place = f"{layer.where((BASE_KEY,))}: {BASE_KEY}"
    if not isinstance(base, str):
        raise UserError(f"{place} is {base!r}, and must be the path of one YAML file.")
    below = _file_of(base, file.parent, f"{place}: ")
    if below.resolve() in seen:
        raise UserError(f"{place} {base} leads back to a file of the same chain; name another base.")
    if not below.is_file():
        raise UserError(f"{place} names {below}, which is no file; give a path relative to this file.")
    return (*_chain(below, seen), layer)
