"""Inputs of the decode graph, and its cache."""

import numpy as np

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.rollout import decode_graphs as graphs
from mindrlhf.rollout.sampling import rule_of


def alone(slots: int, enough: int = 0) -> tuple[np.ndarray, ...]:
    """Slots that share nothing: leaders, prefixes; with how many of them no token is begun, where they begin, and how
    many tokens are drawn of one.
    """
    call = np.array([enough, 0, graphs.FUSED_TOKENS], np.int32)
    return np.arange(slots, dtype=np.int32), np.zeros(slots, np.int32), call


def no_context(slots: int, tokens: int = graphs.FUSED_TOKENS) -> np.ndarray:
    return np.full((slots, tokens), -1, np.int32)


def no_histories(slots: int) -> np.ndarray:
    return np.full((slots, 1), -1, np.int32)


def cache_of(config, slots: int, size: int, packed: bool = False) -> graphs.Cache:
    return graphs.Cache(config.num_layers, slots, config.num_kv_heads, size, config.head_dim, packed=packed)


def drawn_by(settings: SamplingSettings, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """One rule for all slots; and no slot's tokens, which only a repetition penalty reads."""
    return np.repeat(rule_of(settings, 64)[:, None], slots, 1), np.zeros((1, 1), np.float32)
