"""Signs of unsupported model families in configuration files, and the error for them."""

from collections.abc import Mapping
from typing import Any

from mindrlhf.configs.model_names import SIGNS
from mindrlhf.errors import UserError
from mindrlhf.models.families import FAMILIES, LLAMA_CLASS, LLAMA_TYPE

SERVED = {
    name: family for name, family in FAMILIES.items() if not family.sees
}  # the others are models with images, which some commands run
SUPPORTED = f"supported are {', '.join(family.title for family in SERVED.values())}"
CLASSES = (LLAMA_CLASS, *(family.mindformers for family in FAMILIES.values() if family.mindformers))
MODEL_TYPES = tuple(sorted({LLAMA_TYPE, *FAMILIES}))
EXPERTS = next(iter(SIGNS))
# They take models with images.
COMMANDS = "`mindrlhf train`, `sft`, `chat`, `generate`, `eval`, `export`, `convert` and `transform`"
WITH_IMAGES = f"a model with images, outside of {COMMANDS},"


def unsupported(where: str, found: str, kind: str = "this model family") -> UserError:
    """Build the error for another model family; `found` is the evidence in the file."""
    return UserError(f"{where}: {found}, and {kind} is not supported; {SUPPORTED}.")


def sign_of_another(group: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find (key, kind of model) of an unsupported family in a YAML's group.

    A `moe_config` with several experts is such a sign; with one expert the model is dense. Keys of experts are signs
    in a group that names a dense family.
    """
    for key, known in (("type", CLASSES), ("model_type", MODEL_TYPES)):
        if isinstance(group.get(key), str) and group[key] not in known:
            return key, "this model family"
    experts = group.get("moe_config")
    named = {group.get(key) for key in ("type", "model_type") if isinstance(group.get(key), str)}
    with_experts = {name for one in FAMILIES.values() if one.experts for name in (one.name, one.mindformers)}
    kinds = {kind: keys for kind, keys in SIGNS.items() if kind != EXPERTS or named - with_experts}
    signs = [(key, kind) for kind, keys in kinds.items() for key in keys if _is_set(group.get(key))]
    if isinstance(experts, Mapping) and _is_set(experts.get("expert_num")):
        signs.append(("moe_config", EXPERTS))
    return next(iter(signs), None)


def _is_set(value: Any) -> bool:
    """Tell whether a value is neither empty, False, 0 nor 1."""
    return value is True or value not in (None, False, 0, 1)
