"""Run with checked settings, from which its parts are built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.placement import ByLayout
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.flags import SFTFlags, TrainFlags
from mindrlhf.model_roles import POLICY, SCORE, RoleModel
from mindrlhf.models.parameters import parameter_count


@dataclass(frozen=True)
class Objects:
    """Objects of the calling program, which flags and settings name like files.

    datasets: rows by name. functions: reward functions by `python:NAME`.
    """

    datasets: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


NO_OBJECTS = Objects()  # a command line has none
NOT_FLAGS = ("overrides", "from_verl", "settings")  # the settings contain these


@dataclass(frozen=True)
class Job(ByLayout):
    """Run with checked settings; MindSpore has not been touched yet.

    yamls: model YAMLs by the names of layouts in `model_roles.Role`; fine-tuning has one for both. roles: the models
    of the roles that the run has, by their names (`model_roles.Role.names`).
    """

    flags: TrainFlags | SFTFlags
    config: GRPOSettings | SFTSettings
    yamls: Mapping[str, ModelYaml]
    roles: Mapping[str, RoleModel]
    tokenizer: Tokenizer
    output: Path
    objects: Objects = NO_OBJECTS

    @property
    def workers(self) -> int:
        """Number of ranks of all layouts together."""
        return len({rank for yaml in self.yamls.values() for rank in yaml.ranks})

    @property
    def splits(self) -> bool:
        """True if ranks train and generate apart (`trainer.placement`)."""
        return self.infer.first_rank > 0

    def layout(self, rank: int) -> str:
        """Return the name of a rank's layout, of several the training one."""
        return next(name for name, yaml in self.yamls.items() if rank in yaml.ranks)

    def updates(self, rank: int) -> ModelYaml:
        """Model YAML of the updates that a rank makes, if it makes any."""
        return self.yamls[SCORE] if self.layout(rank) == SCORE else self.train

    @property
    def policy(self) -> RoleModel:
        return self.roles[POLICY.name]

    @property
    def model(self) -> ModelConfig:
        """Architecture of the policy."""
        return self.policy.model

    def described(self) -> dict[str, Any]:
        """Return all settings, for people and for comparing runs."""
        flags = {name: value for name, value in vars(self.flags).items() if name not in NOT_FLAGS}
        return {
            self.config.kind: self.config.model_dump(mode="json"),
            **{f"{name}_yaml": yaml.model_dump(mode="json", exclude={"unused"}) for name, yaml in self.yamls.items()},
            "model": self.model.model_dump(mode="json"),
            "parameters": parameter_count(self.model),
            "flags": {name: str(value) for name, value in flags.items() if value is not None},
        }
