"""Vision tower of a model that sees, and its keys in an HF `config.json`."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mindrlhf.configs.base import Settings
from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.problems import brief, build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError

TEXT_GROUP, TOWER_GROUP = "text_config", "vision_config"
SECTIONS = "mrope_section"
SECTIONED = "mrope"  # HF's `type` of rotary settings with sections
SHARED_SIZES = ("patch_size", "merge_size", "temporal_patch_size")
"""Sizes that the tower and the processor of its images both name."""
OF_THE_WHOLE = (
    *("model_type", "architectures", "tie_word_embeddings"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
)
"""Keys that hold at the top of a file, where they are there: the text's group has another meaning or defaults."""
MOST_SIZE = 1 << 20

# Field -> key of HF's group of the tower.
TOWER_KEYS = {
    "depth": "depth",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_heads",
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
    "window_size": "window_size",
    "full_attention_blocks": "fullatt_block_indexes",
    "tokens_per_second": "tokens_per_second",
}
# Field -> key at the top of HF's file.
TOKEN_KEYS = {
    "image_token_id": "image_token_id",
    "video_token_id": "video_token_id",
    "vision_start_token_id": "vision_start_token_id",
    "vision_end_token_id": "vision_end_token_id",
    "vision_token_id": "vision_token_id",
}
# Field -> the token's text, in the family's tokenizers.
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "vision_token_id": "<|vision_pad|>",
}
CHANNELS = 3
CHANNEL_KEYS = ("in_chans", "in_channels")  # of released files, and as transformers reads it
OUT_KEY = "out_hidden_size"

PartName = Literal["vision", "merger", "text"]
"""Part of a model that sees: the tower, the merger behind it, the decoder."""

Size = Annotated[int, Field(ge=1, le=MOST_SIZE)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class VisionConfig(Settings):
    """Vision tower with windows, image tokens, and sections of the text's rotary angles."""

    depth: Annotated[int, Field(ge=1, le=1 << 12)] = Field(32, description="Blocks of the tower.")
    hidden_size: Size = Field(3584, description="Width of the tower.")
    intermediate_size: Size = Field(3420, description="Width of the tower's feed-forward layers.")
    num_heads: Size = Field(16, description="Heads of the tower.")
    patch_size: Size = Field(14, description="Side of a patch, in pixels.")
    merge_size: Size = Field(2, description="Side of the square of patches that is one token.")
    temporal_patch_size: Size = Field(2, description="Frames of a patch.")
    window_size: Size = Field(112, description="Side of an attention window, in pixels.")
    full_attention_blocks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (7, 15, 23, 31), description="Blocks that attend to the whole image, by index."
    )
    tokens_per_second: Size = Field(4, description="Time positions of a second of video; still images have none.")
    image_token_id: Token = Field(151655, description="Token that stands for a piece of an image.")
    video_token_id: Token = Field(151656, description="Token that stands for a piece of a video.")
    vision_start_token_id: Token = Field(151652, description="Token before an image.")
    vision_end_token_id: Token = Field(151653, description="Token after an image.")
    vision_token_id: Token | None = Field(None, description="Further token of images, which the model never writes.")
    images: ImageSettings | None = Field(None, description="Preparation of images, of the checkpoint's processor.")
    sections: tuple[Size, ...] = Field(description="Pairs of the text's rotary angles: time, row, column in turn.")

    @model_validator(mode="after")
    def _divisible(self):
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            found = f"hidden_size {self.hidden_size} with num_heads {self.num_heads}"
            raise ValueError(f"{found} gives no heads of a multiple of 4, which rows and columns share")
        if self.window_side < 1:
            raise ValueError(f"window_size {self.window_size} is below one token of {self.token_pixels} pixels")
        for key in SHARED_SIZES:
            if self.images and getattr(self.images, key) != getattr(self, key):
                found = f"{key} is {getattr(self.images, key)} for images and {getattr(self, key)} in the tower"
                raise ValueError(f"{found}; give the checkpoint's own files")
        return self

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def token_pixels(self) -> int:
        """Side of a token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def window_side(self) -> int:
        """Side of an attention window, in tokens."""
        return self.window_size // self.merge_size // self.patch_size

    @property
    def window_patches(self) -> int:
        """Patches of an attention window."""
        return (self.window_side * self.merge_size) ** 2

    @property
    def whole_blocks(self) -> int:
        """Number of blocks that attend to the whole image."""
        return len({*self.full_attention_blocks} & {*range(self.depth)})

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of a patch."""
        return CHANNELS, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def vision_tokens(self) -> tuple[int, ...]:
        """Tokens that a prompt's images have, and an answer must not."""
        ids = (getattr(self, field) for field in TOKEN_KEYS)
        return tuple(sorted({token for token in ids if token is not None}))

    def image_text(self, id_to_token: Callable[[int], str | None]) -> str:
        """Write an image as a text, with one token for all of it.

        id_to_token: of the tokenizer.
        """
        tokens = (self.vision_start_token_id, self.image_token_id, self.vision_end_token_id)
        return "".join(id_to_token(token) or "" for token in tokens)

    def to_hf(self, text_width: int) -> dict[str, Any]:
        """Build the keys of an HF `config.json`, in the layout of released files.

        text_width: of the text's residual stream.
        """
        tower = {key: getattr(self, field) for field, key in TOWER_KEYS.items()}
        tower |= {
            "fullatt_block_indexes": list(self.full_attention_blocks),
            "spatial_patch_size": self.patch_size,
            OUT_KEY: text_width,
            CHANNEL_KEYS[0]: CHANNELS,
            "hidden_act": "silu",
        }
        tokens = {key: getattr(self, field) for field, key in TOKEN_KEYS.items()}
        return {
            **{key: token for key, token in tokens.items() if token is not None},
            TOWER_GROUP: tower,
            "rope_scaling": {"type": SECTIONED, SECTIONS: list(self.sections)},
        }


