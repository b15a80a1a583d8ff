"""Problems with images as prompts: forms of rows, image tokens repeated, columns kept, and what is refused."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from seeing_task import make_seeing_task

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.rewards.columns import decode
from mindrlhf.run.picture_prompts import PictureForm, PicturePrompts
from mindrlhf.run.picture_requests import read_picture_requests, typed_picture_requests
from mindrlhf.run.training_data import read_problems

PIXELS = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)  # 2 x 2 tokens
ONE, OTHER = Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1].copy())
SHOWN = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def vision(seeing):
    return read_hf_config(seeing.model, seeing=True).vision


@pytest.fixture(scope="module")
def tokenizer(seeing):
    return Tokenizer.from_path(seeing.model)


@pytest.fixture
def read(tokenizer, vision):
    """Prompts of given rows, with settings of the group `data`."""

    def prompts(*rows, **data):
        config = GRPOSettings(data=data)
        return read_problems("rows", tokenizer, config, {"rows": rows}, vision=vision)

    return prompts


IMAGE = {"type": "image"}
WHAT = {"type": "text", "text": "What?"}
MARKED = [{"role": "user", "content": "<image>What?"}]
ROWS = {
    "marks in messages": {"prompt": MARKED, "images": [ONE]},
    "parts, and images in a column": {"prompt": [{"role": "user", "content": [IMAGE, WHAT]}], "images": [ONE]},
    "no place": {"messages": [{"role": "user", "content": "What?"}], "image": ONE},
    "a question with a mark": {"question": "<image>What?", "image": ONE},
    "a question without one": {"question": "What?", "images": [ONE]},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_form_of_a_row_is_the_same_prompt(read, tokenizer, row):
    (prompt,) = read({"ground_truth": "red", "level": 3, **row})
    assert tokenizer.decode(prompt.token_ids) == ASKED.format(f"{SHOWN}What?")
    assert tokenizer.decode(prompt.written_ids) == tokenizer.decode(prompt.token_ids).replace(
        SHOWN, SHOWN[:16] + SHOWN[55:]
    )
    (picture,) = prompt.pictures
    assert picture.tokens == 4
    assert prompt.position_shift == 2 - 4
    assert decode(prompt.fields)["level"] == 3
    assert prompt.fields["ground_truth"] == "red"
    assert not {"image", "images"} & prompt.fields.keys()


def test_rows_of_verl_keep_their_columns(read, tmp_path):
    (tmp_path / "image.png").write_bytes(b"")
    file = tmp_path / "one.png"
    ONE.save(file)
    verl = {"data_source": "geometry3k", "reward_model": {"style": "rule", "ground_truth": "48"}, "ability": "math"}
    row = verl | {"prompt": MARKED, "images": [{"bytes": file.read_bytes(), "path": None}], "extra_info": {"index": 7}}
    (prompt,) = read(row)
    assert prompt.fields["task"] == "verl"
    assert prompt.fields["ground_truth"] == "48"
    assert json.loads(prompt.fields["extra_info"]) == {"index": 7}
    assert "<image>What?" in prompt.fields["question"]


def test_whole_prompts_have_marks_or_the_tokens_themselves(read, tokenizer):
    texts = ("Look: <image> What?", "Look: <|vision_start|><|image_pad|><|vision_end|> What?")
    for prompt in read(*({"prompt": text, "ground_truth": "a", "images": [ONE]} for text in texts)):
        assert tokenizer.decode(prompt.token_ids) == f"Look: {SHOWN} What?"


def test_a_template_for_one_question_writes_the_tokens(read, tokenizer):
    (prompt,) = read({"question": "<image>What?", "ground_truth": "a", "image": ONE}, template="plain")
    assert tokenizer.decode(prompt.token_ids) == f"{SHOWN}What?\n"


def test_several_images_stand_in_order_and_each_is_kept_once(read, tokenizer):
    row = {"question": "<image> and <image>: <image>?", "ground_truth": "a"}
    first, second, text = read(
        row | {"images": [ONE, OTHER, ONE]},
        row | {"images": [OTHER, ONE, ONE]},
        {"question": "<image>", "ground_truth": "b"},
    )
    assert tokenizer.decode(first.token_ids) == ASKED.format(f"{SHOWN} and {SHOWN}: {SHOWN}?")
    assert first.pictures == tuple(second.pictures[i] for i in (1, 0, 1))
    assert first.pictures[0] is first.pictures[2]
    assert text.pictures == ()
    assert "<image>" in tokenizer.decode(text.token_ids)


def test_a_prompt_with_images_is_left_out_and_never_cut(read, caplog):
    rows = [{"question": words, "ground_truth": "a", "image": ONE} for words in ("Q", "long " * 40)]
    with caplog.at_level(logging.WARNING):
        (prompt,) = read(*rows, max_prompt_length=40)
    assert prompt.id == 0
    assert "1 of 2 rows are longer than data.max_prompt_length 40 and left out: an image is never cut" in caplog.text
    with pytest.raises(UserError, match=r"rows, row 1: the prompt has .* more than data.max_prompt_length 40"):
        read(*rows, max_prompt_length=40, truncation="error")
    with pytest.raises(UserError, match=r"every prompt has more tokens than data.max_prompt_length 5"):
        read(*rows, max_prompt_length=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "<image> or <image>", "image": ONE}, "the row has 1 image, and its messages have 2 places"),
        ({"prompt": "What?", "image": ONE}, "a whole text without a place for its images; write <image> where each"),
        ({"messages": [*MARKED, "R"], "image": ONE}, "message 1 should be an object with a role"),
        ({"question": "Q", "image": ONE, "sketch": [{"role": "user", "content": ONE}]}, "column 'sketch' is a Image"),
        ({"messages": MARKED, "prompt": MARKED, "image": ONE, "completion": [ONE]}, "images are read in the prompt"),
        ({"prompt": "<|image_pad|>What?"}, "writes 1 image token for 0 images"),
        ({"prompt": "<|video_pad|>What?"}, "has a token of videos"),
        ({"prompt": "What? <image>", "image": ONE}, None),
        ({"prompt": "What? <|image_pad|>", "image": ONE}, "ends with an image"),
        ({"question": "Q", "image": "absent.png"}, "image 1: there is no image file"),
        ({"question": "Q", "image": ONE, "images": [ONE]}, "has both images and image"),
    ],
)
def test_what_does_not_fit_is_named_with_its_row(read, row, message):
    rows = {"question": "A", "ground_truth": "a"}, {"ground_truth": "a", **row}
    if message is None:
        assert len(read(*rows)) == 2
        return
    with pytest.raises(UserError, match=r"^rows, row 1: ") as error:
        read(*rows)
    assert message in str(error.value)


def test_typed_questions_show_all_images(tokenizer, vision, tmp_path):
    for name, image in (("one", ONE), ("other", OTHER)):
        image.save(tmp_path / f"{name}.png")
    files = [str(tmp_path / f"{name}.png") for name in ("one", "other")]
    given = tokenizer, vision, PictureForm()
    (first, row), (second, _) = typed_picture_requests(["Which?", "<image>, <image>."], files, *given)
    assert tokenizer.decode(first.token_ids) == ASKED.format(f"{SHOWN}{SHOWN}Which?")
    assert tokenizer.decode(second.token_ids) == ASKED.format(f"{SHOWN}, {SHOWN}.")
    assert row == {"prompt": "Which?", "images": files}
    ((alone, _),) = typed_picture_requests(["Which?"], [], *given)
    assert tokenizer.decode(alone.token_ids) == ASKED.format("Which?")


def test_requests_of_a_file_keep_its_rows(seeing, tokenizer, vision, tmp_path):
    rows = [json.loads(line) for line in seeing.rows.read_text().splitlines()][:4]
    rows = [{"messages": row["messages"][:1], "images": row["images"], "id": i} for i, row in enumerate(rows)]
    file = seeing.rows.with_name("asked.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = read_picture_requests(file, tokenizer, vision, PictureForm(), limit=3)
    assert [row for _, row in requests] == rows[:3]
    assert all(len(prompt.pictures) == 1 for prompt, _ in requests)


def test_a_model_without_image_settings_reads_text(tokenizer, vision):
    bare = PicturePrompts(tokenizer, vision.model_copy(update={"images": None}), "here")
    (prompt,) = bare.of_texts(["What?"], [])
    assert not prompt.pictures
    with pytest.raises(UserError, match=r"has no preprocessor_config.json"):
        bare.of_texts(["What?"], [ONE])
