"""Input and output of the translation rules: verl's keys and our settings."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mindrlhf.configs.verl.table import VERL_DEFAULTS
from mindrlhf.errors import UserError


@dataclass(frozen=True)
class Keys:
    """verl's keys with their given values, or the defaults."""

    given: Mapping[str, Any]

    def __call__(self, name: str) -> Any:
        """Return the value, verl's default, or None."""
        return self.given.get(name, VERL_DEFAULTS.get(name))

    def number(self, name: str) -> float | int:
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"--from-verl: {name} is {value!r}, and should be a number.")
        return value

    def positive(self, name: str) -> float | int | None:
        """Return a number above 0; None for null, -1 and 0, which switch off."""
        return None if self(name) is None or self.number(name) <= 0 else self.number(name)

    def first(self, *names: str) -> str | None:
        """Find the first of these keys that has a value."""
        return next((name for name in names if self.given.get(name) not in (None, "")), None)

    def among(self, *names: str) -> list[str]:
        """Select the given ones of some keys."""
        return [name for name in names if name in self.given]

    def below(self, *groups: str) -> list[str]:
        """Select the given keys of groups."""
        return [name for name in self.given if name.startswith(tuple(f"{group}." for group in groups))]

    def source(self, name: str) -> str:
        """Format `name=value`, and mark a default."""
        return f"{name}={self(name)}" + ("" if name in self.given else " (verl's default)")


@dataclass
class Result:
    """Output of the rules.

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
        """Set our key. theirs: the keys of verl that it follows from."""
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        self.overrides.append(f"{ours}={text}")
        self._follows(f"{ours}={text}", *theirs)

    def copy(self, ours: str, theirs: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Set our key if verl's key has a value; see `put`."""
        value = self.keys(theirs)
        if value is not None:
            self.put(ours, change(value), theirs)

    def flag(self, name: str, value: str, theirs: str) -> None:
        """Set a flag of `mindrlhf train`."""
        self.flags[name] = os.path.expanduser(value)
        self._follows(f"--{name} {self.flags[name]}", theirs)

    def copy_flag(self, name: str, theirs: str) -> None:
        """Set a flag if verl's key has a value; see `flag`."""
        if self.keys(theirs):
            self.flag(name, str(self.keys(theirs)), theirs)

    def _follows(self, ours: str, *theirs: str) -> None:
        self.used.update(theirs)
        self.sources.append((ours, ", ".join(self.keys.source(name) for name in theirs)))
