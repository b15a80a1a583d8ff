"""Pictures that tools showed in responses: in rows of all forms, back for a replay, in the report, and for rewards."""

import base64
import json
from dataclasses import replace

import numpy as np
import orjson
import pytest
from PIL import Image
from responses import made_rollout

from mindrlhf.commands.show import _answer
from mindrlhf.configs.images import ImageSettings
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.records.formats import pack, read_record, unpack, write_record
from mindrlhf.records.pictures import NOTHING, restored_pictures, stored_pictures
from mindrlhf.records.rows import experiences_of, rows_of
from mindrlhf.records.writer import ResponseWriter
from mindrlhf.report.answers import answer_entry
from mindrlhf.report.groups import read_groups
from mindrlhf.rewards.samples import reward_samples
from mindrlhf.types import Experience, Prompt, RolloutGroup

SETTINGS = ImageSettings(min_pixels=64, max_pixels=256, patch_size=4)
IDS = [5, 6, 60, 60, 7, 8, 60, 60, 60, 60, 9, 3]
SAMPLED = [1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


@pytest.fixture(scope="module")
def pictures():
    """Two tokens, and four."""
    rng = np.random.default_rng(2)
    small, large = (rng.integers(0, 256, shape, np.uint8) for shape in ((8, 16, 3), (16, 16, 3)))
    return {2: ImageProcessor(SETTINGS).picture(small, "here"), 6: ImageProcessor(SETTINGS).picture(large, "here")}


@pytest.fixture
def experience(pictures):
    prompt = Prompt(4, np.array([1, 2], np.int32), {"ground_truth": "4"})
    numbers = {name: np.zeros(len(IDS), np.float32) for name in ("behaviour_log_probs", "policy_log_probs")}
    showing, plain = (made_rollout(4, i, np.array(IDS), sampled=np.array(SAMPLED, bool), **numbers) for i in range(2))
    figures = tuple({"entropy": np.arange(len(IDS), dtype=np.float32)} for _ in range(2))
    group = RolloutGroup(prompt, (replace(showing, pictures=pictures), plain))
    rewards = np.array([1.0, 0.5])
    return Experience(group, rewards, {"f": rewards}, np.zeros(2, np.float32), 1, token_figures=figures)


def decode(ids) -> str:
    return " ".join(map(str, ids))


def assert_pictures(experiences, pictures):
    first, second = experiences[0].group.rollouts
    assert second.pictures == {}
    assert list(first.pictures) == list(pictures)
    for place, picture in pictures.items():
        assert first.pictures[place].digest == picture.digest
        assert first.pictures[place].settings == SETTINGS
        np.testing.assert_array_equal(first.pictures[place].pixels, picture.pixels)


def test_a_replay_has_the_pixels(tmp_path, experience, pictures):
    write_record(tmp_path / "r.mindrecord", rows_of(1, [experience]))
    assert_pictures(read_record(tmp_path / "r.mindrecord")[0][1], pictures)
    assert_pictures(experiences_of(unpack(pack(list(rows_of(1, [experience])))))[0][1], pictures)


def test_rows_for_people_have_each_once_at_its_turn(tmp_path, experience, pictures):
    writer = ResponseWriter(tmp_path, None, decode)
    writer.add(1, [experience])
    writer.close(finished=True)
    first, second = (json.loads(line) for line in (tmp_path / "step_000001.jsonl").read_text().splitlines())
    names = [picture.name for picture in pictures.values()]
    assert first["completion"] == "5 6 60 7 8 60 9 3"
    assert first["turns"] == [[True, "5 6"], [False, "60 7"], [True, "8"], [False, "60 9"], [True, "3"]]
    assert first["turn_images"] == [[], names[:1], [], names[1:], []]
    assert "turn_images" not in second
    assert [bool(text) for text in first["tokens"]["text"]] == [place not in (3, 7, 8, 9) for place in range(len(IDS))]
    for picture in pictures.values():
        with Image.open(tmp_path / "images" / f"{picture.name}.png") as image:
            np.testing.assert_array_equal(np.asarray(image), picture.pixels)
    (group,) = read_groups(tmp_path / "step_000001.jsonl", 1)
    (shown,), (plain,) = group.answers()
    content = answer_entry([shown])["pictures"]
    assert list(map(len, content)) == [0, 1, 0, 1, 0]
    assert all(source.startswith("data:image/png;base64,") for part in content for source in part)
    assert "pictures" not in answer_entry([plain])
    text = _answer(shown, full=True).plain
    assert text.index("60 7") < text.index(names[0]) < text.index("60 9") < text.index(names[1]) < text.index("3", -1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda rows: [[11, *row[1:]] for row in rows], "a picture ends at token 13 of 12|is at token 11"),
        (lambda rows: [[rows[0][0], *row[1:]] for row in rows], "a picture is at token 2"),
        (lambda rows: [[-1, *row[1:]] for row in rows], "a picture is at token -1"),
        (lambda rows: [["2", *row[1:]] for row in rows], "a picture is at token '2'"),
        (lambda rows: [[*row[:2], base64.b64encode(b"x").decode()] for row in rows], "the bytes are no image"),
        (lambda rows: [[*row[:2], "\u20ac"] for row in rows], "cannot be read"),
        (lambda rows: [[row[0], {**row[1], "patch_size": 5}, row[2]] for row in rows], "has other sides"),
        (lambda rows: [[row[0], {"patch": 5}, row[2]] for row in rows], "cannot be read"),
        (lambda rows: [[2]], "not enough values"),
    ],
)
def test_what_no_run_writes_is_refused(pictures, changed, said):
    text = orjson.dumps(changed(json.loads(stored_pictures(pictures)))).decode()
    with pytest.raises(ValueError, match=said):
        restored_pictures(text, len(IDS))
    assert restored_pictures(NOTHING, 3) == {}


def test_rewards_see_marks_and_objects(experience, pictures):
    showing, plain = reward_samples(decode, [experience.group], 20, [None, None])
    assert showing.fields["conversation"] == "5 6<image>7 8<image>9 3"
    assert showing.completion == "5 6 8 3"
    for image, picture in zip(showing.objects["tool_images"], pictures.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(image), picture.pixels)
    assert "tool_images" not in plain.objects
