"""Rows of responses: what is made of experiences, and experiences of them again, through a MindRecord."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.records.formats import pack, read_record, unpack, write_record
from mindrlhf.records.rows import SCHEMA, TEXT_KEYS, experiences_of, rows_of, text_row
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup

NAN = float("nan")
REASONS = ("eos", "length", "stop")


def experience(prompt, lengths, rewards, by_function, seed=0, policy_step=1):
    rng = np.random.default_rng([prompt.id, seed])
    rollouts = tuple(
        Rollout(
            prompt_id=prompt.id,
            sample_index=i,
            response_ids=rng.integers(0, 151936, n).astype(np.int32),
            finish_reason=REASONS[i % 3],
            seed=2**40 + seed,
            tokens={
                "sampled": np.arange(n) % 4 != 2 if i else np.ones(n, bool),
                "behaviour_log_probs": -rng.random(n).astype(np.float32),
                "policy_log_probs": -rng.random(n).astype(np.float32) * 2,
            },
        ).with_values({"turn_rewards": dict([(0, 1 / 3), (1, -2.0)][: n - 1] if n < 5 else [])})
        for i, n in enumerate(lengths)
    )
    count = len(lengths)
    return Experience(
        group=RolloutGroup(prompt, rollouts),
        rewards=np.array(rewards, np.float64),
        rewards_by_function={name: np.array(values, np.float64) for name, values in by_function.items()},
        advantages=rng.random(count).astype(np.float32),
        policy_step=policy_step,
        tokens={"reference_log_probs": tuple(rollout.row("policy_log_probs") for rollout in rollouts)},
    )


@pytest.fixture
def steps():
    """Two steps; in the first, prompt 7 comes twice in a row, once with a reward that nobody gave."""
    first = Prompt(
        7, np.array([5, 1, 9], np.int32), {"task": "gsm8k", "question": "Wie viel? 🙂", "ground_truth": "-1,5"}
    )
    second = Prompt(2**40, np.array([3], np.int32), {})
    by = {"gsm8k": [1.0, 0.0, NAN], "format": [0.1, NAN, 1 / 3]}
    return [
        (
            1,
            [
                experience(first, (4, 1, 30), [1.1, 0.0, 1 / 3], by),
                experience(replace(first, occurrence=1), (2, 2, 2), [NAN, 0.5, -1.0], by, seed=1),
                experience(second, (1, 8, 3), [NAN, NAN, NAN], {"gsm8k": [NAN] * 3, "format": [NAN] * 3}),
            ],
        ),
        (4, [experience(first, (3, 3, 3), [0.0, 0.0, 0.0], {}, seed=2, policy_step=3)]),
    ]


def with_routing(one: Experience, width: int, dtype: type) -> Experience:
    """Routing of all tokens, as the engine gives it; of no prompt token where the prompt has one only."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, (len(one.group.prompt.token_ids) - 1, width)).astype(dtype)
    rollouts = tuple(
        replace(
            rollout,
            tokens={
                **rollout.tokens,
                "routing": rng.integers(0, 256, (len(rollout.response_ids), width)).astype(dtype),
                **({"prompt_routing": prompt} if len(prompt) else {}),
            },
        )
        for rollout in one.group.rollouts
    )
    return replace(one, group=replace(one.group, rollouts=rollouts))


def write(path, steps):
    return write_record(path, [row for step, experiences in steps for row in rows_of(step, experiences)])


def assert_same(got: Experience, expected: Experience):
    prompt, other = got.group.prompt, expected.group.prompt
    assert (prompt.id, prompt.occurrence, dict(prompt.fields)) == (other.id, other.occurrence, dict(other.fields))
    for mine, its in [(prompt.token_ids, other.token_ids), (got.rewards, expected.rewards)]:
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)
    assert got.policy_step == expected.policy_step
    assert list(got.rewards_by_function) == list(expected.rewards_by_function)
    for name, values in expected.rewards_by_function.items():
        assert got.rewards_by_function[name].dtype == np.float64
        np.testing.assert_array_equal(got.rewards_by_function[name], values)
    for mine, its in zip(got.group.rollouts, expected.group.rollouts, strict=True):
        assert (mine.prompt_id, mine.sample_index, mine.finish_reason, mine.seed) == (
            its.prompt_id,
            its.sample_index,
            its.finish_reason,
            its.seed,
        )
        assert mine.tokens.keys() == its.tokens.keys()
        for array, other in [(mine.response_ids, its.response_ids), *((mine.row(n), its.row(n)) for n in its.tokens)]:
            assert array.dtype == other.dtype
            np.testing.assert_array_equal(array, other)
    # A replay computes these from its own settings.
    np.testing.assert_array_equal(got.advantages, np.zeros(len(expected.rewards), np.float32))
    assert not got.tokens


