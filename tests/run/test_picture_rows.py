"""Rows with images as turns: image tokens repeated, pictures divided, lengths kept, and what is left out or refused."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from seeing_task import make_seeing_task

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.run.picture_rows import read_shown

PIXELS = np.random.default_rng(1).integers(0, 256, (16, 24, 3), np.uint8)  # 2 x 3 tokens, or less after the resize


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def vision(seeing):
    return read_hf_config(seeing.model, seeing=True).vision


@pytest.fixture(scope="module")
def tokenizer(seeing):
    return Tokenizer.from_path(seeing.model)


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


ASKED = ("user", "<image>What?"), ("assistant", "It.")


def test_prompts_have_one_run_of_tokens_for_each_picture(seeing, tokenizer, vision):
    rows = [json.loads(line) for line in seeing.rows.read_text().splitlines()]
    found = read_shown(seeing.rows, tokenizer, vision)
    assert len(found) == len(rows)
    for shown, row in zip(found, rows, strict=True):
        assert len(shown.prompt) == len(row["images"])
        assert not shown.response
        assert [picture.tokens for picture in shown.prompt] == [4] * len(shown.prompt)
        assert (shown.turns.prompt_ids == vision.image_token_id).sum() == 4 * len(shown.prompt)
        start = tokenizer.token_to_id("<|vision_start|>")
        assert (shown.turns.prompt_ids == start).sum() == len(shown.prompt)
        answer = tokenizer.decode(shown.turns.response_ids[shown.turns.sampled], skip_special_tokens=True)
        assert answer == row["messages"][1]["content"]


def test_pictures_of_later_turns_are_the_response_s(tokenizer, vision):
    messages = said(*ASKED, ("user", "And <image>?"), ("assistant", "Too."))
    row = {"messages": messages, "images": [Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1].copy())]}
    (shown,) = read_shown("rows", tokenizer, vision, given=[row])
    assert (len(shown.prompt), len(shown.response)) == (1, 1)
    assert shown.prompt[0].digest != shown.response[0].digest
    seen = shown.turns.response_ids == vision.image_token_id
    assert seen.sum() == shown.response[0].tokens
    assert not shown.turns.sampled[seen].any()
    assert len(shown.turns.sampled) == len(shown.turns.response_ids)


QUESTION = {"type": "text", "text": "What?"}
FORMS = {
    "image": {"messages": said(*ASKED), "image": "one.png"},
    "prompt": {
        "prompt": said(ASKED[0]),
        "completion": said(ASKED[1]),
        "images": [{"bytes": None, "path": "one.png"}],
    },
    "no mark": {"prompt": said(("user", "What?")), "completion": said(ASKED[1]), "images": ["one.png"]},
    "conversations": {
        "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "It."}],
        "images": ["one.png"],
    },
    "own image": {"messages": said(("user", [{"type": "image", "image": "one.png"}, QUESTION]), ASKED[1])},
    "part": {"messages": said(("user", [{"type": "image"}, QUESTION]), ASKED[1]), "images": ["one.png"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_other_suites_rows_are_the_same_turns(tokenizer, vision, tmp_path, form):
    Image.fromarray(PIXELS).save(tmp_path / "one.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps(FORMS[form]) + "\n")
    (found,) = read_shown(tmp_path / "rows.jsonl", tokenizer, vision)
    plain = {"messages": said(*ASKED), "images": [Image.fromarray(PIXELS)]}
    (expected,) = read_shown("rows", tokenizer, vision, given=[plain])
    np.testing.assert_array_equal(found.turns.prompt_ids, expected.turns.prompt_ids)
    np.testing.assert_array_equal(found.turns.response_ids, expected.turns.response_ids)
    assert found.prompt[0].digest == expected.prompt[0].digest


def test_control_tokens_in_a_row_s_text_are_no_images(tokenizer, vision):
    row = {"messages": said(("user", "<image>See <|image_pad|>?"), ASKED[1]), "images": [Image.fromarray(PIXELS)]}
    (shown,) = read_shown("rows", tokenizer, vision, given=[row])
    assert (shown.turns.prompt_ids == vision.image_token_id).sum() == shown.prompt[0].tokens


def test_rows_are_cut_behind_their_images_or_left_out(tokenizer, vision, caplog):
    image = Image.fromarray(PIXELS)
    short = {"messages": said(*ASKED), "images": [image]}
    late = {"messages": said(*ASKED, ("user", "And <image>?"), ("assistant", "Too, I say.")), "images": [image] * 2}
    whole = read_shown("rows", tokenizer, vision, given=[short, late])
    lengths = [len(one.turns.prompt_ids) + len(one.turns.response_ids) for one in whole]
    (_, cut) = read_shown("rows", tokenizer, vision, given=[short, late], max_length=lengths[1] - 3)
    assert len(cut.turns.response_ids) == len(whole[1].turns.response_ids) - 3
    behind = len(whole[1].turns.prompt_ids) + np.flatnonzero(whole[1].turns.response_ids == vision.image_token_id)[-1]
    with caplog.at_level(logging.WARNING):
        (kept,) = read_shown("rows", tokenizer, vision, given=[short, late], max_length=int(behind))
    assert not kept.response
    assert "1 of 2 rows are left out, whose prompts or images fill data.max_length" in caplog.text


def test_a_file_without_images_is_read_as_for_other_models(tokenizer, vision):
    (shown,) = read_shown("rows", tokenizer, vision, given=[{"prompt": "1+1=", "completion": "2"}])
    assert not shown.prompt
    with pytest.raises(UserError, match="rows, row 0: a text has a token of images"):
        read_shown("rows", tokenizer, vision, given=[{"prompt": "<|image_pad|> 1+1=", "completion": "2"}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": said(*ASKED), "images": []}, None),
        ({"messages": said(*ASKED), "images": "one.png"}, "images should be a list, and is 'one.png'"),
        ({"messages": said(*ASKED), "images": [b"x"], "image": b"x"}, "has both images and image"),
        ({"messages": said(*ASKED), "images": [b"x"] * 2}, "the row has 2 images, and its messages have 1 place"),
        ({"messages": said(*ASKED), "images": [b"x"]}, "image 1: the bytes are no image"),
        ({"prompt": "Q", "completion": "A", "images": [b"x"]}, "needs messages, conversations, or prompt"),
        ({"messages": said(("user", "Q"), ("assistant", "<image>")), "images": [b"x"]}, "of the role 'assistant'"),
    ],
)
def test_malformed_rows_are_refused_with_their_place(tokenizer, vision, row, message):
    if message is None:
        assert read_shown("rows", tokenizer, vision, given=[row])
        return
    with pytest.raises(UserError, match=f"^rows, row 0: .*{message}"):
        read_shown("rows", tokenizer, vision, given=[row])
