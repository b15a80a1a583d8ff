"""Options that a choice in a higher layer makes void fall away.

A preset sets options of its own advantage and policy loss. A file, a program or a command line above it that chooses
another method means that method, without the preset's options.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import shipped_yamls
from mindrlhf.user_functions import is_user_function, loading

_log = logging.getLogger(__name__)


def _advantage_lacks(name: Any) -> set[str]:
    """List the settings that an advantage does not take.

    A file that is being imported is not imported again, and one that cannot be found is refused later.
    """
    if not isinstance(name, str) or (is_user_function(name) and loading()):
        return set()
    try:
        method = ADVANTAGES.find(name)
    except UserError:
        return set()
    return ADVANTAGES.offered().keys() - method.options.keys() | (set() if method.uses_teacher else {"teacher"})


def _policy_loss_lacks(name: Any) -> set[str]:
    """List the settings that a policy loss does not take.

    A user's has `policy_loss_options` instead.
    """
    if not isinstance(name, str):
        return set()
    taken = POLICY_LOSSES[name].options.keys() if name in POLICY_LOSSES else set()
    known = name in POLICY_LOSSES or is_user_function(name)
    return POLICY_LOSSES.offered().keys() - taken if known else set()


def _without_reference(beta: Any) -> set[str]:
    return {"kl_in_reward", "kl_target", "reference_sync_steps"} if beta == 0 else set()


def _without_corrected_kl(corrected: Any) -> set[str]:
    """Name the correction of the KL term where it is void."""
    return {"kl_bias_correction"} if corrected is True or str(corrected).endswith("+") else set()


def _without_adapters(rank: Any) -> set[str]:
    return LoraSettings.model_fields.keys() - {"rank"} if rank == 0 else set()


# (group, setting that chooses) -> settings of the group that are void with a value.
CHOICES: Mapping[tuple[str, str], Callable[[Any], set[str]]] = {
    ("algorithm", "advantage"): _advantage_lacks,
    ("algorithm", "policy_loss"): _policy_loss_lacks,
    ("algorithm", "beta"): _without_reference,
    ("algorithm", "kl_in_reward"): _without_corrected_kl,
    ("algorithm", "kl_estimator"): _without_corrected_kl,
    ("lora", "rank"): _without_adapters,
}


def without_void(layers: Sequence[Layer]) -> list[Layer]:
    """Remove the options below the layer of a choice that are void with it.

    layers: lowest first. What falls away from a file of the user's is logged once.
    """
    kept = list(layers)
    for (group, setting), lacks in CHOICES.items():
        choosers = [number for number, layer in enumerate(kept) if setting in _group(layer, group)]
        if choosers and choosers[-1] > 0:
            value = _group(kept[choosers[-1]], group)[setting]
            void = lacks(value)
            for number, layer in enumerate(kept[: choosers[-1]]):
                kept[number] = _without(layer, group, void, f"{group}.{setting} {value}")
    return kept


def _group(layer: Layer, group: str) -> Mapping[str, Any]:
    values = layer.values.get(group)
    return values if isinstance(values, Mapping) else {}


def _without(layer: Layer, group: str, void: set[str], choice: str) -> Layer:
    """Remove a group's void settings from a layer."""
    values = _group(layer, group)
    lost = void & values.keys()
    if not lost:
        return layer
    for name in _own(layer, group, lost):
        _tell(f"{layer.where((group, name))}: {group}.{name} has no effect with {choice}, which is chosen over it")
    rest = {name: value for name, value in values.items() if name not in lost}
    return Layer(layer.values | {group: rest}, layer.places)


def _own(layer: Layer, group: str, lost: set[str]) -> Iterator[str]:
    """Yield the settings that a user's file gives, in order."""
    known = {str(file) for file in shipped_yamls().values()}
    if (group,) in layer.places and layer.where(()) not in known:
        yield from sorted(name for name in lost if _group(layer, group)[name] is not None)


@cache
def _tell(text: str) -> None:
    _log.warning("%s", text)
