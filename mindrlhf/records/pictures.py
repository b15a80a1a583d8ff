"""Pictures of responses in a row: places, and pixels without loss.

A replay needs them. A prompt's pictures are in the dataset; what a tool has drawn is nowhere else.
"""

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING

import orjson

from mindrlhf.errors import UserError
from mindrlhf.files.json import is_whole, parse_json

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

NOTHING = "[]"


def stored_pictures(pictures: Mapping[int, "Picture"]) -> str:
    """Write a response's pictures as JSON.

    Each is [index of its first token, image settings, PNG file in base64].
    """
    rows = [
        (place, picture.settings.model_dump(), base64.b64encode(picture.png()).decode())
        for place, picture in sorted(pictures.items())
    ]
    return orjson.dumps(rows).decode()


def restored_pictures(text: str, length: int) -> dict[int, "Picture"]:
    """Invert `stored_pictures`; ValueError for what no run writes.

    length: tokens of the response.
    """
    if text == NOTHING:
        return {}
    from mindrlhf.configs.images import ImageSettings
    from mindrlhf.images.decode import decode_image
    from mindrlhf.images.processor import Picture

    pictures: dict[int, Picture] = {}
    end = 0
    for place, given, content in parse_json(text):
        try:
            settings = ImageSettings(**given)
            pixels = decode_image(base64.b64decode(content, validate=True), "it")
        except (UserError, TypeError, ValueError) as error:
            raise ValueError(f"a picture cannot be read ({str(error).splitlines()[0]:.80})") from None
        if not (is_whole(place) and end <= place) or any(side % settings.factor for side in pixels.shape[:2]):
            raise ValueError(f"a picture is at token {place!r:.40}, or has other sides than the model takes")
        pictures[place] = Picture.of(pixels, settings)
        end = place + pictures[place].tokens
    if end > length:
        raise ValueError(f"a picture ends at token {end} of {length}")
    return pictures
