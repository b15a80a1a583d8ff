"""Files of responses: JSONL as people read it, archives bit for bit, and what earlier versions wrote."""

import errno
import json
import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from responses import made_rollout

from mindrlhf.data.mindrecord import write_columns
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json_lines
from mindrlhf.files.naming import step_path
from mindrlhf.records.formats import pack, read_record, read_record_rows, unpack, write_record, write_text
from mindrlhf.records.rows import ADDED, SCHEMA, experiences_of, rows_of, text_row, token_texts
from mindrlhf.types import Experience, Prompt, RolloutGroup

TURN_REWARDS = [[1 / 3, -2.0], [0.0], [1e-30], [2.5, -0.0]]
WORDS = ["<|im_end|>", "2", "+", "=", "4", "五"]


def decode(ids: np.ndarray) -> str:
    return "".join(WORDS[index] for index in ids)


@pytest.fixture
def experience():
    def rollout(index, ids, finish):
        return made_rollout(7, index, ids, finish)

    prompt = Prompt(7, np.array([1, 2, 1, 3], np.int32), {"task": "gsm8k", "ground_truth": "4"})
    group = RolloutGroup(prompt, (rollout(0, [4, 0], "eos"), rollout(1, [5, 5, 5], "length")))
    return Experience(
        group,
        np.array([1.5, np.nan], np.float32),
        {"gsm8k": np.array([1, np.nan], np.float32), "format": np.array([0.5, np.nan], np.float32)},
        np.array([0.75, 0], np.float32),
        12,
    )


def test_a_step_reads_back_as_text(tmp_path, experience):
    path = write_text(tmp_path / "rollouts", 12, rows_of(12, [experience], decode))
    assert path == step_path(tmp_path / "rollouts", 12, ".jsonl")
    assert path.name == "step_000012.jsonl"
    first, second = read_json_lines(path)
    assert first == {
        "step": 12,
        "prompt_id": 7,
        "sample_index": 0,
        "prompt": "2+2=",
        "completion": "4<|im_end|>",
        "ground_truth": "4",
        "reward": 1.5,
        "rewards": {"gsm8k": 1.0, "format": 0.5},
        "advantage": 0.75,
        "finish_reason": "eos",
        "prompt_length": 4,
        "response_length": 2,
    }
    assert second["rewards"] == {"gsm8k": None, "format": None}
    assert second["reward"] is None
    assert second["finish_reason"] == "length"
    assert "五五五" in path.read_text(encoding="utf-8"), "readable in an editor, without escapes"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_an_earlier_dump_alone(tmp_path, experience, monkeypatch):
    path = write_text(tmp_path, 1, rows_of(1, [experience], decode))
    before = path.read_bytes()

    def interrupted(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(UserError, match="No space left"):
        write_text(tmp_path, 1, [])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_plain_json(experience):
    rows = [text_row(row) for row in rows_of(12, [experience], decode)]
    assert json.loads(json.dumps(rows))[0] == rows[0]


def test_an_archive_keeps_every_bit(experience):
    rows = list(rows_of(12, [experience]))
    rows[0] |= {"seed": 2**62, "greedy_reward": 0.1, "sampled": np.array([True, False])}
    for mine, its in zip(unpack(pack(rows)), rows, strict=True):
        assert list(mine) == list(SCHEMA)
        for name, value in mine.items():
            assert type(value) is type(its[name]), name
            assert np.asarray(value).dtype == np.asarray(its[name]).dtype, name
            np.testing.assert_array_equal(value, its[name])
    assert unpack(pack([])) == []


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-30], lambda b: b"no archive", lambda b: b.replace(b"plain", b"other")]
)
def test_other_bytes_are_no_archive(experience, damage):
    with pytest.raises(ValueError, match=r"\S"):
        unpack(damage(pack(list(rows_of(12, [experience])))))


