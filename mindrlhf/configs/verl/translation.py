"""Translation of verl's command line: `mindrlhf train --from-verl "key=value ..."`.

A key that the command line leaves out has verl's default where that is another than ours, so that the same
algorithm runs. Every key that it gives is translated, needless here, or done elsewhere, and the report says which;
a command with a key of another kind is refused.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from mindrlhf.configs.verl.command import read_command
from mindrlhf.configs.verl.result import Translation
from mindrlhf.configs.verl.rules import RULES
from mindrlhf.configs.verl.table import COPIED, COPIED_OR_NULL, NOT_DONE, PLACES, Feature
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest


def translate(text: str) -> Translation:
    """Translate a verl command line: `key=value ...`, and YAML files of keys.

    Raises UserError for a shell variable that was not expanded, a value that cannot be read, batch sizes that do not
    divide, a key that is not verl's, and a key that asks for an unsupported feature.
    """
    keys = read_command(text)
    _refuse({key: str(feature) for key, feature in asked(keys.given).items()}, keys.given)
    result = Translation(keys)
    for ours, theirs in COPIED.items():
        result.copy(ours, theirs)
    for ours, theirs in COPIED_OR_NULL.items():
        if theirs in keys.given:
            result.put(ours, keys.positive(theirs), theirs)
    for rule in RULES:
        rule(keys, result)
    _refuse(result.refused, keys.given)
    _place_others(result)
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


def _refuse(refused: Mapping[str, str], given: Mapping[str, Any]) -> None:
    reasons: dict[str, list[str]] = {}
    for key, reason in refused.items():
        reasons.setdefault(reason, []).append(f"{key}={given[key]}")
    parts = [f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items()]
    if parts:
        raise UserError(f"--from-verl: not done here: {'; '.join(parts)}; leave it out to train without it.")


def _place_others(result: Translation) -> None:
    """Find a place for each given key without a setting; refuse unknown ones."""
    for key, value in result.keys.given.items():
        if key not in result.used:
            place, words = result.judged.get(key) or _look_up(key, value)
            getattr(result, place)[key] = words
    mistakes = [words for key, words in result.unknown.items() if key not in result.keys.from_files]
    if mistakes:
        raise UserError(f"--from-verl: {'; '.join(mistakes)}; correct it or leave it out.")


def _look_up(key: str, value: Any) -> tuple[str, str]:
    """Find a key in the tables: its place, and words for the report."""
    for place, words, patterns in PLACES:
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            return place, words.format(value=value)
    known = {name for _, _, names in PLACES for name in names if not {"*", "?"} & {*name}}
    hint = f" (did you mean {near}?)" if (near := nearest(key, known)) else ""
    return "unknown", f"{key} is no key of verl's that is known here{hint}"
