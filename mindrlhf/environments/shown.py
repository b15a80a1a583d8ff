"""Answers that show images, from a conversation's process to its owner.

The process reads and resizes the images, so that damaged and huge ones cost its own call, time and memory. It sends
{"parts": [...]}, each part a text or an image as [height, width, its bytes in base64]; the owner decodes no file.
"""

import base64
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.vision import CHANNELS
from mindrlhf.data.pictures import IMAGE, TEXT_PART, with_images
from mindrlhf.environments.results import is_image
from mindrlhf.errors import UserError
from mindrlhf.files.printable import shortened
from mindrlhf.images.processor import ImageProcessor, Picture
from mindrlhf.units import MIB

PARTS = "parts"
FORGED = "it is no answer that `sent` writes"
MOST_MIB = 64
"""Resized images of one answer, in MiB."""


def sent(parts: Sequence[Any], settings: ImageSettings, what: str, most: int) -> dict[str, list[Any]]:
    """Write texts and images, in their order, as the owner takes them.

    most: characters of all texts. Raises UserError for an image that cannot be read, too many, and other parts.
    """
    content = [{"type": IMAGE, IMAGE: part} if is_image(part) else part for part in parts]
    try:
        (message,), images = with_images([{"role": "tool", "content": content}])
    except ValueError as error:
        raise UserError(f"{what}: {str(error).replace('message 0', 'its answer')}.") from None
    whole = message["content"]
    pieces = [{"type": TEXT_PART, "text": whole}] if isinstance(whole, str) else whole
    read = ImageProcessor(settings).read
    found = iter([read(one, ".", f"{what}: image {number}").pixels for number, one in enumerate(images, start=1)])
    room = most // max(1, sum(piece["type"] == TEXT_PART for piece in pieces))
    out: list[Any] = []
    size = 0
    for piece in pieces:
        if piece["type"] == TEXT_PART:
            out.append(shortened(piece["text"], room).encode("utf-8", "replace").decode())
            continue
        pixels = next(found)
        size += pixels.nbytes
        if size > MOST_MIB * MIB:
            raise UserError(f"{what}: its images have more than {MOST_MIB} MiB as the model gets them; show fewer.")
        out.append([*pixels.shape[:2], base64.b64encode(pixels.tobytes()).decode()])
    return {PARTS: out}


def received(message: dict[str, Any], settings: ImageSettings | None) -> tuple[str | Picture, ...]:
    """Take what `sent` has written, with texts that follow each other as one.

    Raises ValueError for anything else, also for images of a process that should send none.
    """
    parts = message.get(PARTS)
    if settings is None or message.keys() != {PARTS} or not isinstance(parts, list):
        raise ValueError(FORGED)
    found = [part if isinstance(part, str) else _picture(part, settings) for part in parts]
    out: list[str | Picture] = []
    for part in found:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


def _picture(part: Any, settings: ImageSettings) -> Picture:
    match part:
        case [int(height), int(width), str(text)]:
            with suppress(ValueError):  # of other text than base64
                content = base64.b64decode(text, validate=True)
                whole = all(side > 0 and side % settings.factor == 0 for side in (height, width))
                if whole and len(content) == height * width * CHANNELS <= MOST_MIB * MIB:
                    pixels = np.frombuffer(content, np.uint8).reshape((height, width, CHANNELS))
                    return Picture.of(pixels, settings)
    raise ValueError(FORGED)
