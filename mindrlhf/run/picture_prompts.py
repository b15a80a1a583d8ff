"""Prompts that show pictures: rows of problems, and typed questions, for models that see.

The rows are read as texts, with a word in place of each image: tasks, templates and columns are those of text. Then the
chat template gets parts, and writes the tokens that its model has for an image.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.configs.images import no_image_settings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.messages import MessageReader
from mindrlhf.data.pictures import MARK, token_repeats, with_images
from mindrlhf.data.source import SourceRow
from mindrlhf.data.tasks import parse_rows
from mindrlhf.data.tasks.task import Task, TaskRow, prompt_fields
from mindrlhf.data.templates import prompt_ids
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.truncation import fit
from mindrlhf.errors import UserError
from mindrlhf.images.processor import ImageProcessor, Picture
from mindrlhf.run.picture_source import PictureRow, picture_rows
from mindrlhf.run.stand_in import StandIn
from mindrlhf.types import Prompt

CONVERSATIONS = ("prompt", "messages", "question")  # columns that may be a list of messages, in order
CUTTING = ("left", "right")
DIGESTS = "image_digests"
"""Field of prompts with pictures: the digest of each, in hexadecimal digits, by which a record names them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PictureForm:
    """Form of prompts, by `data.templates.prompt_ids` and `data.truncation.fit`.

    fields: `key=theirs` pairs, columns in place of the task's. A prompt with images is never cut: where others are, it
    is left out.
    """

    template: str | None = None
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    fields: Sequence[str] = ()
    max_prompt_length: int | None = None
    truncation: str = "left"


@dataclass(frozen=True)
class _Placed:
    """Row as text, and its images.

    placed: False while its question has no places for them yet.
    """

    row: SourceRow
    images: list[Any]
    placed: bool


class _PictureReader(MessageReader):
    """Reader of messages that gives images their places among a content's parts.

    written: an image's tokens, for templates of one question.
    """

    def __init__(self, tokenizer: Tokenizer, stand_in: StandIn, written: str):
        super().__init__(tokenizer)
        self._stand_in = stand_in
        self._written = written

    def __call__(self, messages: Any) -> list[dict[str, Any]]:
        return [self._stand_in.parts(message) for message in super().__call__(messages)]

    def text(self, text: str) -> str:
        return super().text(text).replace(self._stand_in.word, self._written)


