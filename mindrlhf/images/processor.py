"""Images prepared for a model: resized once, kept as bytes, cut when needed."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindrlhf.configs.images import ImageSettings
from mindrlhf.images.patches import image_patches
from mindrlhf.images.resize import resize
from mindrlhf.images.sizes import Grid, image_tokens, resized_size
from mindrlhf.images.sources import read_image
from mindrlhf.units import DIGEST_BYTES


@dataclass(frozen=True, eq=False)
class Picture:
    """Resized image.

    pixels: uint8[H, W, 3], an eighth of the size of its patches with two frames. digest: of shape and pixels; pictures
    that look the same to a model have the same one.
    """

    pixels: np.ndarray
    digest: bytes
    settings: ImageSettings

    @classmethod
    def of(cls, pixels: np.ndarray, settings: ImageSettings) -> "Picture":
        """Make a picture of pixels that are resized already."""
        content = repr(pixels.shape).encode() + pixels.tobytes()
        return cls(pixels, hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(), settings)

    @property
    def grid(self) -> Grid:
        """Frames, rows and columns of patches."""
        rows, columns = (size // self.settings.patch_size for size in self.pixels.shape[:2])
        return 1, rows, columns

    @property
    def tokens(self) -> int:
        """Number of the image's tokens in a prompt."""
        return image_tokens(self.grid, self.settings.merge_size)

    @property
    def positions(self) -> int:
        """Number of rotary positions that it takes in a text."""
        return max(self.grid[1:]) // self.settings.merge_size

    @property
    def name(self) -> str:
        """The digest in hexadecimal digits."""
        return self.digest.hex()

    def png(self) -> bytes:
        """Write the pixels as the bytes of a PNG file."""
        buffer = io.BytesIO()
        self.image().save(buffer, "PNG")
        return buffer.getvalue()

    def image(self) -> Image.Image:
        """Make an object of Pillow."""
        return Image.fromarray(self.pixels)

    def patches(self) -> np.ndarray:
        """Cut the picture into patches: float32[patches, numbers]."""
        return image_patches(self.pixels, self.settings)


class ImageProcessor:
    """Preparation of images for the models of one checkpoint."""

    def __init__(self, settings: ImageSettings):
        self.settings = settings

    def read(self, source: Any, folder: str | Path, where: str) -> Picture:
        """Read and resize an image of a row; see `sources.read_image`. Raises UserError."""
        return self.picture(read_image(source, folder, where), where)

    def picture(self, pixels: np.ndarray, where: str) -> Picture:
        """Resize uint8[H, W, 3]; UserError for a shape that the model does not take."""
        height, width = resized_size(*pixels.shape[:2], self.settings, where)
        return Picture.of(np.ascontiguousarray(resize(pixels, height, width)), self.settings)
