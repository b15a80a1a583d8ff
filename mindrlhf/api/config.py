"""Configurations as TRL's users write them: keyword arguments that become flags and settings."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from mindrlhf.configs.base import Settings, is_group
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.layers import leaves, merge
from mindrlhf.configs.loading import load_settings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.yaml_file import Layer, read_yaml
from mindrlhf.flags import RunFlags, SFTFlags, TrainFlags
from mindrlhf.migration import trl
from mindrlhf.migration.other_names import answer
from mindrlhf.migration.trl.grpo import BATCH, PRESET, PROMPTS, translate_grpo
from mindrlhf.migration.trl.names import DEFAULTS, NEEDLESS, NOT_DONE, trl_names
from mindrlhf.migration.trl.sft import BATCH as SFT_BATCH
from mindrlhf.migration.trl.sft import PAIRS, translate_sft
from mindrlhf.migration.trl.translation import RunSizes, TRLTranslation, nested

NOWHERE = RunSizes()
SFT_DEFAULTS = Path(trl.__file__).with_name("sft_defaults.yaml")
MODEL_YAMLS = ("train_yaml", "infer_yaml", "score_yaml")
# Flags that a trainer sets, or that only a command line has.
NOT_GIVEN = {"overrides", "settings", "from_verl", "only_save_strategy", "resume_training", "use_parallel"}
NOT_GIVEN |= {"mind_dataset_dir", "load_sft_checkpoint_train", "load_sft_checkpoint_infer", "output_dir"}


@dataclass(frozen=True)
class Resolved:
    """Configuration in the suite's own terms.

    flags: name -> value. settings: values over the configuration's file. needless: TRL's keys without effect -> why.
    """

    flags: Mapping[str, Any]
    settings: Layer
    needless: Mapping[str, str]


class Config:
    """Keyword arguments of a run: flags, settings of ours, and TRL's.

    Ours are written as in YAML, `rollout={"max_slots": 8}`, or dotted, `**{"rollout.max_slots": 8}`; `train_yaml`,
    `infer_yaml` and `score_yaml` take keys of the model YAMLs. A key can be read, and set again, as an attribute.
    Raises UserError for a wrong key or value.
    """

    kind: ClassVar[type[Settings]]
    flags: ClassVar[type[RunFlags]]
    file_flag: ClassVar[str]  # flag of the YAML file that the keys override
    preset: ClassVar[str | None] = None  # its value that holds TRL's defaults
    defaults: ClassVar[Path | None] = None  # else the file that holds them
    translate: ClassVar[Callable[..., TRLTranslation]]  # TRL's keys
    batch: ClassVar[Collection[str]]  # TRL's keys of the size of a step, which `counted` is here
    counted: ClassVar[str]

    output_dir: str | Path | None

    def __init__(self, output_dir: str | Path | None = None, **keys: Any):
        vars(self).update(output_dir=output_dir, _keys=keys)
        self.settings()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "output_dir":
            vars(self)[name] = value
        else:
            vars(self)["_keys"] = vars(type(self)(self.output_dir, **self._keys | {name: value}))["_keys"]

    def __getattr__(self, name: str) -> Any:
        keys = vars(self).get("_keys", {})
        if name in keys or name in DEFAULTS:
            return keys.get(name, DEFAULTS.get(name))
        if name in (ours := trl_names(self.kind)):
            value: Any = self.settings()
            for part in ours[name][0].split("."):
                value = getattr(value, part)
            return value
        if name in NEEDLESS or name in NOT_DONE or name in self._rule_keys():
            return NOT_DONE[name][0][0] if name in NOT_DONE else None
        raise AttributeError(f"{type(self).__name__} has no key {name!r}")

    def __repr__(self) -> str:
        keys = {"output_dir": self.output_dir, **self._keys}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in keys.items())})"

    def settings(self) -> Any:
        """Build the typed settings, except values that depend on data and devices."""
        resolved = self.resolve(NOWHERE)
        return load_settings(self.kind, resolved.flags.get(self.file_flag), given=resolved.settings, other_names=answer)

    def __contains__(self, name: str) -> bool:
        """Tell whether a key was given."""
        return name in self._keys

    def flag(self, name: str) -> Any:
        """Return a flag's value, None if it is not given."""
        return self._sorted()[0].get(name)

    def resolve(self, around: RunSizes) -> Resolved:
        """Turn the keys into flags and settings. Raises UserError."""
        flags, own, theirs = self._sorted()
        lowest = read_yaml(self.defaults) if self.defaults and not self._another else Layer({}, {})
        ours = Layer(nested(own), {(): type(self).__name__})
        base = load_settings(self.kind, flags.get(self.file_flag), given=merge((lowest, ours)), other_names=answer)
        translation = self._translate(theirs, base, own, around)
        for key in own.keys() & translation.placed.keys():
            first = translation.placed[key].theirs[0]
            raise translation.refuse(first, f"and {key} is the same setting; keep one of them")
        return Resolved(flags, merge((lowest, translation.layer(), ours)), translation.needless)

    def _sorted(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sort the keys into flags, dotted settings of ours, and others."""
        known = {field.name for field in fields(self.flags)} - NOT_GIVEN
        flags: dict[str, Any] = {self.file_flag: self.preset} if self.preset else {}
        own: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        overrides: list[str] = []
        for key, value in self._keys.items():
            first = key.split(".")[0]
            if first in MODEL_YAMLS:
                overrides += [f"{name}={json.dumps(one)}" for name, one in leaves(value, key)]
            elif self._is_group(key) and isinstance(value, Mapping):
                own |= dict(leaves(value, key))
            elif "." in key:
                own[key] = value
            elif key in known:
                flags[key] = Path(value) if key.startswith("save_") and value is not None else value
            else:
                theirs[key] = value
        return flags | {"overrides": overrides}, own, theirs

    def _is_group(self, name: str) -> bool:
        return name in self.kind.model_fields and is_group(self.kind.model_fields[name].annotation)

    def _rule_keys(self) -> Collection[str]:
        """Collect TRL's keys that rules read."""
        return self._translate({}, self.kind(), {}, NOWHERE).used

    @property
    def _another(self) -> bool:
        """True with a file in place of TRL's defaults."""
        return self._keys.get(self.file_flag, self.preset) != self.preset

    def _translate(
        self, theirs: Mapping[str, Any], base: Any, own: Collection[str], around: RunSizes
    ) -> TRLTranslation:
        """Translate TRL's keys over the settings `base`; `own`: the user's among these."""
        counted = {self.counted} if self._another and not any(map(theirs.get, self.batch)) else set()
        return self.translate(theirs, base, {*own, *counted}, around, type(self).__name__)


class GRPOConfig(Config):
    """Configuration of a `GRPOTrainer`: TRL's names and defaults, or ours.

    output_dir: folder of metrics and checkpoints. Other keys: TRL's (`learning_rate`, `num_generations`, ...); our
    settings (`rollout={...}`); flags of `mindrlhf train` (`tensor_parallel`, `load_ref_checkpoint`, ...). grpo_config:
    a YAML file, or a shipped one, instead of TRL's defaults `preset:trl`.
    """

    kind = GRPOSettings
    flags = TrainFlags
    file_flag = "grpo_config"
    preset = PRESET
    translate = staticmethod(translate_grpo)
    batch = BATCH
    counted = PROMPTS


class SFTConfig(Config):
    """Configuration of an `SFTTrainer`: TRL's names and defaults, or ours.

    output_dir: folder of metrics and checkpoints. Other keys: TRL's, our settings, and flags of `mindrlhf sft`.
    sft_config: a YAML file instead of TRL's defaults.
    """

    kind = SFTSettings
    flags = SFTFlags
    file_flag = "sft_config"
    defaults = SFT_DEFAULTS
    translate = staticmethod(translate_sft)
    batch = SFT_BATCH
    counted = PAIRS
