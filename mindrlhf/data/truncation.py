"""Limits of length: rows that are too long are refused, cut or dropped."""

from mindrlhf.errors import UserError

TRUNCATIONS = ("error", "left", "right", "drop")

TokenPair = tuple[list[int], list[int]]  # a prompt and its answer, with its end token or empty


def fit(
    where: str,
    pair: TokenPair,
    max_prompt_length: int | None,
    seq_length: int | None,
    truncation: str,
    prefix: str = "--",
) -> TokenPair | None:
    """Apply the length limits: a fitting row returns unchanged, None drops it.

    max_prompt_length: maximum tokens of the prompt; seq_length: of both. None is no limit. truncation: one of
    TRUNCATIONS. prefix: beginning of the limits' names in messages. Raises UserError for an empty prompt, and for a
    longer row with `error`.
    """
    prompt, answer = pair
    whole = len(prompt) + len(answer)
    if not prompt:
        raise UserError(f"{where}: the prompt is empty; give it a text, or mend the template.")
    if max_prompt_length is not None and len(prompt) > max_prompt_length:
        excess = f"the prompt has {len(prompt)} tokens, more than {prefix}max_prompt_length {max_prompt_length}"
    elif seq_length is not None and whole > seq_length:
        excess = f"the prompt with its answer has {whole} tokens, more than {prefix}seq_length {seq_length}"
    else:
        return pair
    if truncation == "error":
        raise UserError(f"{where}: {excess}; raise it, or set {prefix}truncation to left, right or drop.")
    if truncation == "drop":
        return None
    limit = len(prompt) if max_prompt_length is None else max_prompt_length
    prompt = prompt[-limit:] if truncation == "left" else prompt[:limit]
    return prompt, answer if seq_length is None else answer[: seq_length - len(prompt)]
