"""Keys of verl going in, settings coming out: what every rule of the translation reads and writes."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mindrlhf.configs.verl.table import VERL_DEFAULTS
from mindrlhf.errors import UserError


@dataclass(frozen=True)
class Keys:
    """verl's keys: what was given, or the default."""

    given: Mapping[str, Any]

    def __call__(self, name: str) -> Any:
        """The value, verl's default, or None."""
        return self.given.get(name, VERL_DEFAULTS.get(name))

    def number(self, name: str) -> float | int:
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"--from-verl: {name} is {value!r}, and should be a number.")
        return value

    def positive(self, name: str) -> float | int | None:
        """A number above 0; None for null and for -1 or 0, which switch off."""
        return None if self(name) is None or self.number(name) <= 0 else self.number(name)

    def first(self, *names: str) -> str | None:
        """The first of these keys that has a value."""
        return next((name for name in names if self.given.get(name) not in (None, "")), None)

    def among(self, *names: str) -> list[str]:
        """Those of the keys that were given."""
        return [name for name in names if name in self.given]

    def below(self, *groups: str) -> list[str]:
        """The given keys of groups."""
        return [name for name in self.given if name.startswith(tuple(f"{group}." for group in groups))]

    def source(self, name: str) -> str:
        """`name=value`, and whether it is a default."""
        return f"{name}={self(name)}" + ("" if name in self.given else " (verl's default)")


@dataclass
class Result:
    """What the rules make of the keys.

    overrides, flags, sources, commands: as in `translation.Translation`. used: the keys that overrides and flags follow
    from. needless, elsewhere, refused: key -> words, of keys that a rule judges by their value.
    """

    keys: Keys
    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    sources: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    needless: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def put(self, ours: str, value: Any, *theirs: str) -> None:
        """Set our key; `theirs` are the keys of verl that it follows from."""
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        self.overrides.append(f"{ours}={text}")
        self._follows(f"{ours}={text}", *theirs)

    def copy(self, ours: str, theirs: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """As `put`, of a key that has a value."""
        value = self.keys(theirs)
        if value is not None:
            self.put(ours, change(value), theirs)

    def flag(self, name: str, value: str, theirs: str) -> None:
        """Set a flag of `mindrlhf train`."""
        self.flags[name] = os.path.expanduser(value)
        self._follows(f"--{name} {self.flags[name]}", theirs)

    def copy_flag(self, name: str, theirs: str) -> None:
        """As `flag`, of a key that has a value."""
        if self.keys(theirs):
            self.flag(name, str(self.keys(theirs)), theirs)

    def _follows(self, ours: str, *theirs: str) -> None:
        self.used.update(theirs)
        self.sources.append((ours, ", ".join(self.keys.source(name) for name in theirs)))
