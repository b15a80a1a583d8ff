"""Image files as arrays of bytes: decoded by Pillow, within limits.

What a file may ask for is decided from its header, before memory is taken. A file that cannot be decoded costs a
sentence.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageOps

from mindrlhf.errors import UserError
from mindrlhf.images.sizes import check_sides

MOST_FILE_BYTES = 1 << 26
MOST_FILE_PIXELS = 1 << 26
"""Pixels of an image before it is resized; they take 192 MiB."""

# Pillow's names. Others are left out: some start programs (EPS), and few are in data.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Pillow's modes with 8 bits or less in a channel; from others, its conversion to RGB cuts values off at 255.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
SEVERAL_VIEWS = "MPO"  # a photograph with previews behind it, not an animation
MOST_MESSAGE = 120  # characters of Pillow's message that are passed on


def decode_image(content: bytes, where: str) -> np.ndarray:
    """Decode the bytes of an image file to uint8[H, W, 3].

    `where` names the image in messages. Raises UserError.
    """
    if len(content) > MOST_FILE_BYTES:
        found = f"the image's file has {len(content)} bytes"
        raise UserError(f"{where}: {found}, and at most {MOST_FILE_BYTES} are read; make it smaller.")
    try:
        with _without_warnings():
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise UserError(f"{where}: {_too_large('more pixels than can be read')}.") from None
    except Exception:  # a decoder may fail in any way on bytes that are no image
        raise UserError(f"{where}: the bytes are no image; give a file of {', '.join(FORMATS)}.") from None
    return image_array(image, where)


def image_array(image: Image.Image, where: str) -> np.ndarray:
    """Turn a Pillow image upright and into uint8[H, W, 3]; transparency is dropped.

    Raises UserError, also if the image's file turns out to be damaged.
    """
    width, height = image.size
    if width * height > MOST_FILE_PIXELS:
        raise UserError(f"{where}: {_too_large(f'{width} x {height} pixels')}.")
    check_sides(height, width, where)
    if image.mode not in MODES:
        right = "convert it to 8 bits in a channel"
        raise UserError(f"{where}: the image's values are of Pillow's mode {image.mode!r}; {right}.")
    try:
        with _without_warnings():
            several = image.format != SEVERAL_VIEWS and getattr(image, "is_animated", False)
            upright = image if several else ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a decoder may fail in any way on damaged bytes
        reason = " ".join(str(error).split())[:MOST_MESSAGE] or type(error).__name__
        raise UserError(f"{where}: the image is damaged ({reason}); make the file anew.") from None
    if several:
        raise UserError(f"{where}: the image is an animation or has several pages; take one of its pictures.")
    return np.asarray(upright)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence Pillow on large sizes and odd metadata; the limits here are narrower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _too_large(found: str) -> str:
    return f"the image has {found}, and at most {MOST_FILE_PIXELS} are read; make it smaller"
