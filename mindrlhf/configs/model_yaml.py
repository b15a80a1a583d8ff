"""MindFormers model YAMLs, read into typed settings.

The groups `model.model_config`, `parallel_config`, `recompute_config` and `context` are ours: a key that is neither
read here nor known to MindFormers is a mistake. All other keys belong to MindFormers' own trainer and are listed as
unused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from pydantic import Field

from mindrlhf.backend.devices import Device, find_device
from mindrlhf.configs.base import DeviceTarget, Settings
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.layers import merge
from mindrlhf.configs.lora import PetSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_names import SPELLINGS
from mindrlhf.configs.model_settings import GROUP, SAMPLING_KEYS, ModelSettings
from mindrlhf.configs.problems import Group, brief, build, unknown_name
from mindrlhf.configs.pynative_yaml import in_first_form
from mindrlhf.configs.unsupported import sign_of_another, unsupported
from mindrlhf.configs.yaml_file import KeyPath, Layer, dotted, not_finite, read_chain, read_yaml
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest

NONE = MappingProxyType({})
_KEYS = read_yaml(Path(__file__).with_name("mindformers_keys.yaml")).values
FIXED = _KEYS["model_fixed"]
# Group -> keys of MindFormers without effect here.
ELSEWHERE = {key: place for place, keys in _KEYS["elsewhere"].items() for key in keys.split()}
UNUSED = {group: frozenset(" ".join(keys.values()).split()) for group, keys in _KEYS["unused"].items()}


class ParallelSettings(Settings):
    """`parallel_config`, and what `parallel` says about the optimizer."""

    data_parallel: int = Field(1, ge=1, description="Data-parallel ranks.")
    model_parallel: int = Field(1, ge=1, description="Tensor-parallel ranks.")
    pipeline_stage: int = Field(1, ge=1, description="Pipeline stages.")
    use_seq_parallel: bool = Field(False, description="Split activations over the tensor-parallel ranks by sequence.")
    micro_batch_num: int = Field(1, ge=1, description="Micro-batches that pass through the pipeline in one update.")
    vocab_emb_dp: bool = Field(True, description="Every tensor-parallel rank holds the whole embedding.")
    gradient_aggregation_group: int = Field(4, ge=1, description="Gradients are reduced in this many buckets.")
    context_parallel: Literal[1] = Field(1, description="Context-parallel ranks; 1 is all there is.")
    expert_parallel: int = Field(1, ge=1, description="Data-parallel ranks over which experts are spread.")
    enable_parallel_optimizer: bool = Field(
        False, description="`parallel.enable_parallel_optimizer`: optimizer state is sharded over data-parallel ranks."
    )
    optimizer_level: Literal["level1", "level3"] = Field(
        "level1",
        description="`parallel.parallel_optimizer_config.optimizer_level`: level1 shards optimizer state alone, level3 "
        "weights and gradients too; they are gathered for one layer at a time.",
    )

    @property
    def workers(self) -> int:
        return self.data_parallel * self.model_parallel * self.pipeline_stage

    @property
    def shards_optimizer(self) -> bool:
        """True when data-parallel ranks share optimizer state."""
        return self.enable_parallel_optimizer and self.data_parallel > 1

    @property
    def shards_weights(self) -> bool:
        """True when data-parallel ranks share weights and gradients too."""
        return self.shards_optimizer and self.optimizer_level == "level3"

    @property
    def ranks_of_a_step(self) -> int:
        """Ranks that compute a decode step together."""
        return self.model_parallel * self.expert_parallel


class RecomputeSettings(Settings):
    """`recompute_config`."""

    recompute: bool | int | tuple[int | tuple[int, ...], ...] = Field(
        False,
        description="Compute activations again in the backward pass, each layer from its input; of all layers, also "
        "where it is a number of layers or a list. Pipeline stages always do, from their input.",
    )

    @property
    def asked(self) -> bool:
        """True when layers are to be computed again, whatever their number."""
        given = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)
        return any(map(any, (one if isinstance(one, tuple) else (one,) for one in given)))


class ContextSettings(Settings):
    """`context`, and the one key of its `jit_config` that we read."""

    device_target: DeviceTarget = Field("Ascend", description="Where everything runs.")
    device_id: int | None = Field(None, ge=0, description="Device of a single process; msrun gives each rank its own.")
    mode: Literal[0] = Field(0, description="0 is graph mode, the only one here.")
    max_device_memory: str | None = Field(
        None, pattern=r"^\d+(\.\d+)?GB$", examples=["58GB"], description="Most device memory of one process on Ascend."
    )
    jit_level: Literal["O0", "O1", "O2"] | None = Field(
        None, description="`jit_config.jit_level`: compilation level on Ascend."
    )

    @property
    def device(self) -> Device:
        """Record of the device."""
        return find_device(self.device_target)


DEVICE_KEYS = ("device_id", "max_device_memory", "jit_level")  # of `context`, read by some devices
# Dtypes without effect on a device whose activations have a fixed one.
ACTIVATION_KEYS = ("param_init_type", "layernorm_compute_type", "softmax_compute_type")
TRAINING_KEYS = ("micro_batch_num", "gradient_aggregation_group", "enable_parallel_optimizer")
OPTIMIZER_LEVEL = "parallel.parallel_optimizer_config.optimizer_level"
# Groups of a model YAML that are ours, and groups of MindRLHF's grpo_config.yaml.
OWN_GROUPS = ("model", "parallel_config", "recompute_config", "context")
MINDRLHF_GROUPS = ("rl_config", "actor_config", "ref_config", "reward_config", "generate_config")


class ModelYaml(Settings):
    """A MindFormers model YAML."""

    path: str = Field(description="The file, as given.")
    first_rank: int = Field(0, ge=0, description="First of the job's ranks that have this layout; no key of the file.")
    model: ModelSettings = ModelSettings()
    parallel: ParallelSettings = ParallelSettings()
    recompute: RecomputeSettings = RecomputeSettings()
    context: ContextSettings = ContextSettings()
    lora: PetSettings | None = Field(None, description="`lora_config`, or `model.model_config.pet_config`.")
    takes_all_ranks: bool = Field(
        False, description="Ranks that no layout takes are data-parallel, as in MindFormers 2; no key of the file."
    )
    unused: tuple[str, ...] = Field((), description="Keys of the file that have no effect here, dotted.")

    @property
    def ranks(self) -> range:
        """Ranks of the job that have this layout."""
        return range(self.first_rank, self.first_rank + self.parallel.workers)

    @property
    def recomputes(self) -> bool:
        """True when the backward pass of one stage computes layers again.

        Fused operators do, and composed layers are then blocks of their own (`training.block_passes`): with MindSpore
        2.9's own `Cell.recompute()` some shapes fail to compile on CPU, with a topological cycle.
        """
        parallel = self.parallel
        return self.recompute.asked and parallel.pipeline_stage == 1 and not parallel.shards_weights

    @property
    def computes_again(self) -> bool:
        """True when a backward pass computes layers again, of whatever layout."""
        return self.recomputes or self.parallel.pipeline_stage > 1 or self.parallel.shards_weights

    @property
    def generating(self) -> "ModelYaml":
        """Settings for weights that only generate, which ranks do not share."""
        if self.parallel.optimizer_level == "level1":
            return self
        return self.model_copy(update={"parallel": self.parallel.model_copy(update={"optimizer_level": "level1"})})

    def without_effect(self, generating: bool) -> list[str]:
        """List keys of the file without effect on this device or role."""
        device = self.context.device
        idle = [key for key in DEVICE_KEYS if key not in device.context_keys]
        names = [f"context.{key}" for key in idle if key in self.context.model_fields_set]
        if fixed := device.activation_dtype:
            names += [f"{GROUP}.{key}" for key in ACTIVATION_KEYS if getattr(self.model, key) != fixed]
        if generating:
            names += [f"parallel_config.{key}" for key in TRAINING_KEYS if key in self.parallel.model_fields_set]
            names += [OPTIMIZER_LEVEL] * ("optimizer_level" in self.parallel.model_fields_set)
            names += [f"recompute_config.{key}" for key in sorted(self.recompute.model_fields_set)]
        else:
            names += [f"{GROUP}.{key}" for key in SAMPLING_KEYS if key in self.model.model_fields_set]
            followed = self.recomputes or (self.computes_again and self.recompute.recompute is True)
            names += ["recompute_config.recompute"] * (self.recompute.asked and not followed)
            idle_level = "optimizer_level" in self.parallel.model_fields_set and not self.parallel.shards_optimizer
            names += [OPTIMIZER_LEVEL] * idle_level
        return names

    def architecture(self, hf: ModelConfig | None = None, hf_where: str = "config.json") -> ModelConfig:
        """Combine this file with a checkpoint's configuration; its shape must be the checkpoint's."""
        return self.model.architecture(hf, self.path, hf_where)

    def sampling_defaults(self) -> dict[str, Any]:
        """Collect a predict YAML's sampling keys, for `load_grpo_config(defaults=...)`."""
        sampling = self.model.sampling()
        return {"rollout": sampling} if sampling else {}

    def adapter_defaults(self) -> dict[str, Any]:
        """Collect a finetune YAML's adapters, for the `defaults` of the run's settings."""
        given = self.lora or self.model.pet_config
        return {"lora": given.settings()} if given else {}


