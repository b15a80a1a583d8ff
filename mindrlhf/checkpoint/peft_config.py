"""PEFT's `adapter_config.json`: adapters described, unsupported settings refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import regex
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt

from mindrlhf.configs.base import Settings
from mindrlhf.configs.lora import ALL_LINEAR, Adapter
from mindrlhf.configs.problems import brief, build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json
from mindrlhf.hub.names import id_of

PEFT_CONFIG_FILE = "adapter_config.json"
OWN_KEY = "mindrlhf"  # in files of earlier versions
OWN_FILE = "mindrlhf_adapter.json"  # next to the other: PEFT warns of keys that it does not know
MAX_RANK = 1 << 16

_KEYS = yaml.safe_load((resources.files(__package__) / "peft_config.yaml").read_text("utf-8"))


def _readable(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{brief(pattern)} is no regular expression ({error})") from None
    return ALL_LINEAR if pattern.lower() == ALL_LINEAR else pattern


def _or_none(value: Any) -> Any:
    return value or None


Rank = Annotated[StrictInt, Field(ge=1, le=MAX_RANK)]
Alpha = Annotated[float, Field(gt=0, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1, strict=True)]
Name = Annotated[str, Field(min_length=1)]
Pattern = Annotated[Name, AfterValidator(_readable)]
Modules = Pattern | Annotated[tuple[Name, ...], Field(min_length=1)]  # one regular expression, or names


class _Own(Settings):
    """Keys of this suite: checksums of the base's and of the adapter's weights."""

    base_fingerprint: str | None = None
    weights_sha256: str | None = None


class PeftConfig(Settings):
    """Keys of an `adapter_config.json` that describe a plain LoRA adapter."""

    model_config = ConfigDict(extra="ignore")

    r: Rank
    lora_alpha: Alpha
    lora_dropout: Share = 0.0
    use_rslora: StrictBool = False
    target_modules: Modules
    exclude_modules: Annotated[Modules | None, BeforeValidator(_or_none)] = None
    rank_pattern: Annotated[dict[Pattern, Rank] | None, BeforeValidator(_or_none)] = None
    alpha_pattern: Annotated[dict[Pattern, Alpha] | None, BeforeValidator(_or_none)] = None
    base_model_name_or_path: str | None = None
    mindrlhf: Annotated[_Own | None, BeforeValidator(_or_none)] = None


@dataclass(frozen=True)
class Base:
    """Base model of an adapter.

    name: as given when the adapter was trained. fingerprint: of the base's weights; None in an adapter from elsewhere.
    sha256: of the adapter's own weight file; None likewise.
    """

    name: str | None
    fingerprint: str | None = None
    sha256: str | None = None


def read_peft_config(path: Path) -> tuple[Adapter, Base]:
    """Read an `adapter_config.json`; `UserError` for every setting beyond plain LoRA."""
    read = _plain(read_json(path), str(path))
    adapter = Adapter(
        rank=read.r,
        alpha=read.lora_alpha,
        use_rslora=read.use_rslora,
        target_modules=read.target_modules,
        exclude_modules=read.exclude_modules or (),
        rank_pattern=read.rank_pattern or {},
        alpha_pattern=read.alpha_pattern or {},
        dropout=read.lora_dropout,
    )
    beside = path.with_name(OWN_FILE)
    own = read.mindrlhf or _Own()
    if beside.is_file():
        content = read_json(beside)
        own = build(_Own, content, Layer(content, {(): str(beside)}), strict=False)
    return adapter, Base(read.base_model_name_or_path, own.base_fingerprint, own.weights_sha256)


def lora_settings(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert the values of a `LoraConfig` to settings of `lora`, with PEFT's defaults.

    where: names the values in messages. `UserError` for every setting beyond plain LoRA.
    """
    given = {key: sorted(value) if isinstance(value, set) else value for key, value in raw.items()}
    given = {key: getattr(value, "value", value) for key, value in given.items() if value is not None}
    init = given.pop("init_lora_weights", True)
    read = _plain(_KEYS["defaults"] | given, where)
    ways = {True: "kaiming", "gaussian": "gaussian"}
    if init not in ways or read.rank_pattern or read.alpha_pattern:
        key, value = ("init_lora_weights", init) if init not in ways else ("a pattern of ranks or alphas", "given")
        raise UserError(f"{where}: {key} is {value!r}, which is not done here; train the adapter without it.")
    return {
        "rank": read.r,
        "alpha": read.lora_alpha,
        "dropout": read.lora_dropout,
        "target_modules": read.target_modules,
        "exclude_modules": read.exclude_modules or (),
        "use_rslora": read.use_rslora,
        "init": ways[init],
    }


def _plain(raw: Mapping[str, Any], where: str) -> PeftConfig:
    """Check that a configuration is one of plain LoRA."""
    for key, value in raw.items():
        plain = _KEYS["plain"].get(key, _KEYS["empty"])
        known = key in PeftConfig.model_fields or key in _KEYS["without_effect"]
        if not known and not any(type(value) is type(right) and value == right for right in plain):
            advice = f"plain LoRA has {plain[0]!r} there" if key in _KEYS["plain"] else "train the adapter without it"
            raise UserError(f"{where}: {key} is {brief(value)}, and that is not supported; {advice}.")
    return build(PeftConfig, raw, Layer(dict(raw), {(): where}), strict=False)


def peft_config(
    adapter: Adapter, modules: Sequence[str], base: Base, in_memory: Callable[[str], str] = str
) -> dict[str, Any]:
    """Build the content of an `adapter_config.json`, with PEFT's keys alone.

    modules: paths of all adapted modules. vLLM treats `all-linear` as a regular expression, so the modules' last names
    are written instead; their paths, where those of `in_memory` are others and a tower has modules of the same names.
    """
    paths = sorted(map(in_memory, modules))
    moved = set(paths) != set(modules)
    names = paths if moved else sorted({module.rpartition(".")[2] for module in modules})
    listed = adapter.target_modules == ALL_LINEAR or (moved and isinstance(adapter.target_modules, str))
    return _KEYS["written"] | {
        "alpha_pattern": {key: _whole(alpha) for key, alpha in adapter.alpha_pattern.items()},
        "base_model_name_or_path": id_of(base.name or "") or base.name,
        "exclude_modules": None if listed and moved else adapter.exclude_modules or None,
        "lora_alpha": _whole(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "r": adapter.rank,
        "rank_pattern": dict(adapter.rank_pattern),
        "target_modules": names if listed else adapter.target_modules,
        "use_rslora": adapter.use_rslora,
    }


def own_facts(base: Base) -> dict[str, str]:
    """Build the content of the file with keys of this suite."""
    own = {"base_fingerprint": base.fingerprint, "weights_sha256": base.sha256}
    return {key: value for key, value in own.items() if value is not None}


def _whole(number: float) -> float | int:
    """Convert 16.0 to 16: other programs expect whole numbers as integers."""
    return int(number) if number == int(number) else number
