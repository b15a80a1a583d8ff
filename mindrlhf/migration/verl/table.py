"""verl's keys, read from `keys.yaml`, where each part is explained."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.configs.yaml_file import read_yaml

POLICY = "actor_rollout_ref."
OFF = (None, False, 0, "", [], {})

_FACTS = read_yaml(Path(__file__).with_name("keys.yaml")).values
VERL_DEFAULTS, FILE_DEFAULTS = _FACTS["defaults"], _FACTS["file_defaults"]
COPIED = _FACTS["copied"]
COPIED_WITH = _FACTS["copied_with"]
COPIED_OR_NULL = _FACTS["copied_or_null"]
NAMES = _FACTS["names"]
MEGATRON_MODULES = _FACTS["megatron_modules"]
NEEDLESS = _FACTS["needless"]
ELSEWHERE = _FACTS["elsewhere"]


@dataclass(frozen=True)
class Feature:
    """Feature of verl that this suite does not have, with an alternative or "".

    asking: keys that ask for the feature -> values that do not ask for it. keys: patterns of all its keys.
    """

    name: str
    instead: str
    asking: Mapping[str, tuple[Any, ...]]
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}; {self.instead}" if self.instead else self.name


def _feature(row: Mapping[str, Any]) -> Feature:
    asking = dict.fromkeys(row.get("asks", "").split(), OFF)
    asking |= {key: (*OFF, *values) for key, values in row.get("asks_unless", {}).items()}
    asking |= {key: tuple(values) for key, values in row.get("asks_always", {}).items()}
    return Feature(row["name"], row.get("instead", ""), asking, (*asking, *row.get("keys", "").split()))


NOT_DONE = tuple(map(_feature, _FACTS["not_done"]))
# (place of a key, words for the report, patterns of keys): the first match counts.
PLACES = (
    *(("elsewhere", words, keys.split()) for words, keys in ELSEWHERE.items()),
    *(("needless", words, keys.split()) for words, keys in NEEDLESS.items()),
    *(("needless", f"{feature.name}: not asked for", feature.keys) for feature in NOT_DONE),
    ("needless", next(iter(NEEDLESS)), (*VERL_DEFAULTS, *FILE_DEFAULTS)),
)
