"""Images in conversations: where they stand between texts, and where they come from.

Rows have their images in a list of their own, marked in the texts, or inside of the messages. Here all become contents
that are lists of parts, `{"type": "image"}` and `{"type": "text", "text": ...}`, and one list of images in the order
of their parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.data.parts import IMAGE_TYPES, SOURCE_KEYS
from mindrlhf.data.tasks.conversation import Messages

MARK = "<image>"
"""Stands for an image of the row in a text, as in verl's rows."""
IMAGE, TEXT_PART = "image", "text"

Part = dict[str, Any]
Placed = tuple[list[dict[str, Any]], list[Any]]


def with_images(messages: Messages, images: Sequence[Any] = ()) -> Placed:
    """Give each image of a row its place in the messages.

    images: the row's own, for parts without an image and for marks in texts, in order. Without any place for them, all
    stand before the text of the first user message. Marks stay text in rows without images.

    Returns messages, whose contents are texts or, with an image among them, lists of parts; and the images in the order
    of their parts. Raises ValueError if images and places differ in number, for parts that are neither text nor images,
    and for messages without a role.
    """
    for number, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            raise ValueError(f"message {number} should be an object with a role and a content, and is {message!r:.40}")
    places = [_parts(message, number, bool(images)) for number, message in enumerate(messages)]
    parts = [part for content in places for part in content or ()]
    wanted = [part for part in parts if part["type"] == IMAGE and IMAGE not in part]
    seen = len(wanted) < sum(part["type"] == IMAGE for part in parts)
    if images and not wanted and not seen:
        first = next((number for number, one in enumerate(messages) if one["role"] == "user"), None)
        if first is None:
            raise ValueError(f"the row has {_counted(len(images))}, and no user message to show them in")
        wanted = [{"type": IMAGE} for _ in images]
        places[first] = [*wanted, *(places[first] or _texts(messages[first].get("content") or ""))]
    if len(wanted) != len(images):
        found = f"the row has {_counted(len(images))}, and its messages have {_counted(len(wanted), 'place')} for them"
        raise ValueError(f"{found}; write {MARK} where each one stands")
    given = iter(images)
    sources = [
        part[IMAGE] if IMAGE in part else next(given)
        for content in places
        for part in content or ()
        if part["type"] == IMAGE
    ]
    return [_placed(message, content) for message, content in zip(messages, places, strict=True)], sources


def token_repeats(ids: Sequence[int] | np.ndarray, counts: Sequence[int], image_token: int) -> np.ndarray:
    """Count how often each token of a rendered text stands in its ids: int64[T].

    The k-th image token stands for all tokens of the k-th image, of which there are `counts`; others stand once.
    Raises ValueError unless there is one image token for each image.
    """
    repeats = np.ones(len(ids), np.int64)
    found = np.flatnonzero(np.asarray(ids) == image_token)
    if len(found) != len(counts):
        tokens = _counted(len(found), "image token")
        raise ValueError(
            f"the chat template writes {tokens} for {_counted(len(counts))}; give one that writes each once"
        )
    repeats[found] = counts
    return repeats


def _parts(message: Mapping[str, Any], number: int, marked: bool) -> list[Part] | None:
    """List a content's parts; None for a text without images.

    marked: marks stand for images.
    """
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"message {number} has the content {content!r:.40}, and should have a text or a list of parts")
    if isinstance(content, str) and marked and MARK in content:
        first, *others = content.split(MARK)
        return [*_texts(first), *(part for text in others for part in ({"type": IMAGE}, *_texts(text)))]
    if not isinstance(content, list):
        return None
    return [_part(part, f"message {number}") for part in content]


def _part(part: Any, where: str) -> Part:
    """Read a part of a content, which is a text or an image."""
    if isinstance(part, str):
        return {"type": TEXT_PART, "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(f"{where} has {part!r:.40} among its parts, which are texts and images")
    given = {key: value for key, value in part.items() if value is not None}
    sources = [key for key in SOURCE_KEYS if key in given]
    kind = given.get("type", IMAGE if sources else TEXT_PART)
    if kind == TEXT_PART and isinstance(given.get("text"), str):
        return {"type": TEXT_PART, "text": given["text"]}
    if kind not in IMAGE_TYPES or len(sources) > 1:
        raise ValueError(f"{where} has a part of the type {kind!r:.40}, and its parts are texts and images")
    source = given[sources[0]] if sources else None
    if isinstance(source, Mapping) and set(source) == {"url"}:
        source = source["url"]
    return {"type": IMAGE} if source is None else {"type": IMAGE, IMAGE: source}


def _texts(text: str) -> Iterator[Part]:
    """Yield a part for a text that is not empty."""
    if text:
        yield {"type": TEXT_PART, "text": text}


def _placed(message: Mapping[str, Any], content: list[Part] | None) -> dict[str, Any]:
    """Return a message with the parts of its content, without the images."""
    if content is None:
        return dict(message)
    if all(part["type"] == TEXT_PART for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return {**message, "content": [{"type": IMAGE} if part["type"] == IMAGE else part for part in content]}


def _counted(number: int, thing: str = IMAGE) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
