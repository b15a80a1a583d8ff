"""Names that settings have in TRL, from their descriptions; other keys from `trl_keys.yaml`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from mindrlhf.configs.base import Settings, is_group
from mindrlhf.configs.yaml_file import read_yaml

_KEYS = read_yaml(Path(__file__).with_name("trl_keys.yaml")).values
# Key -> why it has no effect here.
NEEDLESS = {key: reason for reason, keys in _KEYS["needless"].items() for key in keys.split()}
# Key -> (values that ask for nothing, advice).
NOT_DONE = {key: (values, advice) for advice, keys in _KEYS["not_done"].items() for key, values in keys.items()}
DEFAULTS = _KEYS["defaults"]
METRICS = _KEYS["metrics"]


def with_trl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add TRL's names to metrics that have one."""
    named = dict(metrics)
    for theirs, ours in METRICS.items():
        pattern = re.compile(re.escape(ours).replace(r"\*", "(.+)"))
        for name, value in metrics.items():
            if found := pattern.fullmatch(name):
                named[found.expand(theirs.replace("*", r"\1"))] = value
    return named


def flat_fields(fields: Mapping[str, FieldInfo], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield dotted settings; nested groups are flattened in their place."""
    for name, field in fields.items():
        if is_group(field.annotation):
            yield from flat_fields(field.annotation.model_fields, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def trl_names(settings: type[Settings]) -> dict[str, list[str]]:
    """Map TRL's keys to ours; `key=value` stands for one value of a key."""
    names: dict[str, list[str]] = {}
    for ours, field in flat_fields(settings.model_fields):
        for found in re.finditer(r"TRL ([a-z][\w=]*(?:, [a-z]\w*)*)", field.description or ""):
            for theirs in () if ours.startswith("critic.") else found[1].split(", "):
                names.setdefault(theirs, []).append(ours)
    return names
