"""Dynamic sampling: which groups a step takes, what is kept for the next, and what happens when none come."""

import logging
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_parts import experience

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.run.run import Run
from mindrlhf.run.step_report import StepReport
from mindrlhf.trainer.dynamic_sampling import StepSampling, has_spread, mark_trained, with_drawing_policy
from mindrlhf.trainer.sources import FreshRollouts

NAN = float("nan")


def config(*overrides: str, size: int = 4, enabled: bool = True):
    return load_grpo_config(None, [f"data.prompts_per_step={size}", f"dynamic_sampling.enabled={enabled}", *overrides])


def ids(experiences) -> list[int]:
    return [one.group.prompt.id for one in experiences]


def one_step(sampling: StepSampling, draw) -> tuple[list, dict]:
    """A step whose rounds take what `draw(count)` gives."""
    sampling.begin()
    while count := sampling.wanted():
        sampling.add(draw(count))
    return sampling.take()


class Source:
    """Groups with spread or without, by a list of booleans, with ids in order."""

    def __init__(self, spread):
        self.spread, self.drawn = list(spread), 0

    def __call__(self, count):
        start, self.drawn = self.drawn, self.drawn + count
        return [
            experience(i, [0, 1] if self.spread[i % len(self.spread)] else [1, 1]) for i in range(start, self.drawn)
        ]


@pytest.mark.parametrize(
    ("rewards", "functions", "overrides"),
    [
        ([0.1 + 0.2, 0.3], {}, []),
        ([NAN, NAN], {"f": [1.0, 0.0]}, ["dynamic_sampling.metric=f"]),  # all lost by another function
        ([1.0, NAN], {"f": [1.0, 0.0]}, ["dynamic_sampling.metric=f"]),
        ([-0.0777, 0.0], {"f": [0.0, 0.0], "soft": [-0.777, 0.0]}, ["reward.overlong_factor=0.1"]),
        (
            [0.7, 0.3 - 0.1],
            {"f": [0.7, 0.3], "soft": [0.0, NAN]},
            ["reward.overlong_factor=1", "reward.functions.0.weight=0"],
        ),
    ],
)
def test_no_spread_by_rounding_or_by_what_is_unscored(rewards, functions, overrides):
    assert not has_spread(experience(1, rewards, functions=functions), config(*overrides))


def test_without_it_a_step_is_what_was_drawn():
    source = Source([False])
    step, figures = one_step(StepSampling(config(enabled=False)), source)
    assert ids(step) == [0, 1, 2, 3]
    assert source.drawn == 4
    assert figures == {}


def test_groups_without_spread_are_replaced_and_the_surplus_begins_the_next_step():
    sampling, source = StepSampling(config()), Source([True, False, True, True, False, True, True, True])
    step, figures = one_step(sampling, source)
    assert ids(step) == [0, 2, 3, 5]
    assert ids(sampling.surplus) == [6, 7]
    assert figures == {
        "sampling/rounds": 2,
        "sampling/dropped_groups": 2,
        "sampling/surplus_groups": 2,
        "sampling/missing": 0,
    }
    step, figures = one_step(sampling, source)
    assert ids(step) == [6, 7, 8, 10]
    assert figures["sampling/rounds"] == 1
    assert ids(sampling.surplus) == [11]


def part_of(rank: int, ranks: int, experiences: list) -> list:
    return experiences[rank::ranks]


class Drawing(Source):
    """Its groups as rows of a dataset, and as what is drawn to these."""

    def next(self, count):
        self.made = self(count)
        return [one.group.prompt for one in self.made]

    def draw(self, prompts, step):
        return self.made


@pytest.mark.parametrize("ranks", [1, 2])
def test_generation_counts_groups_that_the_step_does_not_train_on(ranks):
    """For `perf/mfu/rollout`: those without spread, and the surplus, once over all ranks."""
    counts = []
    for rank in range(ranks):
        run = Run.__new__(Run)
        run.report = StepReport.__new__(StepReport)
        run.report._drawn = []
        drawing = Drawing([True, False, True, True, False, True, True, True])
        source = FreshRollouts(run, drawing, drawing.draw, StepSampling(config()), partial(part_of, rank, ranks))
        step, figures = source.collect(1)
        counts.append(len(run.report._drawn))
        assert (ids(step), figures["sampling/dropped_groups"], figures["sampling/surplus_groups"]) == (
            [0, 2, 3, 5],
            2,
            2,
        )
        assert ids(source.collect(2)[0]) == [6, 7, 8, 10]
    assert sum(counts) == 2 + 2


def test_the_old_policy_is_the_one_that_drew_a_group():
    given = [experience(0, [0, 1], policy_step=2), experience(1, [0, 1], policy_step=3)]
    carried, fresh = with_drawing_policy(given, 3)
    for rollout, old in zip(carried.group.rollouts, carried.rows("old_log_probs"), strict=True):
        assert old is rollout.row("policy_log_probs")
    assert fresh is given[1]
    assert "old_log_probs" not in fresh.tokens


