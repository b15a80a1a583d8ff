"""Images in conversations: the stored prompts of a published template, other suites' rows, and what cannot be read."""

import json

import numpy as np
import pytest

from mindrlhf.data.chat import Renderer
from mindrlhf.data.pictures import token_repeats, with_images
from mindrlhf.data.tasks.conversation import system_prompt, with_system_prompt
from mindrlhf.models.families import FAMILIES

CHAT = FAMILIES["qwen2_5_vl"].chat
IMAGE, PAD = {"type": "image"}, 151655


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def cases(shared):
    facts = json.loads((shared / "golden" / "qwen2_5_vl_tiny" / "golden.json").read_text(encoding="utf-8"))
    return facts["chat_template"]["cases"]


def rendered(case):
    messages, sources = with_images(case["messages"], [object()] * unplaced(case))
    if system_prompt(messages) is None:
        messages = with_system_prompt(messages, CHAT.system)
    options = {key: case[key] for key in ("add_generation_prompt", "add_vision_id")}
    (written,) = Renderer(CHAT.chat_template, {}, trusted=True)([{"messages": messages, **options}])
    return written, sources


def unplaced(case):
    """The images of a case that are not inside of its messages."""
    return len(case["image_token_counts"]) - ("image_url" in json.dumps(case["messages"])) * 2


def test_prompts_are_the_stored_ones(cases, qwen):
    assert len(cases) == 8
    for case in cases:
        written, sources = rendered(case)
        assert written == case["text"], case["name"]
        assert len(sources) == len(case["image_token_counts"])
        ids = qwen.encode(written)
        expanded = np.repeat(ids, token_repeats(ids, case["image_token_counts"], PAD))
        assert expanded.tolist() == case["expanded_ids_qwen2_5"], case["name"]


ROWS = {
    "verl's geo3k": ([("user", "<image>Find x.")], "a", [[IMAGE, text("Find x.")]], "a"),
    "several marks": (
        [("user", "Is <image> or <image> larger?")],
        "ab",
        [[text("Is "), IMAGE, text(" or "), IMAGE, text(" larger?")]],
        "ab",
    ),
    "images beside TRL's plain texts stand before the first question": (
        [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R")],
        "ab",
        ["S", [IMAGE, IMAGE, text("Q")], "A", "R"],
        "ab",
    ),
    "parts with a table's nulls": (
        [("user", [{"type": "image", "text": None}, {"type": "text", "text": "Q", "image": None}])],
        "a",
        [[IMAGE, text("Q")]],
        "a",
    ),
    "parts with their own images": (
        [("user", [{"type": "image", "image": "a"}, "Q", {"image_url": {"url": "b"}}])],
        "",
        [[IMAGE, text("Q"), IMAGE]],
        "ab",
    ),
    "the row's images and parts' own, over several turns": (
        [("user", [IMAGE, text("1")]), ("assistant", "A"), ("user", [text("2"), {"image": "b"}, IMAGE])],
        "ac",
        [[IMAGE, text("1")], "A", [text("2"), IMAGE, IMAGE]],
        "abc",
    ),
    "parts of text are one text": ([("user", [text("Is "), text("it?")])], "", ["Is it?"], ""),
    "marks without images are text": ([("user", "What is <image>?")], "", ["What is <image>?"], ""),
    "an image alone": ([("user", "")], "a", [[IMAGE]], "a"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_other_suites_have_their_images_in_place(name):
    messages, images, contents, sources = ROWS[name]
    given = [{"role": role, "content": content, "name": "kept"} for role, content in messages]
    found, order = with_images(given, images)
    assert [message["content"] for message in found] == contents
    assert order == list(sources)
    assert all(message["name"] == "kept" for message in found)


@pytest.mark.parametrize(
    ("messages", "images", "message"),
    [
        ([("user", "<image><image>Q")], ["a"], "1 image, and its messages have 2 places for them; write <image>"),
        ([("user", "<image>Q")], ["a", "b"], "the row has 2 images, and its messages have 1 place for"),
        ([("user", [IMAGE, text("Q")])], [], "the row has 0 images, and its messages have 1 place for"),
        ([("user", [{"image": "a"}, text("Q")])], ["b"], "the row has 1 image, and its messages have 0 places"),
        ([("system", "S")], ["a"], "the row has 1 image, and no user message"),
        ([("user", [{"type": "video", "video": "v"}])], [], "message 0 has a part of the type 'video'"),
        ([("user", [{"type": "image", "image": "a", "url": "b"}])], [], "message 0 has a part of the type 'image'"),
        ([("user", "Q"), ("user", [7])], [], "message 1 has 7 among its parts"),
        ([("user", [{"type": "text"}])], [], "message 0 has a part of the type 'text'"),
    ],
)
def test_images_without_a_place_and_places_without_an_image_are_refused(messages, images, message):
    with pytest.raises(ValueError, match=message):
        with_images([{"role": role, "content": content} for role, content in messages], images)


def test_image_tokens_are_repeated_in_their_order():
    assert token_repeats([1, 9, 2, 9, 9], [2, 1, 3], 9).tolist() == [1, 2, 1, 1, 3]
    assert token_repeats([1, 2], [], 9).tolist() == [1, 1]
    with pytest.raises(ValueError, match="the chat template writes 1 image token for 2 images"):
        token_repeats([1, 9], [2, 1], 9)
