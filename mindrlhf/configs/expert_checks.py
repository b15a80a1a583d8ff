"""Checks of settings for experts; each raises UserError."""

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError


def check_experts(config: GRPOSettings, infer: ModelYaml, model: ModelConfig) -> None:
    """Check the settings of a GRPO run that concern experts."""
    check_routing_replay(config, model)
    check_spread_generation(infer, config.rollout.weights)


def check_routing_replay(config: GRPOSettings, model: ModelConfig) -> None:
    """Check that a routing can be replayed.

    There are experts, and one policy chose those of a step.
    """
    replay = config.rollout.routing_replay
    if replay == "off":
        return
    if not model.expert_layers:
        found = f"rollout.routing_replay is {replay}, and the model of the family {model.family} has no experts"
        raise UserError(f"{found}; set it to off.")
    if replay == "old" and config.dynamic_sampling.enabled:
        found = "rollout.routing_replay is old, and dynamic_sampling.enabled carries groups over from earlier policies"
        raise UserError(f"{found}; set it to rollout.")


def check_expert_parallel(yaml: ModelYaml, model: ModelConfig) -> None:
    """Check that `expert_parallel` divides the data-parallel ranks and the experts."""
    ranks = yaml.parallel.expert_parallel
    replicas = yaml.parallel.data_parallel
    found = f"{yaml.path}: parallel_config.expert_parallel is {ranks}"
    if ranks > 1 and not model.expert_layers:
        raise UserError(f"{found}, and the model of the family {model.family} has no experts; set it to 1.")
    limits = {"data_parallel": replicas, "num_experts": model.num_experts or ranks}
    for name, size in limits.items():
        if size % ranks:
            right = [str(one) for one in range(1, ranks) if not any(each % one for each in limits.values())]
            raise UserError(f"{found}, which does not divide {name} {size}; set it to {' or '.join(right)}.")


def check_spread_generation(infer: ModelYaml, weights: str) -> None:
    """Check that experts that are spread over ranks generate with the trained weights.

    weights: `rollout.weights`.
    """
    if weights != "train":
        right = "set weights to train, or expert_parallel to 1"
        _refuse_spread(infer, f"rollout.weights is {weights}", "which generates with the trained weights only", right)


def check_spread_dropout(yaml: ModelYaml, dropout: float) -> None:
    """Check that adapters on spread experts have no dropout."""
    if dropout:
        found = f"lora.dropout is {dropout:g}"
        _refuse_spread(yaml, found, "whose rows have no masks", "set one of them to its default")


def _refuse_spread(yaml: ModelYaml, given: str, reason: str, right: str) -> None:
    """Refuse a setting where experts are spread over ranks. Raises UserError."""
    ranks = yaml.parallel.expert_parallel
    if ranks > 1:
        found = f"{given}, and {yaml.path} has parallel_config.expert_parallel {ranks}, {reason}"
        raise UserError(f"{found}; {right}.")
