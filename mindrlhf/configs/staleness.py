"""Checks of settings for answers of older weights, and what is said of them."""

from collections.abc import Container, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.reward_models import MODEL_REWARDS
from mindrlhf.errors import UserError

# Settings for rollouts of another distribution than the policy's that is updated: rounded otherwise, or older.
CORRECTION: Mapping[str, Any] = MappingProxyType({"rollout_correction": {"level": "token"}})


def check_staleness(config: GRPOSettings) -> None:
    """Check that log-probs read before updates are those of the current weights."""
    algorithm = config.algorithm
    staleness = config.trainer.staleness
    if staleness and algorithm.reads_policy and algorithm.updates_per_iteration == 1:
        readers = {
            "algorithm.policy_loss": POLICY_LOSSES.find(algorithm.policy_loss).selects,
            "algorithm.advantage": algorithm.method.uses_teacher,
            "algorithm.kl_in_reward": algorithm.kl_in_reward,
            "algorithm.kl_target": algorithm.kl_target is not None,
        }
        key = next(key for key, reads in readers.items() if reads)
        found = f"{key} is {attrgetter(key)(config)}, which reads log-probs of the weights that an update starts from"
        right = "set algorithm.updates_per_iteration to 2 or more, or trainer.staleness to 0"
        raise UserError(f"trainer.staleness is {staleness}, and {found}; {right}.")


def check_parts(config: GRPOSettings) -> None:
    """Check that answers can be drawn in parts, where `rollout.tokens_per_step` asks for it."""
    tokens = config.rollout.tokens_per_step
    if tokens is None:
        return
    given = f"rollout.tokens_per_step is {tokens}"
    if not config.trainer.staleness:
        found = "it limits what is drawn ahead of the step that trains on it, and trainer.staleness is 0"
        raise UserError(f"{given}; {found}; set trainer.staleness to 1 or more.")


def scores_later(config: GRPOSettings, own: Container[str]) -> bool:
    """Test that scores may come in a later step than answers.

    Nothing else waits for them, and all reward functions run in other processes. own: names of functions of this one.
    """
    apart = not any(one.name in MODEL_REWARDS or one.name in own for one in config.reward.functions)
    waiting = config.dynamic_sampling.enabled or config.algorithm.method.uses_greedy or config.rollout.environment
    return config.trainer.staleness > 1 and apart and not waiting


def said_of_staleness(config: GRPOSettings) -> str:
    """Say in one sentence how old answers are, and what corrects for it."""
    steps = config.trainer.staleness
    correction = config.rollout_correction
    before = f"weights of {'up to ' if config.rollout.tokens_per_step else ''}{steps} step{'s' * (steps > 1)} before"
    old = f"trainer.staleness {steps}: answers are drawn with {before}"
    if tokens := config.rollout.tokens_per_step:
        old += f", in parts: equal shares of {tokens} tokens a step, its own answers whole (rollout.tokens_per_step)"
    if correction.level is None:
        return f"{old}, and rollout_correction.level null does not correct for it"
    weights = f"{correction.level} importance weights, mode {correction.mode}, up to {correction.upper:g}"
    return f"{old}; rollout_correction corrects for it by {weights}"
