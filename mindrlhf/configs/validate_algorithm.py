"""Checks of the algorithm's settings against one another."""

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.algorithms.methods import Methods, unknown_name
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.errors import UserError
from mindrlhf.user_functions import is_user_function


def check_algorithm(algorithm: AlgorithmSettings) -> None:
    """Check names, options and requirements of the algorithm. Raises UserError."""
    if algorithm.aggregation not in MODES:
        raise unknown_name("aggregation", algorithm.aggregation, MODES)
    _check_options(algorithm, "advantage", ADVANTAGES)
    _check_options(algorithm, "policy_loss", POLICY_LOSSES)
    if algorithm.normalize_functions and algorithm.kl_in_reward:
        raise UserError(
            "algorithm.normalize_functions normalises the reward functions, and algorithm.kl_in_reward adds a term "
            "that belongs to none of them; set kl_in_reward to False."
        )
    for setting in ("kl_in_reward", "kl_target", "reference_sync_steps"):
        if algorithm.beta == 0 and getattr(algorithm, setting):
            raise UserError(
                f"algorithm.{setting} is {getattr(algorithm, setting)}, and algorithm.beta 0 means that there is no "
                f"reference model; set beta above 0, or remove {setting}."
            )
    low, high = algorithm.clip_cov_lb, algorithm.clip_cov_ub
    if None not in (low, high) and low >= high:
        raise UserError(f"algorithm.clip_cov_lb is {low:g}, not below algorithm.clip_cov_ub {high:g}; lower it.")


def _check_options(algorithm: AlgorithmSettings, setting: str, methods: Methods) -> None:
    """Check a method and its options; a user's policy loss is checked later."""
    name = getattr(algorithm, setting)
    taken = {}
    if name in methods or methods is ADVANTAGES or not is_user_function(name):
        method = methods.find(name)
        taken = method.options
        method.checked(algorithm.options_of(method))
    for key, takers in methods.offered().items():
        if getattr(algorithm, key) is not None and key not in taken:
            raise UserError(
                f"algorithm.{key} is {getattr(algorithm, key)!r}, and algorithm.{setting} {name!r} has no such option "
                f"(it belongs to {' and '.join(takers)}); remove it."
            )