def flattened(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Put the text's group of a `config.json` at the top.

    Released files have its keys there; transformers 5 writes the group. Of keys in both places the group's hold, except
    `OF_THE_WHOLE`.
    """
    group = raw.get(TEXT_GROUP) or {}
    if not isinstance(group, Mapping):
        raise UserError(f"{where}: {TEXT_GROUP} is {brief(group)}, and must be an object.")
    top = {key: value for key, value in raw.items() if key != TEXT_GROUP}
    whole = {key for key in OF_THE_WHOLE if top.get(key) is not None}
    return {**top, **{key: value for key, value in group.items() if value is not None and key not in whole}}


def with_image_settings(vision: VisionConfig, images: ImageSettings, where: str) -> VisionConfig:
    """Add the preparation of images. Raises UserError if it makes patches of other sizes."""
    values = dict(vision) | {"images": images}
    return build(VisionConfig, values, Layer(values, {(): where}), strict=False)


def read_vision(raw: Mapping[str, Any], text_width: Any, where: str) -> VisionConfig:
    """Read the tower, the image tokens and the rotary sections of a flat `config.json`.

    Raises UserError for a tower that computes something else.
    """
    tower = raw.get(TOWER_GROUP)
    if not isinstance(tower, Mapping):
        raise UserError(f"{where}: {TOWER_GROUP} is {brief(tower)}, and must be an object, the vision tower's sizes.")
    channels = next((tower[key] for key in CHANNEL_KEYS if tower.get(key) is not None), CHANNELS)
    if channels != CHANNELS:
        raise UserError(f"{where}: {TOWER_GROUP}.{CHANNEL_KEYS[0]} is {brief(channels)}, and must be {CHANNELS}.")
    if tower.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: {TOWER_GROUP}.hidden_act is {brief(tower['hidden_act'])}, and must be 'silu'.")
    width = tower.get(OUT_KEY)
    if width is not None and width != text_width:
        found = f"{TOWER_GROUP}.{OUT_KEY} is {brief(width)}"
        raise UserError(f"{where}: {found}, and must be the text's hidden_size {brief(text_width)}.")
    groups = (raw.get(key) for key in ("rope_parameters", "rope_scaling"))
    sections = next((group[SECTIONS] for group in groups if isinstance(group, Mapping) and group.get(SECTIONS)), None)
    values = {field: tower[key] for field, key in TOWER_KEYS.items() if tower.get(key) is not None}
    values |= {field: raw[key] for field, key in TOKEN_KEYS.items() if raw.get(key) is not None}
    if sections is not None:
        values["sections"] = sections
    keys = {field: (TOWER_GROUP, key) for field, key in TOWER_KEYS.items()} | {"sections": ("rope_scaling", SECTIONS)}
    return build(VisionConfig, values, Layer(values, {(): where}), keys)
