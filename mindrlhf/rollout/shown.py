"""Places of pictures that partners show within a response, and room for them.

NumPy only.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.models.vision.positions import image_starts
from mindrlhf.types import Prompt

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture


def fitted(
    ids: np.ndarray, pictures: Sequence["Picture"], room: int, vision: VisionConfig | None
) -> tuple[np.ndarray, dict[int, "Picture"]]:
    """Cut a partner's ids int32[n] to `room` tokens, and never inside an image.

    Returns them, and the index of each picture's first token. ValueError for tokens that are not those of the pictures,
    for one that ends the ids, and for a model that takes text alone.
    """
    if not pictures:
        return ids[:room], {}
    if vision is None:
        raise ValueError("a reply shows pictures, and the model takes text alone")
    starts = image_starts(ids, [one.grid for one in pictures], vision.image_token_id, vision.merge_size)
    if ids[-1] == vision.image_token_id:
        raise ValueError("a reply ends with an image, and should end with text")
    whole: dict[int, Picture] = {}
    for start, picture in zip(starts, pictures, strict=True):
        if start + picture.tokens > room:
            return ids[: min(start, room)], whole
        whole[start] = picture
    return ids[:room], whole


def until_last_image(prompt: Prompt, ids: np.ndarray, pictures: Mapping[int, "Picture"]) -> Prompt:
    """Make a prompt of a conversation, up to the token behind its last image.

    ids: int32[n], of the response. pictures: of it, by the index of the first token.
    """
    first = max(pictures)
    end = first + pictures[first].tokens + 1
    whole = np.concatenate([prompt.token_ids, ids[:end]])
    return Prompt(prompt.id, whole, pictures=(*prompt.pictures, *(pictures[place] for place in sorted(pictures))))
