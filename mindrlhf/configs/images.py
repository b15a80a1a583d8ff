"""Numbers of an image processor: a checkpoint's `preprocessor_config.json`, read and written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from mindrlhf.configs.base import Float32, Settings
from mindrlhf.configs.problems import brief, build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json
from mindrlhf.files.text import is_there

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # where transformers 5 writes the same numbers, as a group
IMAGE_GROUP = "image_processor"
CLASS = "Qwen2VLImageProcessor"
CLASSES = (CLASS, f"{CLASS}Fast", f"{CLASS}Pil")

MOST_BY_DEFAULT = 1280 * 28 * 28
"""Pixels of a resized image, unless more are asked for: 1,280 tokens with patches of 14.

Released checkpoints allow 16,384 tokens an image, more than most contexts.
"""
MOST_SIDE = 1 << 16
MOST_PIXELS = 1 << 26
BICUBIC = 3  # Pillow's number of the filter
RESCALE = 1 / 255

# Numbers of the processor's class, which files may leave out.
SWITCHES = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

Pixels = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
Deviation = Annotated[Float32, Field(gt=0.0)]


class ImageSettings(Settings):
    """Numbers of the processor of Qwen2-VL's and Qwen2.5-VL's images."""

    min_pixels: Pixels = Field(56 * 56, description="Smallest area of a resized image; smaller images are enlarged.")
    max_pixels: Pixels = Field(MOST_BY_DEFAULT, description="Largest area of a resized image; larger ones shrink.")
    patch_size: int = Field(14, ge=1, le=MOST_SIDE, description="Side of a patch, in pixels.")
    temporal_patch_size: int = Field(2, ge=1, le=16, description="Frames of a patch; a still image is repeated.")
    merge_size: int = Field(2, ge=1, le=64, description="Side of the square of patches that is one token.")
    image_mean: tuple[Float32, Float32, Float32] = Field(MEAN, description="Subtracted from red, green and blue.")
    image_std: tuple[Deviation, Deviation, Deviation] = Field(STD, description="Divides red, green and blue.")

    @model_validator(mode="after")
    def _ordered(self):
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels {self.max_pixels} is below min_pixels {self.min_pixels}; raise max_pixels")
        if self.max_pixels < self.factor**2:
            raise ValueError(f"max_pixels {self.max_pixels} holds no token of {self.factor} x {self.factor} pixels")
        return self

    @property
    def factor(self) -> int:
        """Side of the square of pixels that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], where: str, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> "ImageSettings":
        """Read the content of a `preprocessor_config.json`; `where` names the file in messages.

        min_pixels, max_pixels: replace the file's. Without max_pixels the file's holds up to `MOST_BY_DEFAULT`.
        Raises UserError for a processor that computes something else.
        """
        _refuse_other_processors(raw, where)
        size = raw.get("size") or {}
        if not isinstance(size, Mapping):
            raise UserError(f"{where}: size is {brief(size)}, and must be an object with shortest_edge, longest_edge.")
        names = [name for name in cls.model_fields if name not in ("min_pixels", "max_pixels")]
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        keys = {}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            plain = raw.get(name) is not None
            found = raw.get(name) if plain else size.get(edge)
            if found is not None:
                values[name] = found
                keys[name] = (name,) if plain else ("size", edge)
        own = build(cls, _within_default(values), Layer(values, {(): where}), keys)
        asked = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        given = {name: value for name, value in asked.items() if value is not None}
        if not given:
            return own
        values = own.model_dump(mode="json") | given
        return build(cls, values, Layer(values, {(): f"the settings over {where}"}))

    def to_hf(self) -> dict[str, Any]:
        """Build a `preprocessor_config.json` in the layout of released checkpoints."""
        return {
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "image_processor_type": CLASS,
            "processor_class": "Qwen2_5_VLProcessor",
        }


def has_image_settings(folder: str | Path) -> bool:
    """Test for a file with image settings in a checkpoint's folder."""
    return any(is_there(Path(folder, name)) for name in (PREPROCESSOR_FILE, PROCESSOR_FILE))


def read_image_settings(
    folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> ImageSettings:
    """Read the image settings of a checkpoint's folder; arguments as of `ImageSettings.from_hf`.

    Raises UserError, also if the folder has no such file: other numbers would show the model other pixels.
    """
    first = Path(folder, PREPROCESSOR_FILE)
    second = Path(folder, PROCESSOR_FILE)
    if is_there(first):
        return ImageSettings.from_hf(read_json(first), str(first), min_pixels, max_pixels)
    if is_there(second):
        group = read_json(second).get(IMAGE_GROUP)
        if isinstance(group, dict):
            return ImageSettings.from_hf(group, f"{second}, {IMAGE_GROUP}", min_pixels, max_pixels)
    raise no_image_settings(folder)


def no_image_settings(folder: str | Path) -> UserError:
    """Build the error for a checkpoint without image settings."""
    return UserError(f"{folder}: has no {PREPROCESSOR_FILE}, which says how images are resized; copy the checkpoint's.")


def _within_default(values: dict[str, Any]) -> dict[str, Any]:
    """Bound the file's largest area by the default.

    A smallest area above it is the bound.
    """
    least = values.get("min_pixels", 0)
    most = values.get("max_pixels", MOST_BY_DEFAULT)
    if type(least) is not int or type(most) is not int:
        return values  # refused by their types
    return values | {"max_pixels": min(most, max(MOST_BY_DEFAULT, least))}


def _refuse_other_processors(raw: Mapping[str, Any], where: str) -> None:
    """Raise UserError for settings under which other pixels would come out."""
    kind = raw.get("image_processor_type")
    if kind is not None and kind not in CLASSES:
        raise UserError(f"{where}: image_processor_type is {brief(kind)}, and supported is {CLASS}.")
    off = next((name for name in SWITCHES if raw.get(name) is not None and raw[name] is not True), None)
    if off:
        raise UserError(f"{where}: {off} is {brief(raw[off])}, and must be true: this model's images are prepared so.")
    if raw.get("resample") not in (None, BICUBIC):
        raise UserError(f"{where}: resample is {brief(raw['resample'])}, and must be {BICUBIC}, which is bicubic.")
    if raw.get("rescale_factor") not in (None, RESCALE):
        raise UserError(f"{where}: rescale_factor is {brief(raw['rescale_factor'])}, and must be 1/255, {RESCALE}.")
