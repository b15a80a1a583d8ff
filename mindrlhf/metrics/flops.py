"""Model FLOPs utilization (MFU): matrix products against a measured ceiling.

It counts the products that the algorithm needs, as multiplications and additions: a prompt and its images once for
their group, a response token once per pass, attention over the visible positions, without padding and recomputation.
verl counts a prompt once for each response and divides by the data sheet's number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mindrlhf.configs.model import ModelConfig
from mindrlhf.images.sizes import Grid
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.metrics.timer import COMPILE, STEP
from mindrlhf.metrics.tower_flops import tower_flops, tower_update_flops
from mindrlhf.model_roles import POLICY, RoleModel, role_of
from mindrlhf.models.parameters import tower_trains
from mindrlhf.phases import PHASES
from mindrlhf.types import Experience

MFU = "perf/mfu"
NOTHING: Mapping[str, float] = MappingProxyType({})


class GroupLengths(NamedTuple):
    """Lengths of a prompt and its answers, and the prompt's images.

    prompt, responses: tokens. times: answers of each length.
    """

    prompt: int
    responses: Sequence[int]
    times: int = 1
    images: Sequence[Grid] = ()


def forward_flops(
    model: ModelConfig, prompt: int, responses: Sequence[int], times: int = 1, images: Sequence[Grid] = ()
) -> float:
    """Count the operations of a forward pass over a prompt and its answers.

    Logits are computed at the answers only. prompt, responses: tokens. times: answers of each length. images: the
    prompt's, for a model that sees.
    """
    attention = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    width = model.hidden_size
    layers = model.num_layers
    matrices = 2 * width * (layers * (2 * attention + 2 * keys) + 3 * model.active_width)
    matrices += 2 * width * len(model.expert_layers) * model.num_experts
    head = 2 * width * (1 if model.value_head else model.vocab_size)
    answered = times * sum(responses)
    each = sum(length * prompt + length * (length + 1) / 2 for length in responses)
    seen = prompt * (prompt + 1) / 2 + times * each
    text = matrices * (prompt + answered) + head * answered + 4 * layers * attention * seen
    return text + sum(tower_flops(model, images))


def phase_flops(roles: Mapping[str, RoleModel], groups: Sequence[GroupLengths], iterations: int) -> dict[str, float]:
    """Count a step's operations by phase.

    roles: see `Job`. iterations: passes of updates over the groups. Weights under adapters and frozen ones have no
    gradients. Each model is assumed to have the policy's tokens, and verdicts their greatest length.
    """
    once: dict[str, float] = {}
    for name, one in roles.items():
        role = role_of(name).name
        once[role] = once.get(role, 0.0) + sum(_once(one, *group) for group in groups)
    images = [image for group in groups for image in group.images]
    found = {}
    for name, phase in PHASES.items():
        if not phase.passes or phase.role not in once:
            continue
        found[name] = phase.passes * once[phase.role]
        if phase.kind == "update":
            found[name] = iterations * _update(roles[phase.role].model, once[phase.role], images, phase.passes)
    return found


def _update(model: ModelConfig, once: float, images: Sequence[Grid], passes: int) -> float:
    """Count the operations of an update, whose forward pass takes `once`."""
    text = once - sum(tower_flops(model, images))
    return (passes - (not model.text_trains)) * text + tower_update_flops(model, images, passes)


def _once(one: RoleModel, prompt: int, responses: Sequence[int], times: int = 1, images: Sequence[Grid] = ()) -> float:
    """Count the operations of a pass of a model; a verdict follows each response."""
    if not one.verdict_tokens:
        return forward_flops(one.model, prompt, responses, times, images)
    return times * sum(forward_flops(one.model, prompt + length, [one.verdict_tokens]) for length in responses)


@dataclass
class Utilization:
    """Utilization of the machine: adds `perf/mfu` and its parts to a step's metrics.

    roles: see `Job`, the policy among them. ceiling: of this process, in FLOP per second. iterations: passes of updates
    over a step's groups. exceeded: factor by which a phase has been faster than the ceiling: a busy machine may have
    lowered the ceiling when it was measured. A vision tower that does not train is in no phase, because it computes an
    image in the first one that shows it: `counted` has its operations.
    """

    roles: Mapping[str, RoleModel]
    ceiling: float
    iterations: int
    exceeded: float = 1.0

    def add(
        self,
        metrics: MetricSet,
        seconds: Mapping[str, float],
        groups: Sequence[GroupLengths],
        drawn: Sequence[GroupLengths] = (),
        counted: Mapping[str, float] = NOTHING,
    ) -> None:
        """Add `perf/mfu` of the step, of generation and of each kind of update.

        seconds: phase -> seconds of this rank. groups: of this rank; none on a rank that computes a part of another
        one's work. drawn: the groups that the step has generated. counted: phase -> operations that this rank has
        counted itself. A rank that built a graph in this step is left out of the phases' values, because their seconds
        lack the graph's first run.
        """
        trained = phase_flops(self.roles, self._in_phases(groups), self.iterations)
        answered = phase_flops(self.roles, self._in_phases(drawn), self.iterations)
        whole = 0.0
        for phase, flops in (trained | {"gen": answered["gen"]} | counted).items():
            if phase not in seconds:
                continue
            whole += flops
            if PHASES[phase].mfu and not seconds.get(COMPILE):
                metrics.add(f"{MFU}/{PHASES[phase].mfu}", flops, seconds[phase] * self.ceiling)
        metrics.add(MFU, whole, seconds.get(STEP, 0.0) * self.ceiling)

    def _in_phases(self, groups: Sequence[GroupLengths]) -> Sequence[GroupLengths]:
        """Leave out the images of a tower that does not train."""
        return groups if tower_trains(self.roles[POLICY.name].model) else [one._replace(images=()) for one in groups]

    def within_ceiling(self, values: Mapping[str, float]) -> dict[str, float]:
        """Scale reduced values to the highest rate so far; earlier steps keep theirs."""
        shares = {name: value for name, value in values.items() if name.startswith(MFU)}
        self.exceeded = max((self.exceeded, *shares.values()))
        return {**values, **{name: value / self.exceeded for name, value in shares.items()}}


def group_lengths(experience: Experience) -> GroupLengths:
    """Count the tokens of an experience, and list its images."""
    group = experience.group
    pictures = (group.prompt.pictures, *(rollout.pictures.values() for rollout in group.rollouts))
    images = [picture.grid for part in pictures for picture in part]
    answers = [len(rollout.response_ids) for rollout in group.rollouts]
    return GroupLengths(len(group.prompt.token_ids), answers, images=images)
