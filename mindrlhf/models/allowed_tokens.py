"""Tokens that generation never draws: those of images and videos.

They stand for what a prompt shows. They have no probability, neither where tokens are drawn nor in the log-probs of
reinforcement learning, so that both are of one distribution. In demonstrations they keep theirs, as in the model that
was released.
"""

import numpy as np
from mindspore import Tensor

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.composed_attention import MASKED
from mindrlhf.configs.model import ModelConfig


def never_drawn(config: ModelConfig) -> tuple[int, ...]:
    """List the tokens that generation never draws."""
    known = config.vision.vision_tokens if config.vision else ()
    return tuple(token for token in known if token < config.vocab_size)


def masked_tokens(config: ModelConfig, first: int, end: int) -> Tensor | None:
    """Build the numbers that exclude tokens from logits: float32[1, end - first].

    first, end: a rank's part of the vocabulary. None for a model that draws all tokens.
    """
    tokens = never_drawn(config)
    if not tokens:
        return None
    mask = np.zeros((1, config.vocab_size), np.float32)
    mask[0, list(tokens)] = MASKED
    return Tensor(mask[:, first:end].copy())


def without(logits, mask):
    """Exclude tokens from logits [T, V]; mask: of `masked_tokens`."""
    return logits if mask is None else logits + expand(mask, logits.shape)
