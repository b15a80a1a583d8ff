"""Answers drawn in parts, by a generator whose tokens are a script: what is drawn when, and whether all is trained."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mindrlhf.configs.grpo import RolloutSettings
from mindrlhf.records.batches_ahead import BatchesAhead, in_parts
from mindrlhf.rollout.unfinished import InParts, continued, not_begun, request_of, unfinished
from mindrlhf.types import Prompt, Rollout, RolloutGroup

LIMIT, SEED = 40, 7
PROMPTS, SAMPLES, STALENESS = 3, 4, 2


def settings(tokens: int | None) -> RolloutSettings:
    return RolloutSettings(max_new_tokens=LIMIT, num_generations=SAMPLES, tokens_per_step=tokens)


def length_of(step: int, prompt: int, key: int) -> int:
    """A long tail: most answers end early, some at the limit."""
    drawn = np.random.default_rng([SEED, step, prompt, key]).pareto(1.2)
    return min(LIMIT, 1 + int(4 * drawn))


def scripted(request, weights: int) -> RolloutGroup:
    """The answer to a request: each token says its step, prompt, sample and place; its log-prob, the weights."""
    rollouts = []
    for sample in range(request.samples):
        key = request.key(sample)
        known = request.known(sample)
        whole = length_of(request.step, request.prompt.id, key)
        length = min(whole, request.limit(sample))
        ids = np.array([token_of(request.step, request.prompt.id, key, place) for place in range(length)], np.int32)
        if request.begun:
            np.testing.assert_array_equal(ids[:known], request.begun[sample])
        log_probs = np.full(length, -weights, np.float32)
        log_probs[:known] = 0.0  # as the engine has them: these tokens are context
        tokens = {
            "sampled": np.arange(length) >= known,
            "behaviour_log_probs": log_probs,
            "policy_log_probs": log_probs / 2,
        }
        finish = "eos" if length == whole < LIMIT else "length"
        rollouts.append(Rollout(request.prompt.id, sample, ids, finish, request.seed, tokens))
    return RolloutGroup(request.prompt, tuple(rollouts))


def token_of(step: int, prompt: int, key: int, place: int) -> int:
    return ((step * 100 + prompt) * 20 + key) * 100 + place


class Steps:
    """Steps over batches of prompts 0, 1, ...; the last of a batch's prompts is its first one again."""

    def __init__(self, tokens: int | None, total: int, at_once: int = 1000, apart: bool = False):
        self.settings = settings(tokens)
        self.ahead = BatchesAhead()
        self.given: list[tuple[int, int, int, int]] = []  # step, step that trains, most tokens of an answer, answers
        self.parts = InParts(self.ahead, self.further, self.settings, SEED)
        self.total, self.at_once, self.apart = total, at_once, apart

    def further(self, groups, step: int) -> list[RolloutGroup]:
        self.given += [(step, number, more, len(unfinished(group, LIMIT))) for number, group, more in groups]
        found = {}
        for first in range(0, len(groups), self.at_once):  # as an engine of few slots does
            for place in reversed(range(first, min(first + self.at_once, len(groups)))):
                number, group, more = groups[place]
                request = request_of(group, self.settings, SEED, number, more)
                found[place] = continued(group, scripted(request, step), LIMIT, step)
        return [found[place] for place in range(len(groups))]

    def begin(self, numbers, step: int) -> None:
        for number in numbers:
            ids = [*range(PROMPTS - 1), 0]
            prompts = [
                Prompt(one, np.arange(3, dtype=np.int32), {}, int(i == len(ids) - 1)) for i, one in enumerate(ids)
            ]
            self.parts.begin(number, prompts, step, PROMPTS * number)

    def step(self, step: int) -> tuple[list[RolloutGroup], int]:
        """A step's whole groups, and the number of tokens drawn in it."""
        first = max(self.ahead.steps, default=step - 1) + 1
        due = range(first, min(step + STALENESS, self.total) + 1)
        self.begin([number for number in due if number == step], step)
        later = [number for number in due if number > step]
        share = self.parts.share(len(later) * PROMPTS * SAMPLES)
        if share:
            self.begin(later, step)
        tokens = self.draw({**dict.fromkeys(self.ahead.steps if share else [], share), step: LIMIT}, step)
        groups = [one.group for one in self.ahead.take(step).experiences]
        assert not any(unfinished(group, LIMIT) for group in groups)
        return groups, tokens

    def draw(self, limits: dict[int, int], step: int) -> int:
        """As one call, or the step's own batch first, as ranks that generate apart do."""
        if not self.apart:
            return self.parts.draw(limits, step)
        own = self.parts.draw({step: limits.pop(step)}, step)
        return own + self.parts.draw(limits, step)

    def resumed(self) -> "Steps":
        """The same, from what a checkpoint holds."""
        state, content = self.ahead.state_dict(), self.ahead.encode(self.ahead.snapshot())
        again = Steps(self.settings.tokens_per_step, self.total, self.at_once, self.apart)
        again.ahead.load_state_dict(state)
        again.ahead.decode(content)
        assert in_parts(state) == bool(self.ahead.steps)
        return again