# Before `policy_step` and `sampled` there was `kept`, 1 for a group that was carried over from an earlier step.
EARLIER = {name: kind for name, kind in SCHEMA.items() if name not in ADDED}


def assert_earlier(steps, step: int):
    """Two groups: the first was drawn in the step, the second before it; all tokens were sampled."""
    [(found, experiences)] = steps
    assert found == step
    assert [one.policy_step for one in experiences] == [step, step - 1]
    for one in experiences:
        for rollout in one.group.rollouts:
            assert rollout.sampled.dtype == bool
            assert rollout.sampled.shape == rollout.response_ids.shape
            assert rollout.sampled.all()
            assert "turn_rewards" not in rollout.tokens


def test_a_mindrecord_of_an_earlier_version(tmp_path, experience):
    rows = [row for _ in range(2) for row in rows_of(5, [experience])]
    earlier = [{name: row[name] for name in EARLIER} | {"kept": int(at > 1)} for at, row in enumerate(rows)]
    write_columns(tmp_path / "x.mindrecord", EARLIER | {"kept": {"type": "int64"}}, earlier)
    assert_earlier(read_record(tmp_path / "x.mindrecord"), 5)
    without = [{name: row[name] for name in EARLIER} for row in rows]
    write_columns(tmp_path / "y.mindrecord", EARLIER, without)
    assert [one.policy_step for _, step in read_record(tmp_path / "y.mindrecord") for one in step] == [5, 5]


def test_figures_of_tokens_are_the_same_in_all_forms(tmp_path, experience):
    """Those of the first answer only; JSONL has the tokens' texts alongside."""
    ratio = np.array([1 / 3, 1.1], np.float32)
    figures = {"advantage": np.array([0.75, 0.75], np.float32), "ratio": ratio, "clipped": np.array([0, 1], np.float32)}
    described = replace(experience, token_figures=(figures, {}))
    rows = list(rows_of(12, [described], decode))
    first, second = read_json_lines(write_text(tmp_path, 12, rows))
    assert "tokens" not in second
    assert first["tokens"]["text"] == ["4", "<|im_end|>"]
    assert first["tokens"]["sampled"] == [1, 1]
    write_record(tmp_path / "x.mindrecord", rows)
    for back in (read_record_rows(tmp_path / "x.mindrecord"), unpack(pack(rows))):
        assert [row["token_figures"] for row in back] == [row["token_figures"] for row in rows]
        kept = json.loads(back[0]["token_figures"])
        assert list(kept) == list(figures)
        for name, values in figures.items():
            np.testing.assert_array_equal(np.array(kept[name], np.float32), values)
            assert first["tokens"][name] == kept[name]
    assert rows[1]["token_figures"] == "{}"


@pytest.mark.parametrize("text", ["Grüße, 五 🙂!", "🙂🙂", "a", "\ufffd b"])
def test_texts_of_tokens_add_up_to_the_answer(text):
    """Tokens of one byte, as a byte-level tokenizer's smallest: characters are cut apart."""
    ids = np.frombuffer(text.encode(), np.uint8)
    texts = token_texts(ids, lambda some: bytes(some.tolist()).decode("utf-8", "replace"))
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_texts_of_tokens_of_a_tokenizer_that_drops_the_first_space():
    pieces = ["▁one", "▁two", "teen", "▁"]
    texts = token_texts(np.array([0, 1, 2, 1, 3]), lambda ids: "".join(pieces[i] for i in ids)[1:].replace("▁", " "))
    assert texts == ["one", " two", "teen", " two", " "]


