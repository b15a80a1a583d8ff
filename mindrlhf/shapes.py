"""Sizes of compiled graphs and caches. Pure Python."""

from mindrlhf.configs.grpo import GRPOSettings


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def padded_prefix(prompt: int, bucket: int) -> int:
    """Compute a prompt's padded length in graphs, which take it without its last token."""
    return round_up(max(1, prompt - 1), bucket)


def longest_position(prompt: int, response: int, bucket: int) -> int:
    """Count positions of the longest prompt and response, each padded to whole buckets."""
    return round_up(prompt, bucket) + round_up(response, bucket)


def cache_positions(prompt: int, response: int, bucket: int) -> int:
    """Count a cache slot's positions for the longest prompt and response, in whole buckets."""
    return round_up(prompt + response, bucket)


def slot_count(max_slots: int, responses: int) -> int:
    """Count sequences decoded at once by an engine with this many responses to generate."""
    return max(1, min(max_slots, responses))


def pool_size(slots: int, samples: int) -> int:
    """Count prompts prefilled at once: enough to fill the slots with their samples."""
    return max(1, -(-slots // samples))


def round_responses(config: GRPOSettings, ranks: int) -> tuple[int, int]:
    """Count sampled and greedy responses of one of `ranks` data-parallel ranks in a round.

    Greedy responses are the baseline of an advantage such as remax.
    """
    prompts = max(config.data.prompts_per_step, config.dynamic_sampling.prompts_per_round or 0) // ranks
    greedy = prompts if config.algorithm.method.uses_greedy else 0
    return prompts * config.rollout.num_generations, greedy
