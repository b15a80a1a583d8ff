"""Command lines in one grammar: `--name value`, `--name=value` and `name=value` mean the same.

A name is a flag of the command or, where the command takes settings, a setting: `group.key`.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from mindrlhf.configs.layers import parse_override
from mindrlhf.errors import UserError
from mindrlhf.files.printable import printable
from mindrlhf.files.text import nearest

SETTINGS = "overrides"  # the positional argument that takes settings
LIKENESS = {True: 0.8, False: 0.6}  # least likeness of an unknown name to a suggested flag; True: it may be a setting
WORDS = {True: ("true", "1", "yes", "on"), False: ("false", "0", "no", "off")}


def boolean(text: str) -> bool:
    """Parse True or False, as MindRLHF's flags are written."""
    for value, words in WORDS.items():
        if text.strip().lower() in words:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


BOOLEAN = {"type": boolean, "metavar": "True|False"}


class Parser(argparse.ArgumentParser):
    """Argument parser of a command; its errors are safe to print for any input."""

    def __init__(self, prog: str | None = None, **others):
        super().__init__(prog, **others, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """End with one sentence, without the usage."""
        self.exit(2, f"{self.prog}: {printable(message)}; `{self.prog} --help` shows what there is.\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse flags and settings in any of their forms. UserError for an unknown name."""
        if self._takes_a_command:
            own = deque(words)
            flags = self._flags_before_a_command(own)
            return self.parse_args([*flags, *([] if own and own[0] == "--" else ["--"]), *own])
        return self.parse_intermixed_args(self._usual(deque(words)))

    @property
    def _takes_a_command(self) -> bool:
        """Tell whether another command with its own flags follows this one's."""
        return any(action.nargs == argparse.REMAINDER for action in self._get_positional_actions())

    def _flags_before_a_command(self, words: deque[str]) -> list[str]:
        """Take this command's flags, up to the first word of the other."""
        flags: list[str] = []
        while words and words[0] != "--":
            name, equals, value = words[0].removeprefix("--").partition("=")
            flag = self._flag(name) if words[0].startswith("--") or equals else None
            if flag is None and words[0].startswith("--"):
                self._check_setting(name)
            if flag is None:
                break
            words.popleft()
            flags += self._with_value(flag, value if equals else None, words)
        return flags

    def _usual(self, words: deque[str]) -> list[str]:
        """Rewrite words in argparse's form: flags last, with dashes."""
        flags, others = [], []
        while words:
            word = words.popleft()
            dashed = word.startswith("--")
            name, equals, value = word.removeprefix("--").partition("=")
            if (dashed or equals) and self._flag(name):
                flags += self._with_value(self._flag(name), value if equals else None, words)
                continue
            if dashed or (equals and self._positional in ([], [SETTINGS])):
                self._check_setting(name)
            if dashed and not equals:
                value = "True" if self._begins(words) else words.popleft()
            others.append(f"{name}={value}" if dashed else word)
        return [*others, *flags]

    @property
    def _positional(self) -> list[str]:
        return [action.dest for action in self._get_positional_actions()]

    def _flag(self, name: str) -> argparse.Action | None:
        return self._option_string_actions.get(f"--{name}") or self._option_string_actions.get(
            f"--{name.replace('-', '_')}"
        )

    def _begins(self, words: Sequence[str]) -> bool:
        """Tell whether the first word is missing, or begins a flag or a setting."""
        if not words or words[0].startswith("--"):
            return True
        name, equals, _ = words[0].partition("=")
        setting = SETTINGS in self._positional and name.replace(".", "").isidentifier()
        return bool(equals and (setting or self._flag(name)))

    def _with_value(self, flag: argparse.Action, value: str | None, words: deque[str]) -> list[str]:
        """Write a flag with its value, which may be the next words.

        value: text after the equals sign; a list of several values is a YAML list.
        """
        option = flag.option_strings[0]
        if flag.nargs == 0:
            if value is None and words and words[0] in ("True", "False"):
                value = words.popleft()
            try:
                return [option] if value is None or boolean(value) else []
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{option}: {error}.") from None
        if flag.nargs is None:
            if value is None and words and not words[0].startswith("--"):
                value = words.popleft()
            return [option] if value is None else [f"{option}={value}"]
        if value is not None:
            _, values = parse_override(f"{flag.dest}={value}")
            return [option, *map(str, values)] if isinstance(values, list) else [option, value]
        values = []
        pairs = "=" in str(flag.metavar)
        while words and not words[0].startswith("--") and (pairs or not self._begins(words)):
            values.append(words.popleft())
        return [option, *values]

    def _check_setting(self, name: str) -> None:
        """Refuse a name that is no flag and cannot be a setting."""
        takes_settings = SETTINGS in self._positional
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        options = [option for action in shown for option in action.option_strings]
        flags = [option.removeprefix("--") for option in options if option.startswith("--")]
        near = nearest(name.replace("-", "_"), flags, LIKENESS[takes_settings])
        translated = takes_settings and "." not in name and self._is_anothers(name)
        if near and not translated:
            raise UserError(f"unknown flag --{name}; did you mean --{near}?")
        if not takes_settings:
            raise UserError(f"unknown flag --{name}; `{self.prog} --help` lists those of this command.")

    def _is_anothers(self, name: str) -> bool:
        """Tell whether a name is another suite's setting.

        Raises UserError for a flag of another suite.
        """
        # Not at every start: they import NumPy.
        from mindrlhf.migration.mindrlhf.table import FLAGS
        from mindrlhf.migration.mindrlhf.translation import is_mindrlhfs_name
        from mindrlhf.migration.other_names import is_trl_key

        ours = FLAGS.get(name, "")
        if self._flag(ours.removeprefix("--")):
            raise UserError(f"--{name} is MindRLHF's flag; here it is {ours}.")
        return is_trl_key(name) or bool(self._flag("grpo_config") and is_mindrlhfs_name(name))
