"""Floating-point operations that a step needs at least: every prompt once, every response token once.

A product of an [m, k] and a [k, n] matrix counts 2 * m * k * n. Counted are the layers' matrices, the head where a
logit is needed, and attention over the tokens before; not norms, activations, softmax and the optimizer. The backward
pass counts twice the forward one. Recomputation and padding are waste, and not in it.
"""

from collections.abc import Iterable, Sequence

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import parameter_table


def forward_operations(model: ModelConfig, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
    """Of one forward pass: the same for generating with a cache and for log-probs with shared prompts.

    groups: (prompt tokens P, response tokens of each sample). Positions 0..P-2 run once for all samples, the last
    prompt token once for each: it is where a response's first token is predicted.
    """
    matrices = 2.0 * sum(spec.size for spec in parameter_table(model) if spec.kind == "matrix")
    head = 2.0 * model.vocab_size * model.hidden_size
    attention = 4.0 * model.num_layers * model.num_heads * model.head_dim  # of one query for each key
    total = 0.0
    for prompt, responses in groups:
        total += (prompt - 1) * matrices + attention * _sum(1, prompt - 1)
        for length in responses:
            total += length * (matrices + head) + attention * _sum(prompt, prompt + length - 1)
    return total


def _sum(first: int, last: int) -> int:
    """first + ... + last."""
    return (last - first + 1) * (first + last) // 2
