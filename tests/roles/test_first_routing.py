"""Routing of a step's first pass: who gives it, and who replays it."""

from dataclasses import replace

import numpy as np
import pytest
from step_parts import an_update, experience, on_ranks, without

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.models.routing import Routing
from mindrlhf.roles.policy_updates import PolicyUpdates, sequences
from mindrlhf.training.first_routing import FirstRouting
from mindrlhf.training.objective import Objective
from mindrlhf.types import Experience


class Recorded:
    """Stands for an updater: keeps the routing that it was given, and gives others."""

    objective = Objective(("advantages",), losses=None)

    def __init__(self):
        self.given: list[list[Routing | None]] = []
        self.made: list[list[Routing]] = []

    def __call__(self, groups, rate, **fields):
        self.given.append([group.routing for group in groups])
        self.made.append([Routing(np.zeros((3, 2)), ()) for _ in groups])
        return an_update(routing=self.made[-1])


@pytest.fixture
def fresh() -> list[Experience]:
    """Groups of a step before anything has scored them."""
    return [without(experience(number, [0.0, 1.0]), "old_log_probs") for number in range(4)]


def with_old(step: list[Experience]) -> list[Experience]:
    return [e.with_tokens(old_log_probs=tuple(np.zeros(n, np.float32) for n in e.lengths)) for e in step]


def updates(updater: Recorded, first: FirstRouting, *parts: list[Experience]) -> None:
    config = load_grpo_config(None, [])

    def work(rank):
        update = PolicyUpdates(config, updater, config.algorithm.loss(), rank, first)
        for part in parts:
            update(part, 0.1, lambda share: None)

    on_ranks(1, work)


def test_the_first_update_of_each_step_gives_it_where_nothing_scores(fresh):
    updater = Recorded()
    updates(updater, FirstRouting(), fresh, with_old(fresh), with_old(fresh), fresh[:2], with_old(fresh[:2]))
    first, second = updater.made[0], updater.made[3]
    assert updater.given == [[None] * 4, first, first, [None] * 2, second]


def test_mini_batches_replay_that_of_the_pass_that_scored(fresh):
    updater, first = Recorded(), FirstRouting()
    own = [Routing(np.full((3, 2), i), ()) for i in range(4)]
    groups = [sequences(e) for e in fresh]
    first.keep(first.begin(groups), own)
    scored = with_old(fresh)
    updates(updater, first, scored[::2], scored[1::2])
    assert updater.given == [own[::2], own[1::2]]


def test_that_of_generation_is_not_taken_for_it(fresh):
    """A record has it, and the first pass chooses anew."""
    recorded = []
    for e in fresh:
        arrays = {"routing": np.zeros((3, 2), np.uint8), "prompt_routing": np.zeros((3, 2), np.uint8)}
        rollouts = tuple(replace(one, tokens={**one.tokens, **arrays}) for one in e.group.rollouts)
        recorded.append(replace(e, group=replace(e.group, rollouts=rollouts)))
    assert all(sequences(e).routing for e in recorded)
    updater = Recorded()
    updates(updater, FirstRouting(), recorded)
    assert updater.given == [[None] * 4]
