"""Translation of verl's command line: `mindrlhf train --from-verl "key=value ..."`.

A key that the command line leaves out has verl's default where that is another than ours, so that the same
algorithm runs. Every key that it gives is translated, needless here, or done elsewhere, and the report says which;
a command with a key of another kind is refused.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mindrlhf.configs.verl import algorithm_rules, run_rules
from mindrlhf.configs.verl.command import Command, read_command
from mindrlhf.configs.verl.result import Keys, Result
from mindrlhf.configs.verl.table import (
    ELSEWHERE,
    FILE_DEFAULTS,
    NEEDLESS,
    NOT_DONE,
    OF_OTHER_VALUES,
    VERL_DEFAULTS,
    Feature,
)
from mindrlhf.errors import UserError


@dataclass(frozen=True)
class Translation:
    """A verl command line as settings of this suite.

    Every key that it gives is in one of used, elsewhere, needless and unknown.
    overrides: `group.key=value` each, for `load_grpo_config`.
    flags: flag of `mindrlhf train`, without dashes -> value; a flag that is given goes before it.
    sources: (ours, theirs) for people, one for each override and flag. used: verl's keys in them.
    commands: commands that make the datasets that a flag or a setting names.
    elsewhere: key -> its place. needless: key -> why it is needless.
    unknown: keys of a YAML file that are not verl's, as far as known here.
    command: the command line as given.
    """

    overrides: tuple[str, ...]
    flags: Mapping[str, str]
    sources: tuple[tuple[str, str], ...]
    used: frozenset[str]
    commands: tuple[str, ...]
    elsewhere: Mapping[str, str]
    needless: Mapping[str, str]
    unknown: tuple[str, ...]
    command: Command

    def __str__(self) -> str:
        width = max(len(ours) for ours, _ in self.sources)
        lines = ["from verl:", *(f"  {ours:<{width}}  {theirs}" for ours, theirs in self.sources)]
        if self.commands:
            lines += ["from verl, datasets to make before the run:", *(f"  {text}" for text in self.commands)]
        for title, table in (("done elsewhere", self.elsewhere), ("needless here", self.needless)):
            if table:
                lines += [f"from verl, {title}:", *(f"  {line}" for line in self._by_words(table))]
        if self.unknown:
            lines += ["from verl, unknown:", *(f"  {_unknown(key)}" for key in self.unknown)]
        return "\n".join(lines)

    def _by_words(self, table: Mapping[str, str]) -> Iterator[str]:
        """Format `words: key=value, key=value`; keys of a file are counted only."""
        for words in dict.fromkeys(table.values()):
            keys = [key for key, found in table.items() if found == words]
            shown = [f"{key}={self.command.given[key]}" for key in keys if key not in self.command.from_files]
            counted = len(keys) - len(shown)
            if counted:
                shown.append(f"{counted} keys of the file" if counted > 1 else "a key of the file")
            yield f"{words}: {', '.join(shown)}"


def translate(text: str) -> Translation:
    """Translate a verl command line: `key=value ...`, and YAML files of keys.

    Raises UserError for a shell variable that was not expanded, a value that cannot be read, batch sizes that do not
    divide, a key that is not verl's, and a key that asks for an unsupported feature.
    """
    command = read_command(text)
    given = command.given
    _refuse({key: words(feature) for key, feature in asked(given).items()}, given)
    result = Result(Keys(given))
    for rule in (*run_rules.RULES, *algorithm_rules.RULES):
        rule(result.keys, result)
    _refuse(result.refused, given)
    elsewhere, needless, unknown = {}, {}, []
    for key in (key for key in given if key not in result.used):
        place, reason = _look_up(key, given[key], result)
        if place == "unknown":
            unknown.append(key)
        else:
            (elsewhere if place == "elsewhere" else needless)[key] = reason
    mistakes = [key for key in unknown if key not in command.from_files]
    if mistakes:
        raise UserError(f"--from-verl: {'; '.join(map(_unknown, mistakes))}; correct it or leave it out.")
    return Translation(
        tuple(result.overrides),
        result.flags,
        tuple(result.sources),
        frozenset(result.used & given.keys()),
        tuple(result.commands),
        elsewhere,
        needless,
        tuple(unknown),
        command,
    )


def asked(given: Mapping[str, Any]) -> dict[str, Feature]:
    """Map keys to the unsupported features that they ask for."""
    return {
        key: feature
        for feature in NOT_DONE
        for pattern, off in feature.asking.items()
        for key, value in given.items()
        if fnmatchcase(key, pattern) and value not in off
    }


def words(feature: Feature) -> str:
    """Name a feature, with an alternative."""
    return f"{feature.name}; {feature.instead}" if feature.instead else feature.name


def _refuse(refused: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raise UserError where keys ask for unsupported features."""
    if refused:
        parts = []
        for reason in dict.fromkeys(refused.values()):
            keys = ", ".join(f"{key}={given[key]}" for key, found in refused.items() if found == reason)
            parts.append(f"{keys} ({reason})")
        raise UserError(f"--from-verl: not done here: {'; '.join(parts)}; leave it out to train without it.")


def _look_up(key: str, value: Any, result: Result) -> tuple[str, str]:
    """Classify a key without a setting as elsewhere, needless or unknown.

    Returns the class and words.
    """
    if key in result.needless:
        return "needless", result.needless[key]
    if key in result.elsewhere:
        return "elsewhere", result.elsewhere[key]
    for place, table in (("elsewhere", ELSEWHERE), ("needless", NEEDLESS)):
        for words, patterns in table.items():
            if _matches(key, patterns.split()):
                return place, words.format(value=value)
    for feature in NOT_DONE:
        if _matches(key, [*feature.asking, *feature.keys.split()]):
            return "needless", f"{feature.name}: not asked for"
    if key in VERL_DEFAULTS or key in FILE_DEFAULTS:
        return "needless", next(words for words, keys in NEEDLESS.items() if keys is OF_OTHER_VALUES)
    return "unknown", ""


def _matches(key: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _unknown(key: str) -> str:
    """Explain `x.y is no key of verl`, with the nearest known key."""
    names = {*VERL_DEFAULTS, *FILE_DEFAULTS}
    for patterns in (*ELSEWHERE.values(), *NEEDLESS.values(), *(feature.keys for feature in NOT_DONE)):
        names |= {name for name in patterns.split() if "*" not in name and "?" not in name}
    names |= {name for feature in NOT_DONE for name in feature.asking if "*" not in name}
    near = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.6)
    return f"{key} is no key of verl's that is known here" + (f" (did you mean {near[0]}?)" if near else "")
