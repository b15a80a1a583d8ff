"""Translation of verl's command line: `mindrlhf train --from-verl "key=value ..."`.

A key that the command line leaves out has verl's default if it differs from ours, so that the same algorithm runs.
Every given key is translated, needless here, done elsewhere or not done, and the report says which. A command with a
key that is not done or not known is refused after the report.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from mindrlhf.files.text import nearest
from mindrlhf.migration.verl.command import read_command
from mindrlhf.migration.verl.result import VerlTranslation
from mindrlhf.migration.verl.rules import RULES
from mindrlhf.migration.verl.table import COPIED, COPIED_OR_NULL, NOT_DONE, PLACES, Feature


def translate(text: str) -> VerlTranslation:
    """Translate a verl command line: `key=value ...`, and YAML files of keys.

    Keys of features that are not done are noted for `check`, which refuses them, and the other keys are translated as
    if these were absent. Raises UserError for a shell variable that was not expanded, a value that cannot be read, and
    batch sizes that do not divide.
    """
    command = read_command(text)
    features = asked(command.given)
    followers = {key: _followers(feature, command.given) for key, feature in features.items()}
    left_out = {*features, *(key for keys in followers.values() for key in keys)}
    keys = replace(command, given={key: value for key, value in command.given.items() if key not in left_out})
    result = VerlTranslation(keys.given, keys=keys, command=command)
    for key, feature in features.items():
        result.refuse(key, str(feature), *followers[key])
    for ours, theirs in COPIED.items():
        result.copy(ours, theirs)
    for ours, theirs in COPIED_OR_NULL.items():
        if theirs in keys.given:
            result.put(ours, keys.positive(theirs), theirs)
    for rule in RULES:
        rule(keys, result)
    result.place_others(_look_up)
    return result


def asked(given: Mapping[str, Any]) -> dict[str, Feature]:
    """Map keys to the unsupported features that they ask for."""
    return {
        key: feature
        for feature in NOT_DONE
        for pattern, off in feature.asking.items()
        for key, value in given.items()
        if fnmatchcase(key, pattern) and value not in off
    }


def _followers(feature: Feature, given: Mapping[str, Any]) -> list[str]:
    """List the given keys of a feature that do not ask for it themselves."""
    return [key for key in given if _matches(key, feature.keys) and not _matches(key, feature.asking)]


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _look_up(key: str, value: Any) -> tuple[str, str]:
    """Find a key in the tables: its place, and words for the report."""
    for place, words, patterns in PLACES:
        if _matches(key, patterns):
            return place, words.format(value=value)
    known = {name for _, _, names in PLACES for name in names if not {"*", "?"} & {*name}}
    hint = f" (did you mean {near}?)" if (near := nearest(key, known)) else ""
    return "unknown", f"{key} is no key of verl's that is known here{hint}"
