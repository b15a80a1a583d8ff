"""Demonstrations with images for supervised fine-tuning: conversations whose prompts and turns show pictures."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.chat import report_kept
from mindrlhf.data.demonstration_forms import as_messages
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.messages import MessageReader
from mindrlhf.data.pictures import TEXT_PART, token_repeats, with_images
from mindrlhf.data.source import SourceRow
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import load_tool_format
from mindrlhf.data.turns import Message, Turns, TurnTemplate
from mindrlhf.errors import UserError
from mindrlhf.files.json import parse_json
from mindrlhf.images.processor import ImageProcessor, Picture
from mindrlhf.run.picture_source import PictureRow, picture_rows
from mindrlhf.run.stand_in import StandIn

CONVERSATIONS = ("messages", "prompt", "completion")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Shown:
    """Conversation to imitate, with the pictures of its prompt and of its response.

    Pictures are in the order of their tokens.
    """

    turns: Turns
    prompt: tuple[Picture, ...] = ()
    response: tuple[Picture, ...] = ()


class PictureTemplate(TurnTemplate):
    """Turn template of messages with images among the parts of their contents.

    The messages are read as texts, in which a random word stands for each image. The chat template then gets parts, and
    writes the tokens that its model has for an image.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self._stand_in = StandIn()
        super().__init__(*arguments, **options)

    def _written(self, messages: Sequence[Message], read: MessageReader) -> list[dict[str, Any]]:
        return [self._stand_in.parts(one) for one in super()._written(self._stand_in.texts(messages), read)]


def read_shown(
    path: str | Path,
    tokenizer: Tokenizer,
    vision: VisionConfig,
    tool_format: str = "hermes",
    max_length: int | None = None,
    given: Iterable[Mapping[str, Any]] | None = None,
    split: str | None = "train",
    variables: Mapping[str, Any] | None = None,
) -> list[Shown]:
    """Read demonstrations for a model that sees; arguments as of `read_demonstrations`.

    A row with images has `images`, a list, or `image`; each is a path, from the data file's folder on, the bytes of a
    file or its base64, a group of `datasets`, or an object of Pillow. They stand where the messages have parts of the
    type image, or `<image>` in a text (`data.pictures`). A file without any image is read as for other models.
    max_length: counts the tokens of images; a row is never cut before the end of its last one, but left out.
    Raises UserError, with the place, for a malformed row or image.
    """
    given = None if given is None else list(given)
    options = {"tool_format": tool_format, "given": given, "split": split, "variables": variables}
    rows = picture_rows(path, given, split)
    if not any(row.images or _shows(row.row) for row in rows):
        plain = read_demonstrations(path, tokenizer, max_length=max_length, **options)
        return [_without_pictures(turns, vision, f"{path}, row {row}") for row, turns in enumerate(plain)]
    template = PictureTemplate(tokenizer, tool_format=load_tool_format(tool_format), variables=variables)
    processor = ImageProcessor(vision.images)
    known: dict[bytes, Picture] = {}

    def read(row: PictureRow) -> Shown:
        messages, found, tools = _conversation(row.row, row.images)
        pictures = [processor.read(one, row.folder, f"{row.where}: image {k}") for k, one in enumerate(found, start=1)]
        once = [known.setdefault(picture.digest, picture) for picture in pictures]
        try:
            return _shown(template.conversation(messages, tools), once, vision)
        except (ValueError, UserError) as error:
            raise UserError(f"{row.where}: {str(error).removesuffix('.')}.") from None

    every = [read(row) for row in rows]
    report_kept(template.reader.kept, rows[0].where)
    return _fitting(every, max_length, vision, path)


def _shows(row: SourceRow) -> bool:
    """Test for an image inside of a row's messages."""
    talks = (row.values.get(key) for key in CONVERSATIONS)
    messages = (message for talk in talks if isinstance(talk, list) for message in talk)
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") != TEXT_PART for part in parts)


def _conversation(row: SourceRow, images: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Any], list | None]:
    """Return a row's messages with places of images, the images, and schemas of tools."""
    values = row.values
    try:
        messages = values.get("messages")
        if messages is None and isinstance(values.get("prompt"), list) and isinstance(values.get("completion"), list):
            messages = [*values["prompt"], *values["completion"]]
        if messages is None:
            messages = as_messages(values).get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, Mapping) and "role" in one for one in messages):
            raise ValueError("a row beside rows with images needs messages, conversations, or prompt and completion")
        placed, found = with_images(messages, images)
        others = [one["role"] for one in placed if isinstance(one.get("content"), list) and one["role"] != "user"]
        if others:
            raise ValueError(
                f"an image is in a message of the role {others[0]!r:.40}, and images are shown by the user"
            )
        tools = values.get("tools") or None
        return placed, found, parse_json(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise UserError(f"{row.where}: {error}.") from None


def _shown(turns: Turns, pictures: Sequence[Picture], vision: VisionConfig) -> Shown:
    """Repeat the token of each image for all of its tokens.

    ValueError unless there is one for each image.
    """
    token = vision.image_token_id
    shown = int((turns.prompt_ids == token).sum())
    counts = [picture.tokens for picture in pictures]
    before = token_repeats(turns.prompt_ids, counts[:shown], token)
    behind = token_repeats(turns.response_ids, counts[shown:], token)
    wide = Turns(
        prompt_ids=np.repeat(turns.prompt_ids, before),
        response_ids=np.repeat(turns.response_ids, behind),
        sampled=np.repeat(turns.sampled, behind),
    )
    return Shown(wide, tuple(pictures[:shown]), tuple(pictures[shown:]))


def _without_pictures(turns: Turns, vision: VisionConfig, where: str) -> Shown:
    """Take turns without images; UserError if a rendered text spells the token of one."""
    for ids in (turns.prompt_ids, turns.response_ids):
        if np.isin(ids, vision.vision_tokens).any():
            raise UserError(f"{where}: a text has a token of images, and the row has none; take it out.")
    return Shown(turns)


def _fitting(every: Sequence[Shown], max_length: int | None, vision: VisionConfig, path: str | Path) -> list[Shown]:
    """Leave out rows without a trained token, and rows that would lose an image."""
    trained = [shown for shown in every if shown.turns.sampled.any()]
    if not trained:
        raise UserError(f"{path}: no row has a turn of the assistant that is trained; give one the weight 1.")
    kept = trained if max_length is None else [short for one in trained if (short := _cut(one, max_length, vision))]
    if not kept:
        raise UserError(f"{path}: no row has an answer within data.max_length {max_length}; raise it.")
    if left_out := len(every) - len(trained):
        _log.warning("%s: %d of %d rows are left out, of which nothing is trained", path, left_out, len(every))
    if left_out := len(trained) - len(kept):
        reason = f"whose prompts or images fill data.max_length {max_length}"
        _log.warning("%s: %d of %d rows are left out, %s", path, left_out, len(trained), reason)
    return kept


def _cut(shown: Shown, max_length: int, vision: VisionConfig) -> Shown | None:
    """Cut a response behind its last image.

    None if that is too long, or if nothing is left to train on.
    """
    short = shown.turns.cut(max_length)
    whole = sum(picture.tokens for picture in shown.response)
    if not short.sampled.any() or (short.response_ids == vision.image_token_id).sum() < whole:
        return None
    return replace(shown, turns=short)
