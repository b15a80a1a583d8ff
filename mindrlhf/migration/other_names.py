"""Names of settings in TRL, verl and MindRLHF, answered with ours."""

import json
import shlex
from collections.abc import Callable
from typing import Any

from mindrlhf.configs.base import Settings
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.layers import leaves
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.errors import UserError
from mindrlhf.migration.mindrlhf.table import place_of
from mindrlhf.migration.trl.grpo import translate_grpo
from mindrlhf.migration.trl.names import NEEDLESS, NOT_DONE, trl_names
from mindrlhf.migration.trl.sft import translate_sft
from mindrlhf.migration.trl.translation import RunSizes, TRLTranslation
from mindrlhf.migration.verl.table import POLICY
from mindrlhf.migration.verl.translation import translate

TRL: dict[type[Settings], Callable[..., TRLTranslation]] = {GRPOSettings: translate_grpo, SFTSettings: translate_sft}
# Two sizes of data: a value that differs between them is left open.
SIZES = (RunSizes(devices=1, rows=1000), RunSizes(devices=1, rows=3000))


def is_trl_key(name: str) -> bool:
    """Tell whether a name is one of TRL's keys."""
    ruled = (translate({}, settings(), (), RunSizes()).used for settings, translate in TRL.items())
    return any(name in keys for keys in (NEEDLESS, NOT_DONE, *ruled, *map(trl_names, TRL)))


def answer(settings: type[Settings], key: str, value: Any) -> str | None:
    """Answer another suite's name: `learning_rate is TRL's name; here it is optimizer.lr=1e-06`.

    settings: class of the run's settings. key: dotted. value: as read from YAML, a mapping for a group of names. None
    for a name of nobody's.
    """
    if settings in TRL and "." not in key and is_trl_key(key):
        return f"{key} is TRL's name; {_trl(settings, key, value)}"
    for name, one in leaves(value, key) if settings is GRPOSettings else ():
        if found := _verl(name, one):
            return f"{name} is verl's name; {found}"
        if found := place_of(name):
            return f"{name} is MindRLHF's name; {found}"
    return None


def _trl(settings: type[Settings], key: str, value: Any) -> str:
    try:
        (plain, _), (first, second) = (
            [TRL[settings](given, settings(), (), size) for size in SIZES] for given in ({}, {key: value})
        )
    except UserError as error:
        return str(error).partition(": ")[2].rstrip(".")
    except (TypeError, AttributeError, ValueError):  # a value of another type
        return f"here it is {' and '.join(trl_names(settings).get(key, ['another setting']))}, with another value"
    ours = [
        name if placed != second.placed[name] else _written(name, placed.value)
        for name, placed in first.placed.items()
        if key in placed.theirs or placed != plain.placed.get(name)
    ]
    if ours:
        return f"here it is {' '.join(ours)}"
    return f"it has no effect here: {(NEEDLESS | first.needless).get(key, 'this value changes nothing')}"


def _verl(key: str, value: Any) -> str | None:
    theirs = key.removeprefix(POLICY)
    try:
        result = translate(
            shlex.quote(f"{theirs}={value if isinstance(value, str) else json.dumps(value, default=str)}")
        )
    except UserError:
        return None
    ours = [shown for shown, cited in result.sources if any(word.startswith(f"{theirs}=") for word in cited.split())]
    if ours:
        return f"here it is {' '.join(ours)}"
    places = {**result.elsewhere, **result.needless, **result.not_done}
    ambiguous = key.partition(".")[0] in GRPOSettings.model_fields  # patterns match mistakes in our names too
    return f"here: {places[theirs]}" if theirs in places and not ambiguous else None


def _written(ours: str, value: Any) -> str:
    return shlex.quote(f"{ours}={value if isinstance(value, str) else json.dumps(value, default=str)}")
