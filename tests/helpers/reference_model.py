"""A Qwen or Llama decoder in float64 NumPy, written loop by loop: the independent oracle of the compiled graphs."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def frequency(config, pair):
    """The angle of one step for the pair (i, i + d/2): of Su et al. 2021, or stretched as Llama 3 does."""
    plain = config.rope_theta ** (-2.0 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    length, wave = scaling.original_max_position_embeddings, 2 * np.pi / plain
    if wave < length / scaling.high_freq_factor:
        return plain
    if wave > length / scaling.low_freq_factor:
        return plain / scaling.factor
    smooth = (length / wave - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def rotate(x, position, config):
    """x: [heads, d] at one position; pairs (i, i + d/2)."""
    d = x.shape[-1]
    angle = position * np.array([frequency(config, pair) for pair in range(d // 2)])
    first, second = x[:, : d // 2], x[:, d // 2 :]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
    )


def logits(config, tensors, ids, cached=lambda x: x, seen=None, turned=rotate, routing=None):
    """float64[S, vocab] for one unpadded sequence of token ids.

    config: mindrlhf ModelConfig; tensors: HF name -> array; cached: keys or values -> those that are attended to; seen:
    place -> row in place of an embedding; turned: (heads at a place, place, config) -> rotated heads; routing: layer ->
    each token's experts; a layer without an entry gets the experts that its router chooses.
    """
    routing = {} if routing is None else routing
    w = {name: np.asanyarray(value, np.float64) for name, value in tensors.items()}
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for place, row in (seen or {}).items():
        x[place] = row
    length, groups = len(ids), config.num_heads // config.num_kv_heads
    for layer in range(config.num_layers):
        p = f"model.layers.{layer}."
        h = rms_norm(x, w[p + "input_layernorm.weight"], config.rms_norm_eps)

        def project(name, heads, p=p, h=h):
            y = h @ w[f"{p}self_attn.{name}.weight"].T + w.get(f"{p}self_attn.{name}.bias", 0.0)
            return y.reshape(length, heads, config.head_dim)

        q, k, v = (
            project("q_proj", config.num_heads),
            project("k_proj", config.num_kv_heads),
            project("v_proj", config.num_kv_heads),
        )
        if config.qk_norm:
            q = rms_norm(q, w[p + "self_attn.q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, w[p + "self_attn.k_norm.weight"], config.rms_norm_eps)
        q = np.stack([turned(q[t], t, config) for t in range(length)])
        k, v = cached(np.stack([turned(k[t], t, config) for t in range(length)])), cached(v)
        out = np.zeros((length, config.num_heads, config.head_dim))
        for head in range(config.num_heads):
            for t in range(length):
                score = k[: t + 1, head // groups] @ q[t, head] / np.sqrt(config.head_dim)
                weight = np.exp(score - score.max())
                out[t, head] = weight / weight.sum() @ v[: t + 1, head // groups]
        x = x + out.reshape(length, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], config.rms_norm_eps)
        if f"{p}mlp.gate.weight" in w:
            x = x + experts(config, w, p, h, routing.setdefault(layer, []))
        else:
            x = x + swiglu(w, f"{p}mlp.", h)
    x = rms_norm(x, w["model.norm.weight"], config.rms_norm_eps)
    return x @ w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"].T


def swiglu(w, p, h):
    """A feed-forward half, or one expert."""
    return (activated(h @ w[p + "gate_proj.weight"].T) * (h @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T


def experts(config, w, p, h, routing=None):
    """Each token's experts, weighted by their probabilities. routing: they, or an empty list that gets them."""
    out = np.zeros_like(h)
    given = list(routing) if routing is not None else []
    for t, row in enumerate(h):
        scores = w[p + "mlp.gate.weight"] @ row
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        chosen = np.argsort(-shares, kind="stable")[: config.num_experts_per_tok]
        if given:
            chosen = given[t]
        elif routing is not None:
            routing.append(chosen)
        total = shares[chosen].sum() if config.norm_topk_prob else 1.0
        for e in chosen:
            out[t] += shares[e] / total * swiglu(w, f"{p}mlp.experts.{e}.", row)
    return out


def activated(gate):
    """Swish, of the feed-forward half."""
    return gate / (1 + np.exp(-gate))
