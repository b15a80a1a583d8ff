"""Operators and decoders in float64, with gradients, by their published formulas.

Symbols as in `backend.operators`: N prompts, G samples of each, P prefix positions, R completion positions, K key-value
heads, Q query heads for each, D head_dim. Rows that nothing reads (padding) are 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.acceptance.float64 import Node, concat, exp, log_softmax, softmax
from mindrlhf.configs.lora import LAYERS
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.expert_layers import EXPERT_MAPS, ROUTER
from mindrlhf.models.parameters import EMBEDDING, FINAL_NORM, HEAD

Split = tuple[int, int, int, int]  # N, P, G, R


def rms_norm(x: Node, weight: Node, eps: float) -> Node:
    """Compute x * weight / sqrt(mean(x^2) + eps).

    Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    return x * ((x * x).mean(-1) + eps) ** -0.5 * weight


def swiglu(gate: Node, up: Node) -> Node:
    """Compute gate * sigmoid(gate) * up (Shazeer 2020, arXiv:2002.05202, eq. 5)."""
    return gate * (exp(-gate) + 1.0) ** -1.0 * up


def rotary(x: Node, cos: np.ndarray, sin: np.ndarray) -> Node:
    """Rotate the pairs (i, i + d/2) by position.

    x: [T, heads, d]; cos, sin: [T, d / 2]. Su et al. 2021, arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos = cos[:, None]
    sin = sin[:, None]
    return concat([first * cos - second * sin, second * cos + first * sin], -1)


def angles(config: ModelConfig, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute cos and sin [T, D / 2] at positions.

    With Llama 3's scaling, if the model has it.
    """
    frequencies = np.array([_frequency(config, pair) for pair in range(config.head_dim // 2)])
    turned = np.asarray(positions)[:, None] * frequencies[None]
    return np.cos(turned), np.sin(turned)


def _frequency(config: ModelConfig, pair: int) -> float:
    plain = config.rope_theta ** (-2.0 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    if turns > scaling.high_freq_factor:
        return plain
    if turns < scaling.low_freq_factor:
        return plain / scaling.factor
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return share * plain + (1 - share) * plain / scaling.factor


def attention(query: Node, key: Node, value: Node, allowed: np.ndarray, scale: float) -> Node:
    """Attend from queries to keys and values where it is allowed.

    query: [S, K * Q, D]; key, value: [S2, K, D]; allowed: bool[S, S2]. Returns [S, K * Q * D].
    """
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        own = head // groups
        scores = query[:, head] @ key[:, own].T * scale + np.where(allowed, 0.0, -np.inf)
        heads.append(softmax(scores) @ value[:, own])
    return concat(heads, -1)


def causal(queries: int, before: int = 0) -> np.ndarray:
    """Make the mask of queries that see `before` keys, and themselves."""
    return np.tri(queries, before + queries, before, dtype=bool)


def group_attention(
    query: Node, key: Node, value: Node, split: Split, lengths: tuple[Sequence[int], Sequence[int]], scale: float
) -> Node:
    """Attend within prompts, and from completions to their prompt and themselves.

    Returns [T, K * Q * D].

    query [T, K * Q, D], key and value [T, K, D], prompts first; lengths: tokens of prompts [N] and completions [N * G].
    """
    n, p, g, r = split
    width = query.shape[1] * query.shape[2]
    parts = []
    for i, length in enumerate(lengths[0]):
        rows = slice(i * p, i * p + length)
        if length:
            parts.append(attention(query[rows], key[rows], value[rows], causal(length), scale))
        parts.append(Node(np.zeros((p - length, width))))
    for i, length in enumerate(lengths[1] if g else ()):
        start = n * p + i * r
        rows = slice(start, start + length)
        prompt = slice(i // g * p, i // g * p + lengths[0][i // g])
        keys = concat([key[prompt], key[rows]])
        values = concat([value[prompt], value[rows]])
        if length:
            parts.append(attention(query[rows], keys, values, causal(length, lengths[0][i // g]), scale))
        parts.append(Node(np.zeros((r - length, width))))
    return concat(parts)


@dataclass(frozen=True)
class Rows:
    """Rows of a batch: N prompts with G completions each.

    split: (N, P, G, R). lengths: tokens of prompts [N] and of completions [N * G]. ids, positions: int[T].
    """

    split: Split
    lengths: tuple[Sequence[int], Sequence[int]]
    ids: np.ndarray
    positions: np.ndarray

    @property
    def real(self) -> np.ndarray:
        """True on rows that are no padding: bool[T]."""
        n, p, g, r = self.split
        prompts = np.arange(p) < np.reshape(self.lengths[0], (n, 1))
        completions = np.arange(r) < np.reshape(self.lengths[1], (n * g, 1))
        return np.concatenate([prompts.ravel(), completions.ravel()])


class Reference:
    """Decoder in float64; weights: by our names."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, np.ndarray]):
        self.config = config
        self.weights = {name: Node(array) for name, array in weights.items()}

    def __getitem__(self, name: str) -> Node:
        return self.weights[name]

    def embed(self, rows: Rows) -> Node:
        return self[EMBEDDING][rows.ids]

    def attention_half(self, layer: int, x: Node, rows: Rows) -> Node:
        """Compute x + wo(attention(norm(x))) on x [T, hidden]."""
        config = self.config
        prefix = f"{LAYERS}{layer}.attention"
        h = rms_norm(x, self[f"{LAYERS}{layer}.attention_norm.weight"], config.rms_norm_eps)
        cos, sin = angles(config, rows.positions)

        def projected(name: str, heads: int) -> Node:
            y = h @ self[f"{prefix}.{name}.weight"].T
            bias = self.weights.get(f"{prefix}.{name}.bias")
            return (y if bias is None else y + bias).reshape(-1, heads, config.head_dim)

        def normed(y: Node, name: str) -> Node:
            weight = self.weights.get(f"{prefix}.{name}.weight")
            return y if weight is None else rms_norm(y, weight, config.rms_norm_eps)

        query = rotary(normed(projected("wq", config.num_heads), "q_norm"), cos, sin)
        key = rotary(normed(projected("wk", config.num_kv_heads), "k_norm"), cos, sin)
        value = projected("wv", config.num_kv_heads)
        y = group_attention(query, key, value, rows.split, rows.lengths, config.head_dim**-0.5)
        return x + y @ self[f"{prefix}.wo.weight"].T

    def feed_forward_half(self, layer: int, x: Node) -> Node:
        """Compute x + the feed-forward map, dense or of experts, of norm(x)."""
        prefix = f"{LAYERS}{layer}."
        h = rms_norm(x, self[f"{prefix}ffn_norm.weight"], self.config.rms_norm_eps)
        if f"{prefix}{ROUTER}.weight" in self.weights:
            return x + self._experts(prefix, h)
        w1, w3, w2 = (self[f"{prefix}feed_forward.{name}.weight"] for name in ("w1", "w3", "w2"))
        return x + swiglu(h @ w1.T, h @ w3.T) @ w2.T

    def _experts(self, prefix: str, h: Node) -> Node:
        """Sum the outputs of each row's experts, weighted by their probabilities."""
        config = self.config
        shares = softmax(h @ self[f"{prefix}{ROUTER}.weight"].T)
        chosen = np.argsort(-shares.value, axis=1, kind="stable")[:, : config.num_experts_per_tok]
        kept = np.zeros(shares.shape)
        np.put_along_axis(kept, chosen, 1.0, axis=1)
        used = shares * kept
        if config.norm_topk_prob:
            used = used / used.sum(1, keepdims=True)
        w1, w3, w2 = (self[f"{prefix}{EXPERT_MAPS[name]}.weight"] for name in ("w1", "w3", "w2"))
        total = Node(np.zeros(h.shape))
        for expert in range(config.num_experts):
            out = swiglu(h @ w1[expert].T, h @ w3[expert].T) @ w2[expert].T
            total = total + out * used[:, expert : expert + 1]
        return total

    def halves(self, rows: Rows) -> dict[str, Node]:
        """Compute the rows after the embedding and after each half, by name."""
        x = self.embed(rows)
        found = {"embedding": x}
        for layer in range(self.config.num_layers):
            x = found[f"layer {layer} attention"] = self.attention_half(layer, x, rows)
            x = found[f"layer {layer} feed-forward"] = self.feed_forward_half(layer, x)
        return found

    def logits(self, rows: Rows) -> Node:
        """Compute the logits of the completions: [N * G * R, vocabulary]."""
        n, p, _, _ = rows.split
        x = list(self.halves(rows).values())[-1][n * p :]
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        return rms_norm(x, self[FINAL_NORM], self.config.rms_norm_eps) @ self[head].T

    def log_probs(self, rows: Rows, targets: np.ndarray, temperature: float = 1.0) -> Node:
        """Compute the log-probs of targets int[N * G * R] at the completions' rows."""
        return log_softmax(self.logits(rows) * (1.0 / temperature))[np.arange(targets.size), targets.reshape(-1)]

    def routing_margin(self, rows: Rows) -> float:
        """Compute the smallest distance in logits of chosen experts from others.

        It is infinite for a model without experts. Routing is the same on a device whose error is well below.
        """
        margins = [np.inf]
        halves = self.halves(rows)
        for layer in self.config.expert_layers:
            prefix = f"{LAYERS}{layer}."
            x = halves[f"layer {layer} attention"]
            h = rms_norm(x, self[f"{prefix}ffn_norm.weight"], self.config.rms_norm_eps)
            scores = np.sort((h @ self[f"{prefix}{ROUTER}.weight"].T).value[rows.real], axis=1)
            place = self.config.num_experts - self.config.num_experts_per_tok
            margins.append(float((scores[:, place] - scores[:, place - 1]).min()))
        return min(margins)
