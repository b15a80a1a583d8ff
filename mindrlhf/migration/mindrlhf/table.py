"""MindRLHF's names, read from `keys.yaml`, where each part is explained."""

from pathlib import Path

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.yaml_file import read_yaml

_KEYS = read_yaml(Path(__file__).with_name("keys.yaml")).values
GROUPS = _KEYS["groups"].split()
COPIED = {ours: names.split() for ours, names in _KEYS["copied"].items()}
RULED, PASSED, REWARDS, FLAGS = (_KEYS[part] for part in ("ruled", "passed", "rewards", "flags"))
NEEDLESS = {words: names.split() for words, names in _KEYS["needless"].items()}
IDLE = next(iter(NEEDLESS))  # reason of keys that MindRLHF itself does not read
FLAT = "rl_config"
_PLACES = RULED | {name: ours for ours, names in COPIED.items() for name in names}
_REASONS = {name: words for words, names in NEEDLESS.items() for name in names if "*" not in name}
KNOWN = _PLACES.keys() | _REASONS.keys()
# Names that mean something without their group, and are none of ours.
FLAT_NAMES = {name.removeprefix(f"{FLAT}.") for name in KNOWN - set(NEEDLESS[IDLE]) if name.startswith(f"{FLAT}.")}
FLAT_NAMES -= set(GRPOSettings.model_fields)


def place_of(name: str) -> str | None:
    """Tell in words what a name of MindRLHF's is here.

    None for a name of another's. name: dotted, with MindRLHF's group, a group of ours, or none; or with another group.
    """
    group, dot, _ = name.partition(".")
    if dot and group not in GROUPS and group not in GRPOSettings.model_fields:
        return None
    last = name.rpartition(".")[2]
    full = name if group in GROUPS else f"{FLAT}.{last}"
    if ours := _PLACES.get(full) or next((RULED[key] for key in RULED if key.endswith(f".{last}")), None):
        return f"here it is {ours}"
    if full in _REASONS and (full == name or not dot):
        return f"it has no effect here: {_REASONS[full]}"
    return None
