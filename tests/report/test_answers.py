"""Answers for the page: what is collapsed, indexed and packed, and what is read again."""

import base64
import json
import os
from io import BytesIO

import pytest
from PIL import Image
from run_folders import make_run, repeated_row, rollout_rows, unpacked

from mindrlhf.errors import UserError
from mindrlhf.files.naming import ROLLOUTS_FOLDER, image_path
from mindrlhf.records.formats import write_text
from mindrlhf.report import answers as answers_module
from mindrlhf.report.answers import AnswerReader, answer_entry
from mindrlhf.report.groups import RolloutGroupText


def entries(rows):
    return list(map(answer_entry, RolloutGroupText(1, 0, "", None, tuple(rows)).answers()))


def test_equal_answers_are_one_and_the_best_come_first():
    rows = [repeated_row(20, sample) for sample in range(4)]
    right, wrong = entries(rows)
    assert (right["text"], right["reward"]) == (" 72<|im_end|>", 1.0)
    assert right["samples"] == [[0, 0.5, 2, "eos"], [1, 0.5, 2, "eos"]]
    assert [sample[0] for sample in wrong["samples"]] == [2, 3]
    assert right["tokens"]["entropy"] == [0.1, 0.7, 0.0]
    assert right["rewards"] == {"gsm8k": 1.0, "format": 1.0}


def test_equal_texts_with_other_rewards_or_turns_stay_apart():
    row = {"completion": "a", "reward": 0.0}
    turns = row | {"turns": [[True, "a"], [False, ""]]}
    different = entries([row, row | {"reward": None}, row | {"reward": 2.0}, turns, row])
    assert [(one["reward"], len(one["samples"]), "turns" in one) for one in different] == [
        (2.0, 1, False),
        (0.0, 2, False),
        (0.0, 1, True),
        (None, 1, False),
    ]
    assert "rewards" not in different[0], "one function's reward is the reward"


def test_what_functions_noted_is_shown_with_the_answer():
    row = {"completion": "a", "reward": 0.0}
    noted = [row | {"reward_notes": {"judge": {"why": why}}} for why in ("late", "<b>early</b>", "late")]
    (one,) = entries([row, *noted, row | {"reward_notes": {}}])
    assert one["notes"] == [("judge why", "late"), ("judge why", "<b>early</b>")]
    assert "notes" not in entries([row])[0]


def test_pictures_of_a_prompt_are_in_the_page(tmp_path):
    """As they are if they are small; a missing or damaged one has its place."""
    names = ["a" * 32, "b" * 32, "c" * 32, "d" * 32]
    (tmp_path / ROLLOUTS_FOLDER / "images").mkdir(parents=True)
    files = [image_path(tmp_path / ROLLOUTS_FOLDER, name) for name in names]
    Image.new("RGB", (32, 16), "red").save(files[0])
    Image.new("RGB", (1600, 400), "blue").save(files[1])
    files[2].write_bytes(b"no picture")
    write_text(tmp_path / ROLLOUTS_FOLDER, 1, [row | {"images": names} for row in rollout_rows(1)])
    small, large, *missing = one_group(tmp_path)["images"]
    assert base64.b64decode(small.partition(",")[2]) == files[0].read_bytes()
    with Image.open(BytesIO(base64.b64decode(large.partition(",")[2]))) as shown:
        assert (shown.size, shown.getpixel((5, 5))) == ((384, 96), (0, 0, 255))
    assert missing == [None, None]


def one_group(folder):
    """The first group of a run's packed answers."""
    return unpacked(AnswerReader().read(folder, 1))[0]


def test_long_texts_and_token_lists_are_cut(monkeypatch):
    monkeypatch.setattr(answers_module, "MOST_TEXT", 10)
    monkeypatch.setattr(answers_module, "MOST_TOKENS", 2)
    (one,) = entries([repeated_row(1, 3) | {"turns": [[True, "x" * 100], [False, "y" * 100]]}])
    assert one["text"].startswith(" 71<|")
    assert "characters ...]" in one["text"]
    assert all("[... 96 characters ...]" in text for _, text in one["turns"])
    assert one["tokens"]["text"] == [" 7", "1"]
    assert one["more_tokens"] == 1


