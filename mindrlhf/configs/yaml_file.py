"""YAML files as mappings with line numbers, and chains of them by `base_config`."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.configs.preset_files import is_preset, preset_file
from mindrlhf.errors import UserError
from mindrlhf.files.text import read_text

BASE_KEY = "base_config"
MOST_VALUES = 1_000_000  # of a file or setting, with all that its aliases stand for

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Join a key path: `("reward", "functions", 0)` -> `reward.functions.0`.

    The result is one line whatever the keys are.
    """
    return ".".join(text if text.isprintable() else repr(text) for text in map(str, path))


@dataclass(frozen=True)
class Layer:
    """Settings from one place.

    source: the place as the user knows it: a file's path, or `command line`.
    values: nested mapping, as written.
    lines: key path -> line number, counted from 1, where the place has lines.
    """

    source: str
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Find a key's place: `file.yaml:12`, or the source without a line."""
        line = self.lines.get(path)
        return self.source if line is None else f"{self.source}:{line}"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with keys as text, and `1e-6` as a number.

    The number is YAML 1.2's form.
    """

    def construct_mapping(self, node, deep=False):
        self.flatten_mapping(node)
        return {self.construct_scalar(key): self.construct_object(value, deep=deep) for key, value in node.value}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_value(text: str) -> Any:
    """Parse one YAML value, as on the right of `key=value`.

    Raises yaml.YAMLError, or ValueError as `_check_size`.
    """
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _check_size(node)
    return loader.construct_document(node)


def read_yaml(path: str | Path) -> Layer:
    """Read one YAML file whose content is a mapping.

    Raises UserError when it is missing, unreadable, not YAML, not a mapping, or gives a key twice.
    """
    source = str(path)
    text = read_text(path, "a YAML file")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = {} if node is None else _lines(node, source)
        if node is not None:
            _check_size(node)
        values = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = source if mark is None else f"{source}:{mark.line + 1}"
        raise UserError(f"{place}: not valid YAML ({error.problem}); mend this line.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML ({str(error).splitlines()[0]}).") from None
    except (ValueError, RecursionError) as error:  # an impossible date or number; thousands of nested brackets
        raise UserError(f"{source}: not valid YAML ({error}).") from None
    if not isinstance(values, dict):
        what = "empty" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{source}: the file is {what}, and must hold `key: value` lines.")
    return Layer(source, values, lines)


def read_chain(path: str | Path) -> tuple[Layer, ...]:
    """Read a YAML file and its chain of `base_config` files, the base first.

    Each is relative to the file that names it. `preset:NAME` stands for a shipped file in both places.
    Raises UserError for a chain that comes back to a file, besides the errors of `read_yaml`.
    """
    chain: list[Layer] = []
    seen: list[Path] = []
    current = preset_file(str(path)) if is_preset(str(path)) else Path(path)
    while True:
        seen.append(current.resolve())
        layer = read_yaml(current)
        base = layer.values.get(BASE_KEY)
        values = {key: value for key, value in layer.values.items() if key != BASE_KEY}
        chain.append(Layer(layer.source, values, layer.lines))
        if base is None:
            return tuple(reversed(chain))
        place = layer.where((BASE_KEY,))
        if not isinstance(base, str):
            raise UserError(f"{place}: {BASE_KEY} is {base!r}, and must be the path of one YAML file.")
        try:
            current = preset_file(base) if is_preset(base) else current.parent / base
        except UserError as error:
            raise UserError(f"{place}: {BASE_KEY}: {error}") from None
        if current.resolve() in seen:
            raise UserError(f"{place}: {BASE_KEY} {base} leads back to a file of the same chain; name another base.")
        if not current.is_file():
            raise UserError(
                f"{place}: {BASE_KEY} names {current}, which is no file; give a path relative to this file."
            )


def _check_size(root: yaml.Node) -> None:
    """Raise ValueError for values that contain themselves or grow by aliases.

    The limit is MOST_VALUES.
    """
    sizes: dict[int, float] = {}

    def size(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # until it is known: whoever asks in between is inside of it
            sizes[id(node)] = 1 + sum(size(below) for _, _, below in _entries(node))
        return sizes[id(node)]

    if size(root) > MOST_VALUES:
        raise ValueError(f"it contains itself, or more than {MOST_VALUES:,} values by its aliases")


def _lines(root: yaml.Node, source: str) -> dict[KeyPath, int]:
    """Find the line of every key of a YAML document.

    Raises UserError for a key that is given twice in one group, and for a group that contains itself by an alias.
    """
    lines: dict[KeyPath, int] = {}
    above: list[int] = []
    seen: set[int] = set()  # an anchored node is reached again through its aliases

    def walk(node: yaml.Node, path: KeyPath) -> None:
        if id(node) in above:
            raise UserError(f"{source}:{lines.get(path, 1)}: {dotted(path)} contains itself; remove the alias.")
        if id(node) in seen:
            return
        seen.add(id(node))
        above.append(id(node))
        own: set[str] = set()
        for part, line, below in _entries(node):
            if part in own:
                raise UserError(f"{source}:{line}: key {dotted((part,))} is given twice in its group; keep one.")
            own.add(part)
            lines[(*path, part)] = line
            walk(below, (*path, part))
        above.pop()

    walk(root, ())
    return lines


def _entries(node: yaml.Node) -> Iterator[tuple[str | int, int, yaml.Node]]:
    """List (key or index, line, node) of a mapping or a list."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield index, item.start_mark.line + 1, item
    elif isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            yield str(key.value), key.start_mark.line + 1, item
