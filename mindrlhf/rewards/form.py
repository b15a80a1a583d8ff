"""Rewards for a response's form (tags, length, repetitions), and its environment's reward."""

import re
from collections.abc import Mapping

from mindrlhf.rewards.answers import opens_thought

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_PARTS = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
# Words; in scripts without spaces, and for punctuation, single characters.
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")


def format(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward 1 for `<think>...</think><answer>...</answer>`, else 0 (DeepSeek-R1, Guo et al. 2025).

    Neither part may be empty, and each tag occurs once. A prompt that ends with `<think>` has opened the tag already.
    """
    text = "<think>" + completion if opens_thought(prompt) else completion
    once = all(text.count(tag) == 1 for tag in _TAGS)
    parts = _PARTS.fullmatch(text) if once else None
    return float(bool(parts and parts[1].strip() and parts[2].strip()))


def length(prompt: str, completion: str, fields: Mapping[str, str], target: int) -> float:
    """Reward 1 at `target` tokens, falling linearly on both sides, 0 from twice `target`."""
    if target < 1:
        raise ValueError(f"length: target is {target}, and must be at least 1 token")
    return max(0.0, 1.0 - abs(_tokens(fields, "response_length") - target) / target)


def soft_overlong(
    prompt: str, completion: str, fields: Mapping[str, str], buffer: int | None = None, factor: float = 1.0
) -> float:
    """Punish overlong responses softly (DAPO, Yu et al. 2025, eq. 13).

    The result is 0 up to `max_new_tokens` - buffer tokens, then falls linearly to -factor at `max_new_tokens`. buffer:
    tokens (the paper's L_cache, verl's overlong_buffer.len); None means a fifth of the limit.
    """
    limit = _tokens(fields, "max_new_tokens")
    if buffer is None:
        buffer = max(1, limit // 5)
    if not 0 < buffer <= limit:
        raise ValueError(f"soft_overlong: buffer is {buffer}, and must be between 1 and max_new_tokens, {limit}")
    excess = _tokens(fields, "response_length") - (limit - buffer)
    return -factor * min(max(excess / buffer, 0.0), 1.0)


def _tokens(fields: Mapping[str, str], name: str) -> int:
    if name not in fields:
        raise ValueError(f"the field {name!r} (tokens) is missing: the trainer sets it, a file of rows has to carry it")
    return int(fields[name])


def repetition_penalty(
    prompt: str, completion: str, fields: Mapping[str, str], ngram: int = 3, max_penalty: float = 1.0
) -> float:
    """Give -max_penalty * (1 - distinct / all) of n-grams (Yeo et al. 2025)."""
    if ngram < 1:
        raise ValueError(f"repetition_penalty: ngram is {ngram}, and must be at least 1 word")
    words = _TOKEN.findall(completion.lower())
    ngrams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
    return -max_penalty * (1.0 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0


def environment(prompt: str, completion: str, fields: Mapping[str, str]) -> float | None:
    """Give the reward of the conversation's environment, if it has one."""
    reward = fields.get("environment_reward")
    if reward == "nan":
        raise ValueError("the environment ended early, or failed to give its reward")
    return None if reward is None else float(reward)
