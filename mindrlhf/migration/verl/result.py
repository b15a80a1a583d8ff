"""Output of the translation rules: settings, and places of verl's keys."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.migration.translation import FLAG, Translation
from mindrlhf.migration.verl.command import Keys
from mindrlhf.migration.verl.table import COPIED_WITH, VERL_DEFAULTS


@dataclass(kw_only=True)
class VerlTranslation(Translation):
    """A verl command line as settings of this suite.

    Every key of the command line is in one of used, elsewhere, needless, not_done and unknown.
    keys: all keys except keys of features that are not done. command: all keys.
    elsewhere: key -> its place. unknown: key -> words with the nearest known key. not_done: key -> why it is not done.
    refused: key that asks for it -> the reason that `check` names. judged: key -> arguments of `judge`.
    """

    suite = "verl"
    defaults = VERL_DEFAULTS

    keys: Keys
    command: Keys
    elsewhere: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    not_done: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    judged: dict[str, tuple[str, str]] = field(default_factory=dict)

    def put(self, ours: str, value: Any, *theirs: str, words: str = "") -> None:
        """Set our key, which follows from `theirs`; a flag's `~` becomes the user's folder."""
        super().put(ours, os.path.expanduser(str(value)) if ours.startswith(FLAG) else value, *theirs, words=words)

    def copy(self, ours: str, theirs: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Set our key to the first given value of `theirs`, if any."""
        key = self.keys.first(*theirs.split()) or theirs.split()[-1]
        if self.keys(key) not in (None, ""):
            self.put(ours, change(self.keys(key)), key)

    def copy_with(self, name: str) -> None:
        """Copy the settings that go with an advantage, a policy loss or a feature."""
        for ours, theirs in COPIED_WITH.get(name, {}).items():
            self.copy(ours, theirs)

    def judge(self, place: str, words: str, *theirs: str) -> None:
        """Note the place of keys that become no setting: `elsewhere` or `needless`."""
        self.judged.update(dict.fromkeys(theirs, (place, words)))

    def refuse(self, key: str, reason: str, *followers: str) -> None:
        """Refuse a key, together with keys that depend on its value.

        followers: such keys, given or not.
        """
        self.refused[key] = reason
        self.not_done |= {name: reason for name in (key, *followers) if name in self.command.given}

    def place_others(self, look_up: Callable[[str, Any], tuple[str, str]]) -> None:
        """Find a place for each given key without a setting."""
        self.used -= self.not_done.keys()
        for key, value in self.keys.given.items():
            if key not in self.not_done and key not in self.used:
                place, words = self.judged.get(key) or look_up(key, value)
                getattr(self, place)[key] = words

    def check(self) -> None:
        """Raise UserError for refused and for unknown keys."""
        reasons: dict[str, list[str]] = {}
        for key, reason in self.refused.items():
            reasons.setdefault(reason, []).append(f"{key}={self.command(key)}")
        parts = [f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items()]
        if parts:
            raise UserError(f"--from-verl: not done here: {'; '.join(parts)}; leave it out to train without it.")
        mistakes = [words for key, words in self.unknown.items() if key not in self.keys.from_files]
        if mistakes:
            raise UserError(f"--from-verl: {'; '.join(mistakes)}; correct it or leave it out.")

    def __str__(self) -> str:
        others = {
            ", done elsewhere": self._by_words(self.elsewhere),
            ", needless here": self._by_words(self.needless),
            ", NOT DONE": self._by_words(self.not_done),
            ", unknown": self.unknown.values(),
        }
        if not self.command.unfollowed:
            return self.report(others)
        names = ", ".join(self.command.unfollowed)
        said = f"the script's branches are not followed; {names} may have other values, so give their keys."
        return f"{self.report(others)}\nfrom verl: {said}"

    def _by_words(self, table: Mapping[str, str]) -> list[str]:
        """Format `words: key=value, key=value`; keys of a file are counted only."""
        lines = []
        for words in dict.fromkeys(table.values()):
            keys = [key for key, found in table.items() if found == words]
            shown = [f"{key}={self.command(key)}" for key in keys if key not in self.command.from_files]
            counted = len(keys) - len(shown)
            if counted:
                shown.append(f"{counted} keys of the file" if counted > 1 else "a key of the file")
            lines.append(f"{words}: {', '.join(shown)}")
        return lines
