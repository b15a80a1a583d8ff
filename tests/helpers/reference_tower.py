"""A vision tower and text with images in float64 NumPy, patch by patch: the independent oracle of models that see."""

from math import erf

import numpy as np
import reference_model
from reference_model import rms_norm


def turned(x, angles):
    """x: [heads, d]; angles: [d / 2], of the pairs (i, i + d / 2)."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def places_of(grid, merge):
    """(row, column) of each patch: squares of merge x merge patches one after the other, lines within."""
    _, rows, columns = grid
    return [
        (top + line, left + column)
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for line in range(merge)
        for column in range(merge)
    ]


def tower(vision, w, patches, grid):
    """float64[tokens, hidden] of one image. w: HF name -> float64 array; patches: [n, numbers]."""
    d, merge = vision.head_dim, vision.merge_size
    places = places_of(grid, merge)
    frequencies = 10000.0 ** (-np.arange(d // 4) / (d // 4))
    angles = np.array([[*(row * frequencies), *(column * frequencies)] for row, column in places])
    edge = vision.window_side * merge
    window = np.array([(row // edge) * 10**6 + column // edge for row, column in places])
    x = patches.astype(np.float64) @ w["visual.patch_embed.proj.weight"].reshape((vision.hidden_size, -1)).T
    for block in range(vision.depth):
        p = f"visual.blocks.{block}."

        def linear(name, x, p=p):
            return x @ w[f"{p}{name}.weight"].T + w[f"{p}{name}.bias"]

        q, k, v = np.split(linear("attn.qkv", rms_norm(x, w[p + "norm1.weight"], 1e-6)), 3, axis=1)
        out = np.zeros_like(q)
        for head in range(vision.num_heads):
            own = slice(head * d, (head + 1) * d)
            scores = turned(q[:, own], angles) @ turned(k[:, own], angles).T / np.sqrt(d)
            if block not in vision.full_attention_blocks:
                scores = np.where(window[:, None] == window[None], scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, own] = weights / weights.sum(1, keepdims=True) @ v[:, own]
        x = x + linear("attn.proj", out)
        h = rms_norm(x, w[p + "norm2.weight"], 1e-6)
        gate = linear("mlp.gate_proj", h)
        x = x + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", h))
    h = rms_norm(x, w["visual.merger.ln_q.weight"], 1e-6).reshape((len(places) // merge**2, -1))
    h = h @ w["visual.merger.mlp.0.weight"].T + w["visual.merger.mlp.0.bias"]
    h = h * 0.5 * (1 + np.vectorize(erf)(h / np.sqrt(2)))
    return h @ w["visual.merger.mlp.2.weight"].T + w["visual.merger.mlp.2.bias"]


def positions_of(ids, grids, vision):
    """(time, row, column) of each place, walked token by token."""
    found, place, grids = [], 0, iter(grids)
    position = 0
    while place < len(ids):
        if ids[place] != vision.image_token_id:
            found.append((position,) * 3)
            position, place = position + 1, place + 1
            continue
        _, rows, columns = next(grids)
        rows, columns = rows // vision.merge_size, columns // vision.merge_size
        found += [(position, position + row, position + column) for row in range(rows) for column in range(columns)]
        position, place = position + max(rows, columns), place + rows * columns
    return found


def logits(config, tensors, ids, pictures):
    """float64[S, vocab] for one sequence with images. pictures: (patches, grid) of each, in order."""
    vision = config.vision
    w = {name: np.asanyarray(value, np.float64) for name, value in tensors.items()}
    rows = np.concatenate([np.zeros((0, config.hidden_size)), *(tower(vision, w, *one) for one in pictures)])
    seen = dict(zip(np.flatnonzero(np.asarray(ids) == vision.image_token_id), rows, strict=True))
    positions = positions_of(ids, [grid for _, grid in pictures], vision)
    axes = [axis % 3 for axis, size in enumerate(vision.sections) for _ in range(size)]
    pairs = [reference_model.frequency(config, pair) for pair in range(config.head_dim // 2)]

    def rotated(x, place, _):
        return turned(x, np.array([positions[place][axis] * pair for axis, pair in zip(axes, pairs, strict=True)]))

    return reference_model.logits(config, tensors, ids, seen=seen, turned=rotated)
