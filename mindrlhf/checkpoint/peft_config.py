"""PEFT's `adapter_config.json`: adapters described, unsupported settings refused by name."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.configs.lora import ALL_LINEAR, Adapter, Modules
from mindrlhf.configs.problems import brief
from mindrlhf.errors import UserError
from mindrlhf.files.json import is_number, read_json

PEFT_CONFIG_FILE = "adapter_config.json"
OWN_KEY = "mindrlhf"  # PEFT from 0.15 on ignores a key that it does not know, with a warning; vLLM ignores it too
MAX_RANK = 1 << 16

# Keys with the only values that mean plain LoRA. The first values of A and B leave the base as it is, or do not.
_FIXED = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga"),
}
# Keys of training, of other libraries, or of first values: a trained adapter is the same without them.
_WITHOUT_EFFECT = (
    *("auto_mapping", "inference_mode", "revision", "peft_version", "lora_dropout", "megatron_core", "runtime_config"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
)
_EMPTY = (None, False, "", [], {})  # of any other key: the method behind it is not used


@dataclass(frozen=True)
class Base:
    """Base model of an adapter.

    name: as whoever trained the adapter called it. fingerprint: of its weights (`checkpoint.fingerprint`); None in an
    adapter from elsewhere. sha256: of the adapter's own weight file, likewise.
    """

    name: str | None
    fingerprint: str | None = None
    sha256: str | None = None


def read_peft_config(path: Path) -> tuple[Adapter, Base]:
    """Read an `adapter_config.json`.

    Raises `UserError` for a damaged file, and for every setting that would make the adapter another function than
    the low-rank product of two matrices beside a linear weight.
    """
    raw = read_json(path)
    for key, value in raw.items():
        _check_supported(path, key, value)
    adapter = Adapter(
        rank=_value(path, raw, "r", _is_rank, f"a whole number from 1 to {MAX_RANK}"),
        alpha=float(_value(path, raw, "lora_alpha", _is_positive, "a number above 0")),
        use_rslora=_value(path, {"use_rslora": False} | raw, "use_rslora", _is_flag, "true or false"),
        target_modules=_modules(path, raw, "target_modules"),
        exclude_modules=_modules(path, raw, "exclude_modules") if raw.get("exclude_modules") else (),
        rank_pattern=_patterns(path, raw, "rank_pattern", _is_rank, "whole numbers from 1"),
        alpha_pattern=_patterns(path, raw, "alpha_pattern", _is_positive, "numbers above 0"),
    )
    return adapter, _base(path, raw)


def peft_config(adapter: Adapter, modules: Iterable[str], base: Base, dropout: float) -> dict[str, Any]:
    """Build the content of an `adapter_config.json`, with PEFT's keys and one of our own.

    modules: paths of all adapted modules. vLLM takes `all-linear` for a regular expression, so that their last names
    are written in its place.
    """
    own = {"base_fingerprint": base.fingerprint, "weights_sha256": base.sha256}
    last_names = tuple(sorted({module.rpartition(".")[2] for module in modules}))
    targets = last_names if adapter.target_modules == ALL_LINEAR else adapter.target_modules
    return {
        "alpha_pattern": {key: _whole(alpha) for key, alpha in adapter.alpha_pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base.name,
        "bias": "none",
        "exclude_modules": _json_modules(adapter.exclude_modules) or None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _whole(adapter.alpha),
        "lora_dropout": dropout,
        OWN_KEY: {key: value for key, value in own.items() if value is not None},
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": dict(adapter.rank_pattern),
        "revision": None,
        "target_modules": _json_modules(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapter.use_rslora,
    }


def _whole(number: float) -> float | int:
    """Write 16.0 as 16: readers elsewhere expect a whole number where it is one."""
    return int(number) if number == int(number) else number


def _json_modules(modules: Modules) -> str | list[str]:
    return modules if isinstance(modules, str) else list(modules)


def _check_supported(path: Path, key: str, value: Any) -> None:
    """Raise `UserError` for a key that asks for more than plain LoRA."""
    if key in _READ or key in _WITHOUT_EFFECT:
        return
    if key in _FIXED:
        if not any(value is allowed or (type(value) is str and value == allowed) for allowed in _FIXED[key]):
            raise UserError(
                f"{path}: {key} is {brief(value)}, and that is not supported; plain LoRA has {_FIXED[key][0]!r} there."
            )
    elif not any(type(value) is type(empty) and value == empty for empty in _EMPTY):
        raise UserError(
            f"{path}: {key} is {brief(value)}, and that is not supported; train the adapter without it, or remove the "
            "key if it changes nothing."
        )


def _value(path: Path, raw: Mapping[str, Any], key: str, right: Callable[[Any], bool], words: str) -> Any:
    if key not in raw:
        raise UserError(f"{path}: {key} is missing, and must be {words}; get the file again.")
    if not right(raw[key]):
        raise UserError(f"{path}: {key} is {brief(raw[key])}, and must be {words}.")
    return raw[key]


def _modules(path: Path, raw: Mapping[str, Any], key: str) -> Modules:
    """Read names of modules, or one regular expression."""
    value = _value(path, raw, key, _is_modules, "a list of names, or a regular expression")
    if isinstance(value, str):
        _check_pattern(path, key, value)
        return ALL_LINEAR if value.lower() == ALL_LINEAR else value
    return tuple(value)


def _patterns(
    path: Path, raw: Mapping[str, Any], key: str, right: Callable[[Any], bool], words: str
) -> dict[str, float]:
    """Read a map from regular expressions to numbers; absent and null are empty."""
    value = raw.get(key) or {}
    if not isinstance(value, dict) or not all(right(number) for number in value.values()):
        raise UserError(f"{path}: {key} is {brief(value)}, and must map names of modules to {words}.")
    for pattern in value:
        _check_pattern(path, key, pattern)
    return value


def _check_pattern(path: Path, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{path}: {key}: {brief(pattern)} is no regular expression ({error}).") from error


def _base(path: Path, raw: Mapping[str, Any]) -> Base:
    """Read the base's name, and what this suite has added."""
    name, own = raw.get("base_model_name_or_path"), raw.get(OWN_KEY) or {}
    if not isinstance(name, str | None):
        raise UserError(f"{path}: base_model_name_or_path is {brief(name)}, and must be a name, a path or null.")
    known = {"base_fingerprint", "weights_sha256"}
    if not isinstance(own, dict) or own.keys() - known or not all(isinstance(value, str) for value in own.values()):
        raise UserError(f"{path}: {OWN_KEY} is {brief(own)}, and must have {' and '.join(sorted(known))}; remove it.")
    return Base(name, own.get("base_fingerprint"), own.get("weights_sha256"))


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_positive(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value > 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_modules(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(name, str) and name for name in value)
    return isinstance(value, str) and bool(value)


_READ = (
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("base_model_name_or_path", OWN_KEY),
)