def test_the_index_has_all_groups_in_the_order_of_the_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "CHUNK_BYTES", 2000)
    folder = make_run(tmp_path, steps=9)
    answers = AnswerReader().read(folder, 9)
    assert len(answers.chunks) > 3
    assert answers.index["prompt"][:8] == [10, 11, 20, 21, 30, 31, 7, 40]
    assert answers.index["step"][:8] == [1, 1, 2, 2, 3, 3, 3, 4]
    assert answers.index["rewards"][:2] == [[0.0, 0.0, 1.0, 0.0]] * 2
    assert answers.index["different"][6] == 1, "four times the same"
    groups = unpacked(answers)
    assert len(groups) == len(answers.index["step"])
    for step, prompt, group in zip(answers.index["step"], answers.index["prompt"], groups, strict=True):
        expected = [row for row in rollout_rows(step) if row["prompt_id"] == prompt]
        assert group["prompt"] == expected[0]["prompt"]
        assert group["truth"] == "72"
        assert sum(len(answer["samples"]) for answer in group["answers"]) == 4
        assert {answer["text"] for answer in group["answers"]} == {row["completion"] for row in expected}
    assert sorted(set(answers.index["chunk"])) == list(range(len(answers.chunks)))


def test_steps_with_the_same_answers_are_chunks_of_their_own(tmp_path, monkeypatch):
    """Chunks are named by their content, in which the step is."""
    monkeypatch.setattr(answers_module, "CHUNK_BYTES", 1)
    for step in (1, 2):
        write_text(tmp_path / ROLLOUTS_FOLDER, step, rollout_rows(4))
    assert len(AnswerReader().read(tmp_path, 2).chunks) == 2


def test_some_answers_of_some_steps(tmp_path):
    folder = make_run(tmp_path, steps=12)
    some = AnswerReader(samples=3, most_steps=4).read(folder, 12)
    assert [one.step for one in some.steps] == [1, 5, 8, 12], "evenly, both ends included"
    assert [len(one.lengths) for one in some.steps] == [4] * 4, "whole groups"
    assert some.all_steps == 12
    assert AnswerReader(samples=5, most_steps=1).read(folder, 12).index["prompt"] == [10, 11]
    assert AnswerReader().read(folder, 2).all_steps == 2, "later steps are an earlier, longer run's"
    assert AnswerReader().read(tmp_path / "absent", 2).chunks == {}


def test_only_what_has_changed_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "CHUNK_BYTES", 4000)
    folder, reader, read = make_run(tmp_path, steps=6), AnswerReader(), []
    real = answers_module.read_groups
    monkeypatch.setattr(answers_module, "read_groups", lambda path, step: read.append(step) or real(path, step))
    before = reader.read(folder, 6)
    path = write_text(folder / ROLLOUTS_FOLDER, 7, rollout_rows(7))
    after = reader.read(folder, 7)
    assert read == [1, 2, 3, 4, 5, 6, 7]
    assert list(after.chunks)[:2] == list(before.chunks)[:2], "full chunks stay, which a browser may have loaded"
    path.write_bytes(path.read_bytes().replace(b'"reward":1.0', b'"reward":3.0'))
    os.utime(path, ns=(1, 1))
    assert reader.read(folder, 7).index["rewards"][-1] == [0.0, 0.0, 3.0, 0.0] != after.index["rewards"][-1]
    assert read[-1] == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt_id", [1]),
        ("prompt_id", "1"),
        ("prompt", None),
        ("completion", 7),
        ("reward", "high"),
        ("reward", True),
        ("reward", 10**400),
        ("rewards", [1.0]),
        ("rewards", {"gsm8k": "1"}),
        ("response_length", "12"),
        ("ground_truth", {"a": 1}),
        ("advantage", "none"),
        ("turns", [[True]]),
        ("tokens", {"text": ["a"]}),
        ("tokens", {"text": "ab", "sampled": [1, 1]}),
    ],
)
def test_rows_of_another_kind_are_refused_by_file_and_line(tmp_path, key, value):
    make_run(tmp_path, steps=1)
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    rows[2][key] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"{path}, line 3: {key}"):
        AnswerReader().read(tmp_path, 1)