def load_model_yaml(path: str | Path, overrides: Sequence[str] = ()) -> ModelYaml:
    """Read a MindFormers model YAML (and its `base_config` chain).

    overrides: dotted, with the file's own keys: `model.model_config.seq_length=2048`.
    Raises UserError, also for a model that this suite does not compute and for a file without our groups.
    """
    return typed_model_yaml(merge(read_chain(path), overrides), str(path))


def typed_model_yaml(layered: Layer, path: str) -> ModelYaml:
    """Read a model YAML's merged values; `path` names them in messages.

    Raises UserError as `load_model_yaml`.
    """
    layered, unused, takes_all_ranks = in_first_form(layered)
    reader = _Reader(layered, path, unused)
    reader.check_kind()
    return ModelYaml(
        path=path,
        model=reader.group(ModelSettings, ("model", "model_config"), SPELLINGS, FIXED),
        parallel=reader.group(
            ParallelSettings,
            ("parallel_config",),
            elsewhere={
                ("parallel",): "enable_parallel_optimizer",
                ("parallel", "parallel_optimizer_config"): "optimizer_level",
            },
        ),
        recompute=reader.group(RecomputeSettings, ("recompute_config",)),
        context=reader.group(ContextSettings, ("context",), elsewhere={("context", "jit_config"): "jit_level"}),
        lora=reader.group(PetSettings, ("lora_config",)) if reader.mapping(("lora_config",)) else None,
        takes_all_ranks=takes_all_ranks,
        unused=reader.rest(),
    )


