"""Rows with images, changed at random: each is read, or costs one sentence with file and line."""

import base64
import copy
import io
import json
import random

import numpy as np
import pytest
from PIL import Image
from seeing_task import make_seeing_task

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.run.picture_rows import read_shown
from mindrlhf.run.training_data import read_problems

FEW, MANY = 40, 1000
MARKS = ("<image>", "<image><image>", "<video>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "")


def png(width: int, height: int, mode: str = "RGB") -> str:
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).convert(mode).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


GOOD = png(8, 8)
VALUES = (
    None,
    True,
    0,
    -1,
    1e308,
    float("nan"),
    "",
    " ",
    "x.png",
    "/",
    "..",
    "~",
    "a\0b",
    "file://",
    "http://x/y.png",
    "data:",
    "data:,",
    "data:image/png;base64,",
    "data:image/png;base64,AAAA",
    GOOD[:-7],
    GOOD,
    f"data:image/png;base64,{GOOD}",
    "A" * 5000,
    [],
    {},
    [[]],
    {"bytes": None},
    {"bytes": GOOD},
    {"path": "x"},
    {"path": None, "bytes": None},
    {"url": "x"},
    [GOOD],
    png(1, 5000),
    png(4000, 3),
    png(300, 2),
    png(16, 16, "I;16"),
    png(16, 16, "LA"),
    [137, 80, 78, 71],
    {"bytes": [137, 80, 78, 71]},
    "\ud800",
)
PARTS = (
    {"type": "image"},
    {"type": "image", "image": GOOD},
    {"type": "image", "image": None},
    {"type": "image_url", "image_url": {"url": GOOD}},
    {"type": "video", "video": "x"},
    {"type": "audio"},
    {"type": "text"},
    {"type": "text", "text": None},
    {"type": "text", "text": "<image>"},
    {"text": "x"},
    {},
    None,
    "x",
    3,
    [],
    {"type": ["image"]},
    {"type": "image", "path": "/"},
)


def changed(row: dict, rng: random.Random) -> dict:
    """A row with one or two faults, or none."""
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 2)):
        kind = rng.choice(("images", "one", "count", "mark", "part", "role", "content", "drop", "key"))
        message = rng.choice(row.get("messages") or [{}])
        if not isinstance(message, dict):
            continue
        if kind == "images":
            row["images"] = rng.choice(VALUES)
        elif kind == "one" and isinstance(row.get("images"), list):
            row["images"] = [rng.choice(VALUES)] * max(1, len(row["images"]))
        elif kind == "count" and isinstance(row.get("images"), list):
            row["images"] = row["images"] * rng.choice((0, 2, 3))
        elif kind == "mark" and isinstance(message.get("content"), str):
            message["content"] += rng.choice(MARKS)
        elif kind == "part":
            message["content"] = [rng.choice(PARTS) for _ in range(rng.randint(0, 3))]
        elif kind == "role":
            message["role"] = rng.choice(("system", "assistant", "tool", "user", "", None, 3))
        elif kind == "content":
            message["content"] = rng.choice((None, 3, {}, [], ["x"], "\ud800"))
        elif kind == "drop":
            row.pop(rng.choice(list(row)), None)
        elif kind == "key":
            row[rng.choice(("image", "images", "prompt", "question", "videos"))] = rng.choice(VALUES)
        if not row:
            row = {"images": []}
    return row


def demonstrations(file, tokenizer, vision):
    """Ids and pictures of each row."""
    found = read_shown(file, tokenizer, vision)
    ids = (np.concatenate([one.turns.prompt_ids, one.turns.response_ids]) for one in found)
    return zip(ids, ((*one.prompt, *one.response) for one in found), strict=True)


def problems(file, tokenizer, vision):
    return [(one.token_ids, one.pictures) for one in read_problems(file, tokenizer, GRPOSettings(), {}, vision=vision)]


READERS = {"demonstrations": demonstrations, "problems": problems}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_changed_rows_are_read_or_cost_one_sentence(seeing, form, cases):
    tokenizer = Tokenizer.from_path(seeing.model)
    vision = read_hf_config(seeing.model, seeing=True).vision
    given = seeing.rows if form == "demonstrations" else seeing.asked
    rows = [json.loads(line) for line in given.read_text().splitlines()]
    rng = random.Random(form)
    refused = read = 0
    for number in range(cases):
        row = changed(rng.choice(rows), rng)
        file = seeing.rows.with_name(f"hostile_{number}.jsonl")
        file.write_text(json.dumps(row) + "\n")
        try:
            shown = READERS[form](file, tokenizer, vision)
        except UserError as error:
            text = str(error)
            assert "\n" not in text, text
            assert str(file) in text, (row, text)
            refused += 1
            continue
        for ids, pictures in shown:
            assert (ids == vision.image_token_id).sum() == sum(picture.tokens for picture in pictures), row
        read += 1
    assert read > cases / 10
    assert refused > cases / 4
