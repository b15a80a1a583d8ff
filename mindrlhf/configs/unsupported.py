"""Signs of unsupported model families in configuration files, and the error for them."""

from collections.abc import Mapping
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.models.families import FAMILIES, LLAMA_CLASS, LLAMA_TYPE

SUPPORTED = f"supported are {', '.join(family.title for family in FAMILIES.values())} (dense)"
CLASSES = (LLAMA_CLASS, *(family.mindformers for family in FAMILIES.values() if family.mindformers))
MODEL_TYPES = tuple(sorted({LLAMA_TYPE, *FAMILIES}))

_EXPERTS = "a mixture of experts"
# Kind of model -> keys of model settings that only such models have.
_OTHERS = {
    _EXPERTS: "num_experts num_local_experts n_routed_experts num_moe_experts expert_num moe_intermediate_size "
    "num_experts_per_tok",
    "latent attention (DeepSeek)": "kv_lora_rank q_lora_rank qk_rope_head_dim multi_latent_attention",
    "a GLM model": "padded_vocab_size multi_query_group_num post_layer_norm",
}


def unsupported(where: str, found: str, kind: str = "this model family") -> UserError:
    """Build the error for another model family; `found` says how the file shows it."""
    return UserError(f"{where}: {found}, and {kind} is not supported; {SUPPORTED}.")


def sign_of_another(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find (key, kind of model) of an unsupported family in a YAML's `model_config`."""
    for key, known in (("type", CLASSES), ("model_type", MODEL_TYPES)):
        if isinstance(settings.get(key), str) and settings[key] not in known:
            return key, "this model family"
    signs = ((key, kind) for kind, keys in _OTHERS.items() for key in keys.split() if _is_set(settings.get(key)))
    return next(signs, ("moe_config", _EXPERTS) if has_experts(settings) else None)


def has_experts(group: Mapping[str, Any]) -> bool:
    """Tell whether a group's `moe_config` has several experts; with one the model is dense."""
    experts = group.get("moe_config")
    return isinstance(experts, Mapping) and _is_set(experts.get("expert_num"))


def _is_set(value: Any) -> bool:
    """Tell whether a key is set to more than nothing or one."""
    return value not in (None, False, 0, 1)