@dataclass(frozen=True, eq=False)
class PicturePrompts:
    """Reader of prompts for one model that sees.

    source: of the rows, for messages. A picture that several rows show is kept once.
    """

    tokenizer: Tokenizer
    vision: VisionConfig
    source: str | Path
    form: PictureForm = PictureForm()
    _stand_in: StandIn = field(default_factory=StandIn)
    _known: dict[bytes, Picture] = field(default_factory=dict)

    def of_rows(self, rows: Sequence[PictureRow]) -> list[Prompt]:
        """Write the prompts of rows, which are numbered by row. Raises UserError."""
        placed = [self._placed(row) for row in rows]
        task, problems = parse_rows([one.row for one in placed], None, self.form.fields)
        return self._prompts(rows, placed, task, problems)

    def of_texts(self, texts: Sequence[str], images: Sequence[Any], flag: str = "--prompt") -> list[Prompt]:
        """Write users' questions, each with all images: at their marks, or before the text."""
        rows = [PictureRow(SourceRow({"prompt": text}, f"{flag} {text!r:.40}"), list(images), Path()) for text in texts]
        placed = [_Placed(row.row, row.images, placed=False) for row in rows]
        return self._prompts(rows, placed, None, [TaskRow(text, "", "") for text in texts])

    def of_given(self, prompts: Sequence[Any], images: Sequence[Any] | None = None) -> list[Prompt]:
        """Write texts and messages of the calling program as they are.

        images: of each prompt, one or a list; None without any beside those inside of messages. Raises UserError.
        """
        if not prompts:
            return []
        if images is not None and len(images) != len(prompts):
            found = f"images has {len(images)} elements for {len(prompts)} prompts"
            raise UserError(f"{found}; give one for each, which is an image, a list of images, or None.")
        beside = [None] * len(prompts) if images is None else images
        columns = ["images" if isinstance(own, list | tuple | None) else "image" for own in beside]
        given = [{"prompt": prompt, key: own} for prompt, key, own in zip(prompts, columns, beside, strict=True)]
        rows = picture_rows(self.source, given)
        placed = [self._placed(row) for row in rows]
        asked = [row.row.values["prompt"] for row in placed]
        problems = [
            TaskRow("", "", "", prompt=one) if isinstance(one, str) else TaskRow("", "", "", messages=one)
            for one in asked
        ]
        return self._prompts(rows, placed, None, problems)

    def _placed(self, row: PictureRow) -> _Placed:
        """Give the images of a row's conversation their places; a question gets them later."""
        values = row.texts
        key = next((key for key in CONVERSATIONS if _talks(values.get(key))), None)
        if key is None:
            return _Placed(replace(row.row, values=values), row.images, placed=False)
        try:
            messages, images = with_images(values[key], row.images)
        except ValueError as error:
            raise UserError(f"{row.where}: {error}.") from None
        return _Placed(replace(row.row, values=values | {key: self._stand_in.texts(messages)}), images, placed=True)

    def _prompts(
        self, rows: Sequence[PictureRow], placed: Sequence[_Placed], task: Task | None, problems: Sequence[TaskRow]
    ) -> list[Prompt]:
        """Write problems as ids, read their pictures, and repeat the pictures' tokens."""
        form = self.form
        places = [row.where for row in rows]
        pairs = [self._asked(*pair) for pair in zip(placed, problems, strict=True)]
        instruction = task.instruction if task else ""
        reader = _PictureReader(self.tokenizer, self._stand_in, self._written)
        asked = [problem for problem, _ in pairs]
        options = {"tools": form.tools, "variables": form.variables, "reader": reader}
        written = prompt_ids(asked, places, instruction, form.template, form.system, self.tokenizer, **options)
        prompts = []
        for number, (row, ids, (problem, images)) in enumerate(zip(rows, written, pairs, strict=True)):
            fields = self._fields(row, task, problem)
            prompt = self._prompt(number, row, np.array(ids, np.int32), images, fields)
            if prompt is not None:
                prompts.append(prompt)
        self._report(len(rows), len(prompts))
        return prompts

    def _asked(self, row: _Placed, problem: TaskRow) -> tuple[TaskRow, list[Any]]:
        """Give the images of a question or a whole text prompt their places."""
        if row.placed or not row.images:
            return problem, row.images
        whole = problem.prompt
        if whole is not None and MARK not in whole:
            if (self.tokenizer.id_to_token(self.vision.image_token_id) or "") in whole:
                return problem, row.images
            right = f"write {MARK} where each one stands, or give messages"
            raise UserError(f"{row.row.where}: the prompt is a whole text without a place for its images; {right}.")
        try:
            text = problem.question if whole is None else whole
            messages, images = with_images([{"role": "user", "content": text}], row.images)
        except ValueError as error:
            raise UserError(f"{row.row.where}: {error}.") from None
        text = self._stand_in.texts(messages)[0]["content"]
        if whole is None:
            return replace(problem, question=text), images
        return replace(problem, prompt=text.replace(self._stand_in.word, self._written)), images

    def _fields(self, row: PictureRow, task: Task | None, problem: TaskRow) -> dict[str, str]:
        """Write a row's columns as texts, with marks in place of its images."""
        if task is None:
            return {}
        try:
            fields = prompt_fields(task.name, problem)
        except ValueError as error:  # an image in another column than the prompt's
            raise UserError(f"{row.where}: {error}; images are read in the prompt, in images and in image.") from None
        return {name: text.replace(self._stand_in.word, MARK) for name, text in fields.items()}

    @property
    def _written(self) -> str:
        """An image in a text without a chat template."""
        return self.vision.image_text(self.tokenizer.id_to_token)

    def _prompt(
        self, number: int, row: PictureRow, ids: np.ndarray, images: Sequence[Any], fields: Mapping[str, str]
    ) -> Prompt | None:
        """Make a prompt with its pictures; None for one that is too long."""
        pictures = self._pictures(row, images)
        token = self.vision.image_token_id
        try:
            wide = np.repeat(ids, token_repeats(ids, [picture.tokens for picture in pictures], token))
            if (ids == self.vision.video_token_id).any():
                raise ValueError("the prompt has a token of videos, and models that see take images")
            if wide[-1] == token:
                raise ValueError("the prompt ends with an image; end it with text")
        except ValueError as error:
            raise UserError(f"{row.where}: {error}.") from None
        form = self.form
        truncation = "drop" if pictures and form.truncation in CUTTING else form.truncation
        kept = fit(row.where, (wide.tolist(), []), form.max_prompt_length, None, truncation, "data.")
        if kept is None:
            return None
        shown = {DIGESTS: " ".join(picture.name for picture in pictures)} if pictures else {}
        inside = {"images": list(images)} if images else {}
        return Prompt(
            id=number,
            token_ids=np.array(kept[0], np.int32),
            fields={**fields, **shown},
            pictures=pictures,
            written_ids=ids if pictures else None,
            objects={} if row.objects is None else row.objects or inside,
        )

    def _pictures(self, row: PictureRow, images: Sequence[Any]) -> tuple[Picture, ...]:
        if images and self.vision.images is None:
            raise no_image_settings("the model")
        read = ImageProcessor(self.vision.images).read if images else None
        found = [read(one, row.folder, f"{row.where}: image {k}") for k, one in enumerate(images, start=1)]
        return tuple(self._known.setdefault(picture.digest, picture) for picture in found)

    def _report(self, rows: int, prompts: int) -> None:
        """Count prompts that were left out; UserError if none is there."""
        limit = f"data.max_prompt_length {self.form.max_prompt_length}"
        if not prompts:
            raise UserError(f"{self.source}: every prompt has more tokens than {limit}; raise it.")
        if prompts < rows:
            reason = "an image is never cut" if self.form.truncation in CUTTING else "data.truncation is drop"
            left_out = rows - prompts
            _log.warning(
                "%s: %d of %d rows are longer than %s and left out: %s", self.source, left_out, rows, limit, reason
            )


def without_pictures(prompts: list[Prompt], vision: VisionConfig, source: str | Path) -> list[Prompt]:
    """Check that prompts without pictures have no token of one. Raises UserError."""
    for number, prompt in enumerate(prompts):
        if np.isin(prompt.token_ids, (vision.image_token_id, vision.video_token_id)).any():
            found = f"{source}, row {number}: has tokens of images, and a MindRecord has no images"
            raise UserError(f"{found}; give the rows themselves, as JSONL or parquet.")
    return prompts


def _talks(value: Any) -> bool:
    """Test for a list of messages."""
    return isinstance(value, list) and any(isinstance(one, Mapping) and "role" in one for one in value)
