"""How large the cache of an engine is. Pure Python."""

from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.training.batch import round_up


def slot_count(max_slots: int, responses: int) -> int:
    """Sequences decoded at once by an engine that has so many responses to give at a time."""
    return max(1, min(max_slots, responses))


def cache_positions(max_prompt: int, max_new_tokens: int, bucket: int) -> int:
    """Positions of one slot: the longest prompt and response, in whole buckets."""
    return round_up(max_prompt + max_new_tokens, bucket)


def round_responses(config: GRPOConfig, ranks: int) -> tuple[int, int]:
    """Responses that one of `ranks` data-parallel ranks gives in a round, and how many of them greedily beside these.

    Greedy ones are the baseline of an advantage such as remax.
    """
    prompts = max(config.data.prompts_per_step, config.dynamic_sampling.prompts_per_round or 0) // ranks
    greedy = prompts if config.algorithm.method.uses_greedy else 0
    return prompts * config.rollout.num_generations, greedy