def test_a_surplus_is_the_same_after_a_checkpoint():
    sampling, resumed = StepSampling(config()), StepSampling(config())
    sampling.surplus = [experience(7, [0, 1], policy_step=2), experience(7, [1, 0], policy_step=3)]
    resumed.decode(sampling.encode(sampling.snapshot()))
    assert [(one.policy_step, one.rewards.tolist()) for one in resumed.surplus] == [(2, [0, 1]), (3, [1, 0])]
    empty = StepSampling(config())
    empty.decode(empty.encode(empty.snapshot()))
    assert empty.surplus == []


def test_a_surplus_of_a_whole_step_draws_nothing():
    sampling, source = StepSampling(config("dynamic_sampling.prompts_per_round=8")), Source([True])
    one_step(sampling, source)
    step, figures = one_step(sampling, source)
    assert ids(step) == [4, 5, 6, 7]
    assert (source.drawn, figures["sampling/rounds"]) == (8, 0)


def test_a_prompt_that_comes_again_in_a_step_is_numbered():
    prompts = [experience(i, [0]).group.prompt for i in range(3)]
    sampling = StepSampling(config())
    for _ in range(2):  # a new step counts anew
        sampling.begin()
        assert [one.occurrence for one in sampling.numbered([*prompts, prompts[1]])] == [0, 0, 0, 1]
        later = sampling.numbered(prompts[1:])
        assert [(one.id, one.occurrence) for one in later] == [(1, 2), (2, 1)]
        assert later[0].token_ids is prompts[1].token_ids


def test_running_out_trains_on_what_there_is_and_says_so(caplog):
    settings = config("dynamic_sampling.max_rounds=3")
    with caplog.at_level(logging.WARNING):
        step, figures = one_step(StepSampling(settings), Source([False, False, False, True, False, False]))
    assert ids(step) == [3, 9, 0, 1], "groups without spread fill the step"
    assert figures["sampling/missing"] == 2
    assert "after 3 rounds of generation 2 of 4 groups have no spread: the step trains on the other 2" in caplog.text
    assert [one.trained.tolist() for one in mark_trained(step, settings)] == [[True] * 2] * 2 + [[False] * 2] * 2


def test_nothing_but_groups_without_spread(caplog):
    settings = config("dynamic_sampling.max_rounds=2")
    step, figures = one_step(StepSampling(settings), Source([False]))
    assert "4 of 4 groups have no spread: the step has nothing to train on" in caplog.text
    assert len(step) == figures["sampling/missing"] == 4
    assert not any(one.trained.any() for one in mark_trained(step, settings))


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4))
def test_every_step_is_full_and_no_group_is_lost_or_comes_twice(spread, size, per_round, rounds):
    rounds = max(rounds, -(-size // per_round))
    overrides = (f"dynamic_sampling.prompts_per_round={per_round}", f"dynamic_sampling.max_rounds={rounds}")
    settings = config(*overrides, size=size)
    sampling, source, taught = StepSampling(settings), Source(spread), []
    for _ in range(4):
        step, figures = one_step(sampling, source)
        assert len(step) == size
        assert figures["sampling/rounds"] <= rounds
        taught += [one.group.prompt.id for one in mark_trained(step, settings) if one.trained.any()]
    expected = [i for i in range(source.drawn) if spread[i % len(spread)]]
    assert taught + ids(sampling.surplus) == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0, 1], True), ([1, 1], False), ([NAN, 1], False), ([NAN, 0, 1], True), ([0.1, 0.1 + 1e-9], True), ([1], False)],
)
def test_spread_is_of_rewards_that_were_given(rewards, expected):
    assert has_spread(experience(0, rewards), config()) == expected


def test_spread_is_not_that_of_the_overlong_punishment():
    lengths_differ = experience(0, [1.0, 0.5], functions={"gsm8k": [1, 1], "soft_overlong": [0, -1]})
    answers_differ = experience(0, [1.0, 0.5], functions={"gsm8k": [1, 0.5], "soft_overlong": [0, NAN]})
    punishing = config("reward.overlong_factor=0.5")
    assert not has_spread(lengths_differ, punishing)
    assert has_spread(answers_differ, punishing)
    assert has_spread(lengths_differ, config())


def test_spread_of_one_function_by_name():
    settings = config("reward.functions=[{name: gsm8k}, {name: 'x.py:tidy'}]", "dynamic_sampling.metric=tidy")
    assert has_spread(experience(0, [1, 1], functions={"gsm8k": [1, 0], "tidy": [0, 1]}), settings)
    assert not has_spread(experience(0, [1, 0], functions={"gsm8k": [1, 0], "tidy": [1, 1]}), settings)


def test_what_is_mark_trained():
    one = experience(0, [1, 0, NAN], lengths=[2, 5, 3], finishes=["eos", "length", "stop"])
    assert mark_trained([one], config(enabled=False))[0].trained.tolist() == [True, True, False]
    masked = mark_trained([one], config("algorithm.mask_truncated=True", enabled=False))[0]
    assert masked.trained.tolist() == [True, False, False]
    assert [row.sum() for row in masked.trained_tokens] == [2, 0, 0]
