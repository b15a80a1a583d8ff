"""verl command lines: shell words, Hydra's forms of keys, and YAML files.

`key=value`, `+key=value` and `++key=value` set a key, `~key` removes it, a word that ends in .yaml is a file of keys
that the others override (Hydra's `.hydra/config.yaml`, for example), and one that ends in .sh is a script that starts
verl's trainer.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindrlhf.configs.yaml_file import NOT_YAML, parse, read_yaml
from mindrlhf.errors import UserError
from mindrlhf.migration.verl.script import SUFFIXES, Command, names_trainer, read_script, script_command
from mindrlhf.migration.verl.table import FILE_DEFAULTS, POLICY, VERL_DEFAULTS

YAML_SUFFIXES = (".yaml", ".yml")
CONFIG_FLAGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
OWN_CONFIG = re.compile(r"\w*(ppo|dapo)_(\w+_)?trainer(\.ya?ml)?")  # verl's own, whose defaults are known
ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*")
WORDS = {"null": None, "true": True, "false": False}
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Keys:
    """Keys of a verl command line, without POLICY.

    from_files: keys from YAML files. unfollowed: variables of a script that its branches set as well.
    """

    given: Mapping[str, Any]
    from_files: frozenset[str] = frozenset()
    unfollowed: tuple[str, ...] = ()

    def __call__(self, name: str) -> Any:
        """Return the value, verl's default, or None."""
        return self.given.get(name, VERL_DEFAULTS.get(name))

    def number(self, name: str) -> float | int:
        """Return the value. Raises UserError for one that is no number."""
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"--from-verl: {name} is {value!r}, and should be a number.")
        return value

    def positive(self, name: str) -> float | int | None:
        """Return a number above 0; None for null, -1 and 0, which mean off."""
        return None if self(name) is None or self.number(name) <= 0 else self.number(name)

    def first(self, *names: str) -> str | None:
        """Find the first of these keys that has a value."""
        return next((name for name in names if self.given.get(name) not in (None, "")), None)

    def below(self, group: str) -> list[str]:
        return [name for name in self.given if name.startswith(f"{group}.")]


def read_command(text: str) -> Keys:
    """Read the keys of a command line; words of another form are ignored.

    Raises UserError for a shell variable that was not expanded, a value or file that cannot be read, and a
    configuration other than verl's own, if its file is not given.
    """
    command = _command(text)
    words = list(_without_config_flags(command.words))
    files = [word for word in words if word.endswith(YAML_SUFFIXES) and "=" not in word]
    filed = {key: value for file in files for key, value in _asked(read_yaml(file).values)}
    given = dict(filed)
    own = {}
    for word in words:
        name, equals, value = word.lstrip("+~").partition("=")
        key = name.removeprefix(POLICY)
        if word.startswith("-") or ENVIRONMENT.fullmatch(name):
            continue
        if word.startswith("~"):
            given.pop(key, None)
            own.pop(key, None)
        elif equals:
            own[key] = name, value
    for key, (name, value) in own.items():
        given[key] = _value(name, value, given)
    if not given:
        raise UserError("--from-verl: there is no key=value in it; give the arguments of verl's main_ppo.")
    return Keys(given, frozenset(filed.keys() & given.keys() - own.keys()), command.unfollowed)


def _command(text: str) -> Command:
    """Split a command line into words; a script counts as its command."""
    if names_trainer(text):
        return script_command(text, "the command line")
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"--from-verl: the command line cannot be read ({error}).") from None
    parts = [read_script(word) if word.endswith(SUFFIXES) and "=" not in word else Command([word]) for word in words]
    unfollowed = tuple(name for part in parts for name in part.unfollowed)
    return Command([word for part in parts for word in part.words], unfollowed)


def _without_config_flags(words: list[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in CONFIG_FLAGS:
            yield word
            continue
        value = value if equals else next(rest, "")
        if flag in ("--config-name", "-cn") and not OWN_CONFIG.fullmatch(value):
            found = f"{flag} {value} names a configuration that is not verl's own"
            raise UserError(f"--from-verl: {found}; give the path of its YAML file among the keys instead.")


def _asked(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Select a YAML file's keys with values other than verl's defaults."""
    for name, value in group.items():
        key = f"{prefix}{name}".removeprefix(POLICY)
        if isinstance(value, Mapping):
            yield from _asked(value, f"{key}.")
            continue
        follows = isinstance(value, str) and ("${" in value or value == "???")
        default = (VERL_DEFAULTS | FILE_DEFAULTS).get(key)
        if value not in (None, default) and not follows and name != "_target_":
            yield key, value


def _value(name: str, text: str, given: Mapping[str, Any]) -> Any:
    """Parse a value as Hydra does: only true, false and null are special words."""
    known = VERL_DEFAULTS | given
    found = REFERENCE.fullmatch(text)
    if found and (key := found[1].removeprefix(POLICY)) in known:
        return known[key]
    text = REFERENCE.sub(lambda part: str(given.get(part[1].removeprefix(POLICY), part[0])), text)
    text = os.path.expandvars(text)
    if "$" in text:
        found = f"{name}={text} holds a shell variable or command whose value is not known"
        raise UserError(f"--from-verl: {found}; append {name}=VALUE.")
    if text[:1] in ("[", "{"):
        try:
            return parse(text)[0]
        except NOT_YAML:
            if "\\" in text:  # Hydra's escapes, in engine settings that have no rule
                return text
            raise UserError(f"--from-verl: the value of {name}={text} cannot be read.") from None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float) if len(text) < 100 else (float,):
        with suppress(ValueError):
            return kind(text)
    return text