def test_what_is_read_is_what_was_written(tmp_path, steps):
    path = tmp_path / "rollouts.mindrecord"
    assert write(path, steps) == 12
    back = read_record(path)
    assert [step for step, _ in back] == [1, 4]
    for (_, got), (_, expected) in zip(back, steps, strict=True):
        assert len(got) == len(expected)
        for mine, its in zip(got, expected, strict=True):
            assert_same(mine, its)


def test_routing_is_written_and_packed(tmp_path, steps):
    """Of some groups only; files of both kinds keep dtypes and shapes."""
    step, groups = steps[0]
    given = [with_routing(groups[0], 6, np.uint8), groups[1], with_routing(groups[2], 16, np.uint16)]
    write(tmp_path / "rollouts.mindrecord", [(step, given)])
    for back in (
        read_record(tmp_path / "rollouts.mindrecord"),
        experiences_of(unpack(pack(list(rows_of(step, given))))),
    ):
        ((_, found),) = back
        for mine, its in zip(found, given, strict=True):
            assert_same(mine, its)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda routing: routing[1:], r"routing is uint8\[3, 6\], and has 4 rows"),
        (lambda routing: routing.astype(np.int64), r"routing is int64\[4, 6\]"),
        (lambda routing: routing[:, 0], r"routing is uint8\[4\]"),
    ],
)
def test_routing_of_another_shape_is_refused(steps, change, problem):
    one = with_routing(steps[0][1][0], 6, np.uint8)
    first, *others = one.group.rollouts
    first = replace(first, tokens={**first.tokens, "routing": change(first.tokens["routing"])})
    changed = replace(one, group=replace(one.group, rollouts=(first, *others)))
    with pytest.raises(ValueError, match=problem):
        experiences_of(rows_of(1, [changed]))


@pytest.mark.parametrize("content", [b"", b"\x00\x00", b"\x93NUMPY\x01\x00v\x00{", b"PK\x03\x04"])
def test_damaged_routing_is_refused(steps, content):
    (row, *_) = rows_of(*steps[0])
    row["routing"] = np.frombuffer(content, np.uint8)
    with pytest.raises(ValueError, match="step 1, prompt 7"):
        experiences_of([row])


def test_groups_of_one_of_the_same_prompt_stay_apart(tmp_path, steps):
    prompt = steps[0][1][0].group.prompt
    groups = [experience(prompt, (n,), [float(n)], {"f": [float(n)]}, seed=n, policy_step=0) for n in (1, 2, 3)]
    write(tmp_path / "one.mindrecord", [(0, groups)])
    [(step, back)] = read_record(tmp_path / "one.mindrecord")
    assert step == 0
    assert [len(e.group.rollouts) for e in back] == [1, 1, 1]
    for mine, its in zip(back, groups, strict=True):
        assert_same(mine, its)


def test_a_group_whose_first_samples_are_missing_is_not_joined_to_its_neighbour(tmp_path, steps):
    """Rows may have been filtered: another prompt begins another group, whatever its first sample index."""
    rows = list(rows_of(*steps[0]))
    kept = [rows[6], rows[7], *rows[5:6], rows[0]]  # prompt 2**40: 0 and 1; prompt 7: 2, then 0
    write_record(tmp_path / "some.mindrecord", kept)
    [(_, back)] = read_record(tmp_path / "some.mindrecord")
    seen = [(e.group.prompt.id, [r.sample_index for r in e.group.rollouts]) for e in back]
    assert seen == [(2**40, [0, 1]), (7, [2]), (7, [0])]


def test_the_same_prompt_twice_is_two_groups_whatever_samples_are_left(tmp_path, steps):
    rows = list(rows_of(*steps[0]))
    write_record(tmp_path / "some.mindrecord", [rows[0], *rows[4:6]])  # sample 0 of the first, 1 and 2 of the second
    [(_, back)] = read_record(tmp_path / "some.mindrecord")
    seen = [(e.group.prompt.occurrence, [r.sample_index for r in e.group.rollouts]) for e in back]
    assert seen == [(0, [0]), (1, [1, 2])]