@dataclass
class _Reader:
    """Reader of typed groups out of a merged YAML; it collects unused keys."""

    layered: Layer
    path: str
    unused: list[str] = field(default_factory=list)

    def refuse(self, place: KeyPath, words: str) -> NoReturn:
        raise UserError(f"{self.layered.where(place)}: {words}")

    def mapping(self, path: KeyPath) -> Mapping[str, Any]:
        """Find the group at `path`; empty if it is absent or null."""
        values: Any = self.layered.values
        for depth, part in enumerate(path, 1):
            values = values.get(part)
            if values is None:
                return {}
            if not isinstance(values, Mapping):
                self.refuse(path[:depth], f"{dotted(path[:depth])} is {brief(values)}, and must be a group of keys.")
        return values

    def check_kind(self) -> None:
        """Raise UserError for a file of GRPO settings, another model family, or NaN."""
        top = self.layered.values
        path = ("model", "model_config")
        if (place := not_finite(top)) is not None:
            self.refuse(place, f"{dotted(place)} is not a finite number; give one that is.")
        for key in [name for name in MINDRLHF_GROUPS if name in top]:
            yamls = "the model YAMLs that it names (actor_config.model_config, generate_config.model_config)"
            found = f"{key}: this is MindRLHF's file of GRPO settings and no model YAML"
            self.refuse((key,), f"{found}; give {yamls}, and settings by --grpo_config.")
        for group, above in ((self.mapping(path), path), (top, ())):
            key, kind = sign_of_another(group) or ("", "")
            if key:
                found = f"{dotted((*above, key))} is {brief(group[key])}"
                raise unsupported(self.layered.where((*above, key)), found, kind)

    def group(
        self,
        settings: type[Group],
        path: KeyPath,
        spellings: Mapping[str, str] = NONE,
        fixed: Mapping[str, Collection[Any]] = NONE,
        elsewhere: Mapping[KeyPath, str] = NONE,
    ) -> Group:
        """Read one typed group.

        spellings: other name -> field. fixed: key -> the only values that keep this suite's meaning.
        elsewhere: group -> field that MindFormers keeps in that group, whose other keys are unused.
        """
        own = settings.model_fields.keys() - set(elsewhere.values())
        unused = UNUSED.get(path[-1], ())
        values: dict[str, Any] = {}
        written: dict[str, KeyPath] = {}
        for key, value in self.mapping(path).items():
            place = (*path, key)
            name = spellings.get(key, key)
            if name in own and value is not None:
                if values.get(name, value) != value:
                    other_name = f"{dotted(written[name])}, another name of the same setting"
                    found = f"{dotted(place)} is {brief(value)}, and {other_name}, is {brief(values[name])}"
                    self.refuse(place, f"{found}; keep one.")
                values[name] = value
                written[name] = place
            elif key in fixed and value not in fixed[key]:
                choices = " or ".join(repr(choice) for choice in fixed[key] if choice is not None)
                right = f"set it to {choices}" if choices else "remove it"
                found = f"{dotted(place)} is {brief(value)}"
                self.refuse(place, f"{found}, which this suite does not compute; {right}.")
            elif key in unused:
                self.unused.append(dotted(place))
            elif name not in own and key not in fixed and place not in elsewhere:
                self.refuse(place, unknown_name(key, own, dotted(path), (*spellings, *fixed, *unused)))
        for group, moved in elsewhere.items():
            for key, value in self.mapping(group).items():
                if key == moved and value is not None:
                    values[moved] = value
                    written[moved] = (*group, moved)
                elif key != moved and (*group, key) not in elsewhere:
                    self.unused.append(dotted((*group, key)))
        return build(settings, values, self.layered, written)

    def rest(self) -> tuple[str, ...]:
        """List all unused keys, also outside of our groups; refuse misspelt group names."""
        top = self.layered.values
        if not any(name in top for name in OWN_GROUPS):
            grpo = " (GRPO settings go to --grpo_config)" if set(top) & set(GRPOSettings.model_fields) else ""
            groups = ", ".join(OWN_GROUPS)
            raise UserError(f"{self.path}: none of the groups {groups} is in it; give a MindFormers model YAML{grpo}.")
        for key in [name for name in top if name not in (*OWN_GROUPS, "parallel", "lora_config")]:
            if near := nearest(key, OWN_GROUPS, cutoff=0.85):
                self.refuse((key,), f"unknown group {dotted((key,))}; did you mean {near}?")
            self.unused.append(key)
        for key in self.mapping(("model",)):
            if key in UNUSED["model"]:
                self.unused.append(f"model.{key}")
            elif key != "model_config":
                self.refuse(("model", key), unknown_name(key, ("model_config",), "model", UNUSED["model"]))
        return tuple(self.unused)


def rounds_rollouts(train: ModelYaml, infer: ModelYaml, weights: str) -> bool:
    """Tell whether products of generation have another dtype than training's.

    weights: `rollout.weights`.
    """
    return weights != "train" or train.model.compute_dtype != infer.model.compute_dtype
