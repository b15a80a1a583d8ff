"""Rewards for response length in tokens, as the trainer counted them.

The count is the field `response_length`.
"""

from collections.abc import Mapping


def length(prompt: str, completion: str, fields: Mapping[str, str], target: int) -> float:
    """Reward a response's distance from `target` tokens.

    The reward is 1 at `target`, falls in proportion to the distance, and is 0 at none and from twice the target on.
    """
    if target < 1:
        raise ValueError(f"length: target is {target}, and must be at least 1 token")
    return max(0.0, 1.0 - abs(_tokens(fields, "response_length") - target) / target)


def soft_overlong(
    prompt: str, completion: str, fields: Mapping[str, str], buffer: int | None = None, factor: float = 1.0
) -> float:
    """Punish overlong responses softly (DAPO, Yu et al. 2025, eq. 13).

    The result is 0 or negative, times `factor`:
    0 up to `max_new_tokens` - buffer tokens, from there a straight ramp down to -factor at `max_new_tokens`.
    buffer: tokens (the paper's L_cache, verl's overlong_buffer.len); by default a fifth of the limit, as there.
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
