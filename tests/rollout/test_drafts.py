"""Texts for drafts, and an engine that uses them: the same rollouts in fewer steps."""

import numpy as np
import pytest
from responses import made_rollout
from slow_cases import few_of
from small_model import SmallModel

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.rollout import drafts
from mindrlhf.rollout.drafts import Histories
from mindrlhf.rollout.engine import Engine
from mindrlhf.types import Prompt, RolloutGroup


def group_of(prompt_id: int, *answers) -> RolloutGroup:
    rollouts = tuple(made_rollout(prompt_id, index, ids) for index, ids in enumerate(answers))
    return RolloutGroup(Prompt(prompt_id, np.array([1, 2], np.int32)), rollouts)


def text(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_texts_stand_apart_and_the_own_one_is_last(monkeypatch):
    monkeypatch.setattr(drafts, "SIZE", 10)
    histories = Histories(3, True)
    histories.remember([group_of(7, [3, 4], [5])])
    array = histories.arrays([(1, 7, [text(6), text(), text(1, 2, 8)]), (2, 8, [text(*range(20))])])
    assert array[0].tolist() == [-1] * 10
    assert array[1].tolist() == [3, 4, -1, 5, -1, 6, -1, 1, 2, 8]
    assert array[2].tolist() == list(range(10, 20))


def test_the_oldest_answers_are_forgotten(monkeypatch):
    monkeypatch.setattr(drafts, "KEPT_TOKENS", 5)
    histories = Histories(1, True)

    def known(prompt_id: int) -> list[int]:
        return [int(id) for id in histories.arrays([(0, prompt_id, [text(9)])])[0] if id >= 0][:-1]

    histories.remember([group_of(1, [3, 4]), group_of(2, [5]), group_of(1, [6])])
    assert (known(1), known(2)) == ([6], [5])
    histories.remember([group_of(3, [1, 2, 3, 4])])
    assert (known(1), known(2), known(3)) == ([6], [], [1, 2, 3, 4])


def test_nothing_is_kept_when_it_is_off():
    histories = Histories(2, False)
    histories.remember([group_of(1, [3, 4])])
    assert not histories.wanted(1)
    assert histories.arrays().tolist() == [[-1], [-1]]


@pytest.fixture(scope="module")
def rollouts_of(request):
    """Two calls of an engine, the second over the same prompts: each answer, and the statistics of both calls."""
    model = SmallModel.random(num_layers=1)
    decoder, _ = model.build(96)
    rng = np.random.default_rng(4)
    prompts = [Prompt(i, rng.integers(1, 64, length).astype(np.int32)) for i, length in enumerate((9, 4, 17, 6, 12))]

    def rollouts(speculation: bool, slots: int, temperature: float = 0.3, **changes):
        settings = SamplingSettings(
            max_new_tokens=48, temperature=temperature, speculation=speculation, stop_strings=(), **changes
        )
        engine = Engine(model.config, decoder, settings, slots, 20, (5,), seed=3)
        statistics, answers = [], []
        for step in (0, 0):
            for group in engine.generate(prompts, 4, step):
                answers += [
                    (rollout.response_ids.tolist(), rollout.row("behaviour_log_probs").tobytes(), rollout.finish_reason)
                    for rollout in group.rollouts
                ]
            statistics.append(engine.statistics)
        return answers, statistics

    return rollouts


@pytest.mark.parametrize(
    ("slots", "temperature"),
    few_of([(17, 0.3)], [(3, 0.0), (6, 1.0), (6, 0.0), (17, 0.0), (3, 0.3), (6, 0.3), (3, 1.0), (17, 1.0)]),
)
def test_rollouts_are_the_same(fused, rollouts_of, slots, temperature):
    plain, (before, again) = rollouts_of(False, 20, temperature)
    assert before.drafted == before.accepted == again.drafted == 0
    found, (first, second) = rollouts_of(True, slots, temperature)
    assert found == plain
    assert 0 < first.accepted <= first.drafted
    # The second time each answer is known: only what no key leads to is drawn one by one.
    assert second.accepted > first.accepted
    assert second.decode_steps < first.decode_steps


@pytest.mark.slow
def test_penalties_draw_one_token_at_a_time(fused, rollouts_of):
    found, statistics = rollouts_of(True, 8, repetition_penalty=1.2)
    assert found == rollouts_of(False, 8, repetition_penalty=1.2)[0]
    assert [one.drafted for one in statistics] == [0, 0]
