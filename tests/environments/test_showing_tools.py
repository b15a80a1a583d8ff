"""Answers of tools and environments that show images: their forms, their ids, and those that fail."""

import base64
from pathlib import Path

import numpy as np
import pytest
from environment_talks import call, partner_of, prompts
from seeing_task import image_ids, make_tokenizer
from small_tower import small_tower

from mindrlhf.data.turns import TurnTemplate
from mindrlhf.environments.contents import ContentWriter
from mindrlhf.environments.pool import EnvironmentPool
from mindrlhf.environments.shown import FORGED, PARTS, received
from mindrlhf.errors import UserError

TOOLS = Path(__file__).with_name("showing_tools.py")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def vision(tokenizer):
    return small_tower(max_pixels=256, **image_ids(tokenizer))


@pytest.fixture(scope="module")
def template(tokenizer):
    return TurnTemplate(tokenizer)


@pytest.fixture(scope="module")
def pool(vision):
    with EnvironmentPool({"": ""}, [f"{TOOLS}:draw"], images=vision.images) as pool:
        yield pool


def open_partner(pool, template, tokenizer, vision):
    partner = partner_of(pool, template, tokenizer)
    writer = ContentWriter(template, vision.image_text(tokenizer.id_to_token), vision)
    return type(partner)(pool, template, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), 5, 8, writer)


def answered(partner, tokenizer, how, colour="red"):
    """(text of the reply with each image as one token, its pictures) of a call."""
    partner.begin(prompts({}), 1, 1)
    partner.submit(0, tokenizer.encode(call("draw", colour=colour, how=how)), 7)
    (reply,) = partner.collect(wait=True)
    partner.rewards()
    return tokenizer.decode(reply.token_ids.tolist()), reply


@pytest.mark.parametrize(
    ("how", "text", "sizes"),
    [
        ("pillow", IMAGE, [(16, 16)]),
        ("bytes", IMAGE, [(16, 16)]),
        ("group", IMAGE, [(16, 16)]),
        ("parts", f"It is{IMAGE}< |image_pad|>red.", [(16, 16)]),
        ("two", IMAGE * 2, [(16, 16), (16, 8)]),
        ("verl", f"{IMAGE}It is red.", [(16, 16)]),
        ("verl text", "nothing to see", []),
        ("verl group", f"{IMAGE}a group", [(16, 16)]),
        ("json", '{"text": "a", "image": "a.png"}', []),
    ],
)
def test_what_a_model_is_shown(pool, template, tokenizer, vision, how, text, sizes):
    partner = open_partner(pool, template, tokenizer, vision)
    said, reply = answered(partner, tokenizer, how)
    assert partner.shows
    assert [picture.pixels.shape[:2] for picture in reply.pictures] == sizes
    wide = text
    for picture in reply.pictures:
        wide = wide.replace(IMAGE, f"<|vision_start|>{'<|image_pad|>' * picture.tokens}<|vision_end|>", 1)
        assert picture.pixels[0, 0].tolist() == ([220, 30, 40] if picture.pixels.shape[1] == 16 else [20, 200, 60])
    plain = template.answers([{"role": "tool", "content": "@"}], [])
    assert said == tokenizer.decode(plain.tolist()).replace("@", wide)
    assert partner.statistics.images == len(sizes)
    assert partner.statistics.failures == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("broken", "draw: image 1: the bytes are no image"),
        ("huge", "draw: image 1: "),
        ("url", "draw: image 1: the bytes are no image"),
        ("missing", "draw: image 1: there is no image file nowhere.png"),
        ("odd", "draw: its answer has 3 among its parts, which are texts and images"),
        ("video", "it returned a video"),
    ],
)
def test_a_broken_image_is_a_failed_call_with_a_sentence(pool, template, tokenizer, vision, how, said):
    partner = open_partner(pool, template, tokenizer, vision)
    text, reply = answered(partner, tokenizer, how)
    assert f"Error: {said}" in text or f"Error: TypeError: {said}" in text
    assert reply.pictures == ()
    assert not reply.over
    assert partner.statistics.failures == 1


@pytest.mark.parametrize("how", ["pillow", "parts", "verl"])
def test_where_no_images_are_taken_the_call_fails_and_it_is_said_once(template, tokenizer, how, capfd):
    reason = "rollout.tool_images is False; set it to True"
    with EnvironmentPool({"": ""}, [f"{TOOLS}:draw"], no_images=reason) as pool:
        partner = partner_of(pool, template, tokenizer)
        for _ in range(2):
            text, reply = answered(partner, tokenizer, how)
            assert f"Error: draw has returned an image, and {reason}." in text
            assert reply.pictures == ()
        assert partner.statistics.images is None
    assert capfd.readouterr().out.count(reason) == 1


def test_an_environment_begins_and_answers_with_images(template, tokenizer, vision):
    with EnvironmentPool({"": f"{TOOLS}:Scene"}, images=vision.images) as pool:
        partner = open_partner(pool, template, tokenizer, vision)
        ids = template.prompt([{"role": "user", "content": "Which colour? "}])
        (row,) = prompts({})
        opened, first = partner.begin([type(row)(row.id, ids)], 2, 1)
        whole = tokenizer.decode([*opened[0].token_ids.tolist(), *first[0].token_ids.tolist()])
        pads = "<|image_pad|>" * first[0].pictures[0].tokens
        assert f"Which colour? Look: <|vision_start|>{pads}<|vision_end|> now." in whole
        assert [len(reply.pictures) for reply in first] == [1, 1]
        partner.submit(0, tokenizer.encode("red"), 3)
        (reply,) = partner.collect(wait=True)
        assert reply.pictures[0].pixels[0, 0].tolist() == [20, 200, 60]
        partner.submit(0, tokenizer.encode("green"), 9)
        assert partner.collect(wait=True)[0].over
        assert partner.statistics.images == 3
        partner.rewards()


@pytest.mark.parametrize(
    "part",
    [
        [16, 16, "AAAA"],
        [15, 16, base64.b64encode(bytes(15 * 16 * 3)).decode()],
        [-8, -8, base64.b64encode(bytes(64 * 3)).decode()],
        [16, 16, "\u20ac"],
        [16, 16],
        None,
        7,
    ],
)
def test_forged_images_are_refused(vision, part):
    with pytest.raises(ValueError, match=FORGED):
        received({PARTS: ["text", part]}, vision.images)


def test_no_images_are_taken_of_a_process_that_should_send_none(vision):
    with pytest.raises(ValueError, match=FORGED):
        received({PARTS: ["text"]}, None)
    with pytest.raises(ValueError, match=FORGED):
        received({PARTS: ["text"], "more": 1}, vision.images)
    assert received({PARTS: ["a", "b"]}, vision.images) == ("ab",)


def test_a_template_that_writes_no_image_is_refused(vision, tokenizer):
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}seen{% else %}{{ m.content }}"
    source += "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = TurnTemplate(tokenizer, source)
    with pytest.raises(UserError, match="does not write an image in a message of the role tool"):
        ContentWriter(template, vision.image_text(tokenizer.id_to_token), vision)
    assert np.array_equal(ContentWriter(template).wide(np.arange(3), ["text"])[0], np.arange(3))
