"""Sizes of a reward model's graphs and of a judge's cache. Pure Python."""

from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings
from mindrlhf.shapes import cache_positions, longest_position

BUCKET = 32  # tokens; lengths are padded to multiples
VERDICT_SLOTS = 16  # verdicts that are written at once


def score_positions(settings: RewardModelSettings) -> int:
    """Count positions of padded conversations, whose answers may begin anywhere."""
    return longest_position(settings.max_length, settings.max_length + 1, BUCKET)


def verdict_positions(settings: JudgeSettings) -> int:
    """Count positions of a conversation and a judge's verdict."""
    return longest_position(settings.max_length, settings.max_new_tokens, BUCKET)


def verdict_cache(settings: JudgeSettings) -> int:
    """Count positions of a slot of the judge's cache."""
    return cache_positions(settings.max_length, settings.max_new_tokens, BUCKET)