def rows(groups: list[RolloutGroup]) -> list[tuple]:
    """All that an answer is, per answer."""
    found = []
    for group in groups:
        for one in group.rollouts:
            arrays = [one.row(name).tolist() for name in ("sampled", "behaviour_log_probs", "policy_steps")]
            found.append((group.prompt.id, one.sample_index, one.finish_reason, one.response_ids.tolist(), *arrays))
    return found


def run(tokens: int | None, total: int = 12, at_once: int = 1000, kill: bool = False, apart: bool = False):
    """Every step's answers, and the drawn tokens of each step."""
    steps, answers, drawn = Steps(tokens, total, at_once, apart), [], []
    for step in range(1, total + 1):
        groups, count = steps.step(step)
        answers.append(rows(groups))
        drawn.append(count)
        if kill:
            steps = steps.resumed()
    assert not steps.ahead.steps
    return answers, drawn, steps


@pytest.mark.parametrize("tokens", [1, 40, 60, 90, 150, 400, None])
def test_every_prompt_is_trained_once_and_lengths_are_those_that_were_drawn(tokens):
    """In the step of its rows: a short answer is not trained before a long one of an earlier step."""
    answers, drawn, _ = run(tokens)
    for step, batch in enumerate(answers, 1):
        keys = [(prompt, place) for prompt in (0, 1) for place in range(SAMPLES)]
        assert [row[:2] for row in batch] == [*keys, *keys[:SAMPLES]]
        again = [*range(SAMPLES)] * 2 + [
            *range(SAMPLES, 2 * SAMPLES)
        ]  # a prompt that a step draws again has new samples
        lengths = [length_of(step, row[0], key) for row, key in zip(batch, again, strict=True)]
        assert [len(row[3]) for row in batch] == lengths
        for row, key in zip(batch, again, strict=True):
            assert row[3] == [token_of(step, row[0], key, place) for place in range(len(row[3]))]
            assert all(row[4])
    assert sum(drawn) == sum(len(row[3]) for batch in answers for row in batch)


@pytest.mark.parametrize("tokens", [60, 90, 150])
def test_each_token_has_the_version_and_the_log_prob_of_its_weights(tokens):
    answers, _, _ = run(tokens)
    spans = Counter()
    for step, batch in enumerate(answers, 1):
        for *_, log_probs, versions in batch:
            assert [-version for version in versions] == log_probs
            assert versions == sorted(versions)
            assert step - STALENESS <= versions[0] <= versions[-1] <= step
            spans[versions[-1] - versions[0] + 1] += 1
    assert min(spans[1], spans[2]) > 0


@pytest.mark.parametrize("tokens", [40, 90, 150])
def test_a_quota_is_shared_equally_and_a_steps_own_answers_go_on_to_their_ends(tokens):
    _, drawn, steps = run(tokens)
    for step, count in enumerate(drawn, 1):
        given = [rest for number, *rest in steps.given if number == step]
        own = sum(answers for number, _, answers in given if number == step)
        answers = sum(answers for _, _, answers in given)
        shares = {more for number, more, _ in given if number > step}
        assert {more for number, more, _ in given if number == step} <= {LIMIT}
        assert shares <= {tokens // max(answers, 1)}
        assert count <= tokens + own * LIMIT
    assert any(number > step for step, number, *_ in steps.given)


def test_no_quota_draws_all_ahead_and_a_small_one_nothing():
    for tokens, lag in ((None, STALENESS), (1, 0)):
        answers, _, _ = run(tokens)
        for step, batch in enumerate(answers, 1):
            assert {version for row in batch for version in row[-1]} == {max(1, step - lag)}


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_slots_do_not_matter(at_once):
    assert run(90, at_once=at_once)[:2] == run(90)[:2]


@pytest.mark.parametrize("tokens", [1, 60, 90, 400, None])
def test_a_steps_own_answers_may_be_drawn_first(tokens):
    """As by ranks that generate while others train: shares are of what was unfinished before."""
    assert run(tokens, apart=True)[:2] == run(tokens)[:2]


@pytest.mark.parametrize("tokens", [60, 90, None])
def test_killed_after_any_step(tokens):
    assert run(tokens, kill=True)[:2] == run(tokens)[:2]


def test_a_run_without_a_quota_draws_what_is_unfinished():
    """As one that goes on with another staleness and no `rollout.tokens_per_step`."""
    steps = Steps(90, 12)
    for step in (1, 2):
        steps.step(step)
    waiting = steps.ahead.steps
    steps = steps.resumed()
    steps.settings = settings(None)
    steps.parts = InParts(steps.ahead, steps.further, steps.settings, SEED)
    for number in waiting:
        groups, _ = steps.step(number)
        assert [len(row[3]) for row in rows(groups)[:4]] == [length_of(number, 0, key) for key in range(SAMPLES)]


def test_an_answer_that_hit_the_limit_is_whole():
    group = not_begun(Prompt(3, np.arange(2, dtype=np.int32)), settings(5), SEED)
    assert unfinished(group, LIMIT) == [0, 1, 2, 3]
    ended = replace(group.rollouts[1], response_ids=np.zeros(LIMIT, np.int32))
    stopped = replace(group.rollouts[2], response_ids=np.zeros(2, np.int32), finish_reason="stop")
    assert unfinished(replace(group, rollouts=(group.rollouts[0], ended, stopped)), LIMIT) == [0]