def test_files_of_a_version_without_occurrences(tmp_path, experience):
    """A prompt that a step drew twice has none there: each group counts as the first one."""
    again = replace(experience, group=replace(experience.group, prompt=replace(experience.group.prompt, occurrence=1)))
    rows = list(rows_of(12, [experience, again]))
    assert [row["occurrence"] for row in rows] == [0, 0, 1, 1]
    with np.load(BytesIO(pack(rows))) as archive:
        members = dict(archive)
    plain = json.loads(members["plain"].tobytes())
    assert plain.pop("occurrence") == [0, 0, 1, 1]
    earlier = BytesIO()
    np.savez(earlier, **members | {"plain": np.frombuffer(json.dumps(plain).encode(), np.uint8)})
    before = {name: kind for name, kind in SCHEMA.items() if name != "occurrence"}
    as_bytes = [name for name, kind in before.items() if kind["type"] == "bytes"]
    stored = ({name: row[name] for name in before} | {name: row[name].tobytes() for name in as_bytes} for row in rows)
    write_columns(tmp_path / "x.mindrecord", before, stored)
    for steps in (experiences_of(unpack(earlier.getvalue())), read_record(tmp_path / "x.mindrecord")):
        [(_, groups)] = steps
        assert [one.group.prompt.occurrence for one in groups] == [0, 0]
        assert [len(one.group.rollouts) for one in groups] == [2, 2]


def test_an_archive_of_an_earlier_version():
    """A part of a step that an earlier version wrote: two groups of two, the second carried over."""
    rows = unpack((Path(__file__).parent / "earlier_part.npz").read_bytes())
    assert_earlier(experiences_of(rows), 4)
    [(_, (first, second))] = experiences_of(rows)
    assert first.group.prompt.fields == {"task": "gsm8k", "question": "Wie viel? \U0001f642"}
    assert (first.group.prompt.id, second.group.prompt.id) == (7, 2**40)
    assert [rollout.response_ids.tolist() for rollout in second.group.rollouts] == [[2, 0], [2, 1]]
    np.testing.assert_array_equal(first.rewards, np.array([1 / 3, np.nan], np.float32))
    np.testing.assert_array_equal(second.rewards_by_function["gsm8k"], np.array([0.5, 0.25], np.float32))
    np.testing.assert_array_equal(first.group.rollouts[1].row("policy_log_probs"), np.float32([-0.125, -1 / 3]))
    assert (first.greedy_reward, first.group.rollouts[0].seed) == (0.1, 2**40)


def test_an_archive_of_the_version_before_token_arrays():
    """Three groups of conversations with rewards of turns; the second is of a prompt that the step drew again."""
    content = (Path(__file__).parent / "turns_part.npz").read_bytes()
    [(step, groups)] = experiences_of(unpack(content))
    rollouts = [rollout for one in groups for rollout in one.group.rollouts]
    rewards = [rollout.row("turn_rewards") for rollout in rollouts]
    assert [row[~np.isnan(row)].tolist() for row in rewards if not np.isnan(row).all()] == TURN_REWARDS
    assert [rollout.sampled.tolist() for rollout in rollouts[:2]] == [[i % 4 != 2 for i in range(n)] for n in (5, 8)]
    with np.load(BytesIO(content)) as earlier, np.load(BytesIO(pack(list(rows_of(step, groups))))) as archive:
        for name in ("prompt_ids", "response_ids", "sampled", "behaviour_log_probs", "policy_log_probs"):
            assert archive[name].tobytes() == earlier[name].tobytes()
        mine, its = (json.loads(one["plain"].tobytes()) for one in (archive, earlier))
        assert mine.keys() - its.keys() == {"pictures"}
        assert its.keys() <= mine.keys()
        assert mine["turn_rewards"] == its["turn_rewards"]
        assert {name: mine["lengths"][name] for name in its["lengths"]} == its["lengths"]
        assert mine["lengths"].keys() - its["lengths"].keys() == {"routing", "prompt_routing", "policy_steps"}


def test_a_record_is_written_from_an_archive(tmp_path, experience):
    """What a killed run has left in parts becomes its MindRecord."""
    rows = unpack((Path(__file__).parent / "earlier_part.npz").read_bytes())
    write_record(tmp_path / "x.mindrecord", rows)
    assert_earlier(read_record(tmp_path / "x.mindrecord"), 4)
