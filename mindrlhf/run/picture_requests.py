"""Requests of `mindrlhf generate` for models that see."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.requests import Request
from mindrlhf.data.source import is_source
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.rewards.columns import json_ready
from mindrlhf.run.picture_prompts import PictureForm, PicturePrompts, without_pictures
from mindrlhf.run.picture_source import PictureRow, picture_rows


def read_picture_requests(
    path: str | Path, tokenizer: Tokenizer, vision: VisionConfig, form: PictureForm, limit: int | None = None
) -> list[Request]:
    """Read the prompts of a file with pictures, as `data.requests.read_requests` does."""
    if not is_source(path):
        prompts = without_pictures(read_prompts(path, tokenizer)[:limit], vision, path)
        return [(prompt, {"prompt": tokenizer.decode(prompt.token_ids), **prompt.fields}) for prompt in prompts]
    rows = picture_rows(path, split="train", limit=limit)
    prompts = PicturePrompts(tokenizer, vision, path, form).of_rows(rows)
    return [(prompt, json_ready(_written(rows[prompt.id]))) for prompt in prompts]


def typed_picture_requests(
    texts: Sequence[str], images: Sequence[str], tokenizer: Tokenizer, vision: VisionConfig, form: PictureForm
) -> list[Request]:
    """Write texts as users' questions, each with all images."""
    prompts = PicturePrompts(tokenizer, vision, "--prompt", form).of_texts(texts, images)
    shown = {"images": list(images)} if images else {}
    return [(prompt, {"prompt": text} | shown) for prompt, text in zip(prompts, texts, strict=True)]


def _written(row: PictureRow) -> dict[str, Any]:
    """Return a row's values; its images only where they are texts, such as paths."""
    return dict(row.row.values) if all(isinstance(one, str) for one in row.images) else row.texts
