"""Checks of the algorithm's settings against one another.

Each failure is one sentence that names the remedy.
"""

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.algorithms.methods import Methods, unknown_name
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError
from mindrlhf.user_functions import is_user_function


def check_algorithm(config: GRPOConfig, infer: ModelYaml) -> None:
    """Check names, options and requirements of the algorithm. Raises UserError.

    Names are known, options belong to their methods, and a method has the inputs that it needs.
    """
    algorithm = config.algorithm
    if algorithm.aggregation not in MODES:
        raise unknown_name("aggregation", algorithm.aggregation, MODES)
    _check_options(algorithm, "advantage", ADVANTAGES)
    _check_options(algorithm, "policy_loss", POLICY_LOSSES)
    _check_rewards(algorithm)
    _check_kl(algorithm)
    _check_bounds(config)
    _check_sampling(config, infer)


def _check_options(algorithm: AlgorithmSettings, setting: str, methods: Methods) -> None:
    """Check the method named by `algorithm.<setting>` and its options.

    A policy loss of the user's own may import MindSpore: it is checked when it is made.
    """
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


def _check_rewards(algorithm: AlgorithmSettings) -> None:
    if algorithm.normalize_functions and algorithm.kl_in_reward:
        raise UserError(
            "algorithm.normalize_functions normalises the reward functions, and algorithm.kl_in_reward adds a term "
            "that belongs to none of them; set kl_in_reward to False."
        )


def _check_kl(algorithm: AlgorithmSettings) -> None:
    if algorithm.beta > 0:
        return
    for setting, on in (
        ("kl_in_reward", algorithm.kl_in_reward),
        ("kl_target", algorithm.kl_target is not None),
        ("reference_sync_steps", algorithm.reference_sync_steps > 0),
    ):
        if on:
            raise UserError(
                f"algorithm.{setting} is {getattr(algorithm, setting)}, and algorithm.beta 0 means that there is no "
                f"reference model; set beta above 0, or remove {setting}."
            )


def _check_bounds(config: GRPOConfig) -> None:
    correction, algorithm = config.rollout_correction, config.algorithm
    if correction.lower > correction.upper:
        raise UserError(
            f"rollout_correction.lower is {correction.lower:g}, above rollout_correction.upper {correction.upper:g}; "
            f"set it to {correction.upper:g} or less."
        )
    low, high = algorithm.clip_cov_lb, algorithm.clip_cov_ub
    if low is not None and high is not None and low >= high:
        raise UserError(f"algorithm.clip_cov_lb is {low:g}, not below algorithm.clip_cov_ub {high:g}; lower it.")
    buffer, limit = config.reward.overlong_buffer, config.rollout.max_new_tokens
    if buffer is not None and buffer > limit:
        raise UserError(
            f"reward.overlong_buffer is {buffer}, more than rollout.max_new_tokens {limit}; set it to {limit} or fewer."
        )


def _check_sampling(config: GRPOConfig, infer: ModelYaml) -> None:
    sampling, prompts = config.dynamic_sampling, config.data.prompts_per_step
    if not sampling.enabled:
        return
    if config.rollout.num_generations == 1:
        raise UserError(
            "dynamic_sampling.enabled asks for groups whose rewards differ, and rollout.num_generations is 1; "
            "set it to 2 or more."
        )
    names = [function.name.rpartition(":")[2] for function in config.reward.all_functions]
    if sampling.metric is not None and sampling.metric not in names:
        raise UserError(
            f"dynamic_sampling.metric is {sampling.metric!r}, which is none of reward.functions; "
            f"give one of {', '.join(names)}."
        )
    size = sampling.prompts_per_round or prompts
    ranks = infer.parallel.data_parallel
    if size % ranks:
        raise UserError(
            f"dynamic_sampling.prompts_per_round is {size}, which the data_parallel {ranks} of {infer.path} does not "
            f"divide; set it to {max(1, size // ranks) * ranks}."
        )
    if size * sampling.max_rounds < prompts:
        raise UserError(
            f"dynamic_sampling: {sampling.max_rounds} rounds of {size} prompts are fewer than data.prompts_per_step "
            f"{prompts}; set max_rounds to {-(-prompts // size)} or more."
        )
