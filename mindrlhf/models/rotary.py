"""Rotary position embedding: frequencies, and the table of angles. NumPy only."""

import numpy as np

from mindrlhf.configs.model import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Compute each pair's angle per position: float64[head_dim / 2].

    The angle is theta^(-2i/d), scaled if the model's config has a scaling.
    Llama 3's scaling is Hugging Face's `rope_type: llama3`: a frequency that makes n full turns within the
    original context is divided by `factor` below low_freq_factor turns, kept above high_freq_factor turns, and
    interpolated in between.
    """
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotary_table(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute cos and sin of position * frequency: float32[positions, head_dim].

    Each frequency is written twice. Computed in float64 (Su et al. 2021, section 3.4.2).
    """
    frequencies = inverse_frequencies(config)
    angles = np.arange(positions)[:, None] * np.concatenate([frequencies, frequencies])[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
