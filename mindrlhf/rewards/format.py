"""The think/answer form of DeepSeek-R1 (Guo et al. 2025, section 2.2)."""

from collections.abc import Mapping

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward 1 for `<think>...</think><answer>...</answer>`, else 0.

    Neither part may be empty, each tag stands once. A prompt that ends with `<think>` has opened the tag already.
    """
    text = "<think>" + completion if prompt.rstrip().endswith("<think>") else completion
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    pieces = []
    for tag in _TAGS:
        piece, _, text = text.partition(tag)
        pieces.append(piece.strip())
    before, thought, between, answer = pieces
    return float(bool(thought and answer) and not (before or between or text.strip()))