def test_rows_are_what_the_schema_says(steps):
    rows = list(rows_of(*steps[0]))
    assert len(rows) == 9
    for row in rows:
        assert set(SCHEMA) <= set(row)
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * 3
    assert {row["step"] for row in rows} == {1}


def test_one_row_has_both_forms(steps):
    for row, bare in zip(
        rows_of(*steps[0], decode=lambda ids: "+".join(map(str, ids))), rows_of(*steps[0]), strict=True
    ):
        text = text_row(row)
        mixed = not bare["sampled"].all()
        assert tuple(text) == ((*TEXT_KEYS, "turns") if mixed else TEXT_KEYS)
        if mixed:
            parts = [[drawn] * len(part.split("+")) for drawn, part in text["turns"]]
            assert list(chain.from_iterable(parts)) == bare["sampled"].tolist()
            assert "+".join(part for _, part in text["turns"]) == text["completion"]
            assert all(one != other for (one, _), (other, _) in pairwise(text["turns"]))
        for name in TEXT_KEYS[:3]:
            assert text[name] == bare[name]
        assert text["completion"] == "+".join(map(str, bare["response_ids"]))
        assert text["response_length"] == bare["sampled"].sum() <= len(bare["response_ids"])


def test_another_mindrecord_is_refused(tmp_path, steps):
    from mindrlhf.data.mindrecord import write_columns

    write_columns(tmp_path / "x.mindrecord", {"step": {"type": "int64"}}, [{"step": 1}])
    with pytest.raises(UserError, match="has no column prompt_id"):
        read_record(tmp_path / "x.mindrecord")
    with pytest.raises(UserError, match="no such MindRecord"):
        read_record(tmp_path / "absent.mindrecord")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("sampled", np.ones(3, bool), "sampled has 3 values for 2 tokens"),
        ("occurrence", -1, "occurrence is -1, and counts from 0"),
        ("policy_step", 4, "policy_step is 4, which comes after the step"),
        ("fields", "[" * 300 + "]" * 300, "more than 200 levels"),
        ("fields", "[1]", "has no attribute 'values'"),
        ("fields", '{"task": 1}', "a task field is not text"),
        ("rewards_by_function", '{"f": "1"}', "a function's reward is not a number"),
        ("rewards_by_function", "{", "Expecting"),
        ("turn_rewards", "[[2, 0.5]]", "turn_rewards is 0.5 at 2"),
        ("turn_rewards", "[[-1, 0.5]]", "turn_rewards is 0.5 at -1"),
        ("turn_rewards", "[[0, NaN]]", "turn_rewards is nan at 0"),
        ("turn_rewards", '[["0", 1]]', "turn_rewards is 1 at '0'"),
        ("turn_rewards", "[1]", "cannot unpack"),
        ("rewards_by_function", '{"other": 1}', "'f'"),
        ("finish_reason", "never", "finish_reason is 'never'"),
        ("response_ids", np.array([3, -1], np.int32), "a token id is not between"),
        ("response_ids", np.array([3, 4, 5], np.int32), "sampled has 2 values for 3 tokens"),
        ("prompt_ids", np.array([], np.int32), "a prompt or response is empty"),
        ("policy_log_probs", np.array([0, np.nan], np.float32), "policy_log_probs are not 2 finite numbers"),
    ],
)
def test_rows_that_no_run_wrote_are_refused(tmp_path, column, value, message):
    prompt = Prompt(7, np.array([1, 2], np.int32), {"task": "t"})
    rows = list(rows_of(3, [experience(prompt, (2, 2), [0.0, 1.0], {"f": [0.0, 1.0]})]))
    write_record(tmp_path / "x.mindrecord", [rows[0], rows[1] | {column: value}])
    with pytest.raises(UserError, match=r"holds no rollouts that a run wrote \(step 3, prompt 7: ") as caught:
        read_record(tmp_path / "x.mindrecord")
    assert message in str(caught.value)


def test_steps_out_of_order_are_refused(tmp_path, steps):
    write(tmp_path / "x.mindrecord", steps[::-1])
    with pytest.raises(UserError, match=r"x\.mindrecord: holds no rollouts that a run wrote \(step 1 after step 4\)"):
        read_record(tmp_path / "x.mindrecord")
