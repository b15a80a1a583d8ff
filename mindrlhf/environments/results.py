"""Results of tools as the texts and images that a model reads."""

import json
import sys
from collections.abc import Mapping, Set
from datetime import date, time
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import pydantic

from mindrlhf.data.parts import IMAGE_TYPES, SOURCE_KEYS

TOOL_RESPONSE = {"text", "image", "video"}
"""Fields of verl's `ToolResponse`."""
OFF = "has returned an image, and {}"
"""Failure of a call that shows an image where none is taken."""


def is_image(value: Any) -> bool:
    """Test for an image by itself.

    It is an object of Pillow, a file's bytes, or a group of `datasets` with these.
    """
    pillow = sys.modules.get("PIL.Image")
    if isinstance(value, Mapping):
        return value.keys() <= {"bytes", "path"} and isinstance(value.get("bytes"), bytes)
    return isinstance(value, bytes | bytearray | memoryview) or bool(pillow and isinstance(value, pillow.Image))


def of_response(result: Any) -> Any:
    """Return the images and then the text of verl's `ToolResponse`.

    Groups with its keys and images are taken like it; other results are returned as they are. Raises TypeError for a
    video.
    """
    model = isinstance(result, pydantic.BaseModel) and type(result).model_fields.keys() == TOOL_RESPONSE
    group = {name: getattr(result, name) for name in TOOL_RESPONSE} if model else result
    if not (isinstance(group, Mapping) and "image" in group and group.keys() <= TOOL_RESPONSE):
        return result
    given = group["image"]
    images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not (model or any(map(is_image, images))):
        return result
    if group.get("video"):
        raise TypeError("it returned a video, and models that see take images")
    text = group.get("text")
    parts = [{"type": "image", "image": image} for image in images]
    return [*parts, *([text] if text else [])] if parts else text or ""


def image_parts(result: Any, by_text: bool) -> list[Any] | None:
    """Return the texts and images of a result that shows images.

    Returns None for another one. It is an image, a content's part `{"type": "image", ...}`, or a list with one of both.
    by_text: a part may name its image by a text, such as a path; otherwise that is JSON.
    """

    def shows(one: Any) -> bool:
        return is_image(one) or _is_part(one, by_text)

    if shows(result):
        return [result]
    return list(result) if isinstance(result, list | tuple) and any(map(shows, result)) else None


def _is_part(value: Any, by_text: bool) -> bool:
    """Test for a part of a content that is an image."""
    if not (isinstance(value, Mapping) and value.get("type") in IMAGE_TYPES):
        return False
    given = [value[key] for key in SOURCE_KEYS if value.get(key) is not None]
    return any(by_text or is_image(one) for one in given)


def result_text(result: Any) -> str:
    """Write a tool's result: text as it is, anything else as JSON.

    A tuple or a set is a list there, numbers and arrays of NumPy are numbers and lists, dates, decimal numbers and
    paths are texts. Raises TypeError for a value without a JSON form.
    """
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_in_json)


def _in_json(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, Decimal | Fraction | date | time | UUID | PurePath):
        return str(value)
    raise TypeError(f"it returned {type(value).__name__}, and not text")
