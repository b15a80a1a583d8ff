"""Roles that models have in a run, one row each. Pure Python.

Phases, the memory plan, operations, checks, checkpoints, reports and the builder iterate over `ROLES`. The rows are in
the order in which roles are opened, and in which they score a step's responses.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.reward_models import RewardModelSettings, scoring_models
from mindrlhf.files.naming import MODEL_FOLDER
from mindrlhf.models.parameters import ParameterSpec, tower_trains

SCORE = "score"  # layout of ranks that only score, and train what scores
BESIDE = "beside"  # layout in which ranks that generate score what they drew
# Memory groups of the policy: parameters with the same part in both layouts, and the other parameters in each layout.
SHARED = "shared_weights"
TRAIN = "train_weights"
INFER = "infer_weights"
SHARED_BASE = "shared_base_weights"
TRAIN_BASE = "train_base_weights"
INFER_BASE = "infer_base_weights"
POLICY_GROUPS = {True: (SHARED, TRAIN, INFER), False: (SHARED_BASE, TRAIN_BASE, INFER_BASE)}  # by whether they train


@dataclass(frozen=True)
class Scoring:
    """Pass over a step's responses before its updates.

    phase: its name, which is its timer's. label: see `phases.Phase`. array: name in `token_arrays` of its values; None
    for scores of whole responses.
    """

    phase: str
    label: str
    array: str | None = None


@dataclass(frozen=True)
class Training:
    """Updates of a role that is trained.

    phase, label: see `Scoring`. gradients, moments: memory groups. metrics: first part of the names of its metrics.
    loss: name of its loss. moment_prefix: of the moments' kinds in a checkpoint. counter: the optimizer's name there.
    """

    phase: str
    label: str
    gradients: str
    moments: str
    metrics: str
    loss: str
    moment_prefix: str
    counter: str


@dataclass(frozen=True)
class Role:
    """Role of a model, or of several.

    title: what messages call it. weights: memory groups of its own weights. used: tests the settings of a GRPO run for
    the role. listed: reads the settings of each model there, of a role with any number of models; these are whole on
    the first rank of each replica that generates. layout: the model YAML of its layout, see `layout_in`. apart: it may
    be on ranks of its own. value_head: see `ModelConfig`. flag: names the path of its first weights, by default the
    policy's; they have the policy's architecture. setting: names the path instead; its model may have any architecture.
    settings: its group of settings. reads: further memory groups that it needs. follows: tests the settings for a model
    that follows the policy without being trained. scoring, training: None without. checkpoint: kind of its weights in
    checkpoints, if training changes them. folder: in `--save_ckpt_dir`, if it is exported. A memory group is a set of
    parameters that enter and leave memory together (`memory.residency`).
    """

    name: str
    title: str
    weights: tuple[str, ...]
    used: Callable[[Any], bool] = lambda config: True
    listed: Callable[[Any], Sequence[RewardModelSettings]] | None = None
    layout: Literal["train", "infer"] = "train"
    apart: bool = False
    value_head: bool = False
    flag: str | None = None
    setting: str | None = None
    settings: str | None = None
    reads: tuple[str, ...] = ()
    follows: Callable[[Any], bool] = lambda config: False
    scoring: Scoring | None = None
    training: Training | None = None
    checkpoint: str | None = None
    folder: str | None = None

    def layout_in(self, yamls: Container[str]) -> str:
        """Return the name of its layout in a job with these layouts."""
        if self.apart and SCORE in yamls:
            return SCORE
        return BESIDE if self.frozen_apart and BESIDE in yamls else self.layout

    @property
    def frozen_apart(self) -> bool:
        """True if it may be on the ranks that generate: it is not trained."""
        return self.apart and self.training is None

    def names(self, config: Any) -> list[str]:
        """List the names of its models in a GRPO run.

        It is the role's own name, with a number for each of several models.
        """
        if self.listed:
            return [f"{self.name}.{number}" for number in range(len(self.listed(config)))]
        return [self.name] if self.used(config) else []

    def optimizer(self, config: Any) -> Any:
        """Return the settings of its optimizer, of a role that is trained."""
        return (getattr(config, self.settings) if self.settings else config).optimizer

    def keeps_tower(self, model: ModelConfig, config: Any) -> bool:
        """Test that a run changes nothing in the vision tower of its model."""
        return not self.follows(config) and (self.training is None or not tower_trains(model))


@dataclass(frozen=True)
class RoleModel:
    """Model that has a role in a run.

    path: of its first weights; None for random ones. model: its architecture. shares: it uses the policy's weights for
    all parameters but those of its adapters. settings: of a model that scores responses.
    """

    path: str | None
    model: ModelConfig
    shares: bool = False
    settings: RewardModelSettings | None = None

    @property
    def verdict_tokens(self) -> int:
        """Longest verdict that it writes about a response; 0 if it writes none."""
        return self.settings.verdict_tokens if self.settings else 0

    def own(self, specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
        """Select the parameters that it does not share with the policy."""
        return [spec for spec in specs if spec.adapts or not self.shares]


POLICY = Role(
    "policy",
    title="policy",
    weights=(SHARED, TRAIN),
    flag="load_sft_checkpoint_train",
    reads=(SHARED_BASE, TRAIN_BASE),
    scoring=Scoring("old_log_prob", label="old log-prob", array="scored_log_probs"),
    training=Training(
        "update_actor",
        label="train",
        gradients="gradients",
        moments="moments",
        metrics="actor",
        loss="actor/loss",
        moment_prefix="",
        counter="optimizer",
    ),
    checkpoint="model",
    folder=MODEL_FOLDER,
)
REFERENCE = Role(
    "reference",
    title="reference model",
    used=lambda config: config.algorithm.beta > 0,
    apart=True,
    weights=("reference",),
    flag="load_ref_checkpoint",
    reads=POLICY.reads,
    follows=lambda config: config.algorithm.reference_sync_steps > 0,
    scoring=Scoring("ref", label="ref", array="reference_log_probs"),
    checkpoint="reference",
)
TEACHER = Role(
    "teacher",
    title="teacher",
    used=lambda config: config.algorithm.teacher is not None,
    apart=True,
    weights=("teacher",),
    setting="algorithm.teacher",
    scoring=Scoring("teacher", label="teacher", array="teacher_log_probs"),
)
CRITIC = Role(
    "critic",
    title="critic",
    used=lambda config: config.algorithm.uses_critic,
    apart=True,
    weights=("critic",),
    value_head=True,
    flag="load_critic_checkpoint",
    settings="critic",
    scoring=Scoring("values", label="values", array="values"),
    training=Training(
        "update_critic",
        label="train critic",
        gradients="critic_gradients",
        moments="critic_moments",
        metrics="critic",
        loss="critic/vf_loss",
        moment_prefix="critic_",
        counter="critic",
    ),
    checkpoint="critic",
    folder="critic",
)
GENERATOR = Role(
    "generator",
    title="generator",
    weights=(SHARED, INFER),
    layout="infer",
    flag="load_sft_checkpoint_infer",
    reads=(SHARED_BASE, INFER_BASE),
)
# Models and judges of `reward.functions`, which opens them.
REWARD_MODEL = Role(
    "reward_model",
    title="reward model",
    listed=lambda config: scoring_models(config.reward),
    weights=("reward_model",),
    layout="infer",
    settings="reward",
    scoring=Scoring("reward_model", label="reward model"),
)
ROLES: Mapping[str, Role] = MappingProxyType(
    {role.name: role for role in (REFERENCE, TEACHER, POLICY, CRITIC, GENERATOR, REWARD_MODEL)}
)
TRAINED = tuple(role for role in ROLES.values() if role.training)
SAVED = tuple(role for role in ROLES.values() if role.checkpoint)
EXPORTED = tuple(role for role in ROLES.values() if role.folder)


def role_of(name: str) -> Role:
    """Return the role of a model in a run by the model's name (`Role.names`)."""
    return ROLES[name.partition(".")[0]]


def arrays_beside(names: Iterable[str], layouts: Container[str]) -> list[str]:
    """List the arrays that models on ranks that generate compute of what these drew.

    names: of the models of a run.
    """
    return [role.scoring.array for role in map(role_of, names) if role.layout_in(layouts) == BESIDE]
