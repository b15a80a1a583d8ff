"""Translation of TRL's keyword arguments: `GRPOConfig(learning_rate=1e-6, max_steps=100)`.

Every key is translated, without effect here, or refused with a remedy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindrlhf.configs.base import Settings
from mindrlhf.configs.layers import deep_merge
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest
from mindrlhf.migration.translation import Translation
from mindrlhf.migration.trl.names import NEEDLESS, NOT_DONE, trl_names


@dataclass(frozen=True)
class RunSizes:
    """Numbers that a configuration's arithmetic needs from outside.

    A number is None until it is known. devices: data-parallel ranks of training. rows: number of rows of the dataset.
    """

    devices: int | None = None
    rows: int | None = None


@dataclass(kw_only=True)
class TRLTranslation(Translation):
    """TRL's keys as settings of this suite.

    where: name of the configuration, for messages. settings: class of the settings that the keys become.
    """

    suite = "TRL"

    where: str
    settings: type[Settings]

    def __call__(self, key: str, default: Any = None) -> Any:
        """Take a key's value and mark it as used; None gives the default."""
        self.used.add(key)
        return self.peek(key, default)

    def peek(self, key: str, default: Any = None) -> Any:
        """Look at the value of a key without marking it as used."""
        value = self.given.get(key)
        value = value.value if isinstance(value, Enum) else value
        return default if value is None else value

    def copy(self, ours: str, theirs: str) -> None:
        """Set our key to the value of TRL's, if there is one."""
        if (value := self(theirs)) is not None:
            self.put(ours, value, theirs)

    def refuse(self, key: str, problem: str) -> UserError:
        """Make the error about a key.

        The problem continues the sentence after the key's value, and ends with a remedy.
        """
        return UserError(f"{self.where}: {key} is {self.given.get(key)!r}, {problem}.")

    def place_others(self) -> None:
        """Copy the keys that are settings under another name; sort the others."""
        names = trl_names(self.settings)
        for key, value in self.given.items():
            if key in self.used:
                continue
            if key in names:
                for ours in names[key]:
                    self.copy(ours, key)
            elif key in NEEDLESS:
                self.needless[key] = NEEDLESS[key]
            elif key in NOT_DONE:
                values, advice = NOT_DONE[key]
                if not any(type(value) is type(one) and value == one for one in values):
                    raise self.refuse(key, f"which is not done here; {advice}")
            else:
                raise UserError(
                    f"{self.where}: unknown key {key}{_hint(key, [*names, *NEEDLESS, *NOT_DONE, *self.used])}"
                )

    def layer(self) -> Layer:
        """Return the settings as a layer, each with the place of its key."""
        places: dict[tuple[str, ...], str] = {(): self.where}
        for ours, one in self.placed.items():
            places[tuple(ours.split("."))] = f"{self.where}: {one.theirs[0]}"
        return Layer(nested({ours: one.value for ours, one in self.placed.items()}), places)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"group.key": value}` into groups."""
    values: dict[str, Any] = {}
    for key, value in dotted.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        values = deep_merge(values, value)
    return values


def _hint(key: str, known: Iterable[str]) -> str:
    near = nearest(key, known)
    return f"; did you mean {near}?" if near else "; give one of TRL's, or a setting as group.key."
