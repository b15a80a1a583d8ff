"""Sizes of a small vision tower, without the model's own numbers of tokens."""

from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.vision import VisionConfig


def small_tower(depth: int = 1, max_pixels: int = 512, **tokens: int) -> VisionConfig:
    """Whose last block has full attention. tokens: ids of the image's token and others."""
    return VisionConfig(
        depth=depth,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        patch_size=4,
        temporal_patch_size=1,
        window_size=16,
        full_attention_blocks=(depth - 1,),
        sections=(2, 1, 1),
        images=ImageSettings(min_pixels=64, max_pixels=max_pixels, patch_size=4, temporal_patch_size=1),
        **tokens,
    )
