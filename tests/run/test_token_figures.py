"""Figures of single tokens: whose they are, after several updates, on several ranks."""

import numpy as np
from step_parts import an_update, experience, with_context

from mindrlhf.run.token_figures import of_widest, widest, with_token_figures

NAN = float("nan")


def update(groups, shift: float, dual: bool = False):
    """An update whose figures are told apart: `shift` plus the place of the token in its response."""

    def rows(factor):
        return [
            tuple((shift + factor * np.flatnonzero(r.sampled)).astype(np.float32) for r in e.group.rollouts)
            for e in groups
        ]

    metrics = {"policy_kl": rows(0.01), "entropy": rows(0.1), "clip_fraction": rows(0.0)}
    if dual:
        metrics["dual_clip_fraction"] = [tuple(np.ones_like(row) for row in group) for group in rows(0.0)]
    return an_update(metrics=metrics)


def test_the_widest_spread_comes_first():
    groups = [
        experience(1, [0, 0, 0]),
        experience(2, [0, NAN, 1]),
        experience(3, [NAN] * 3),
        experience(4, [0.2, 0.9, 0]),
    ]
    assert widest(groups, 2) == {1, 3}
    assert widest(groups, 0) == set()
    assert widest(groups[:1], 5) == {0}


def test_figures_are_those_of_a_group_in_its_last_update():
    """Two passes of two mini-batches: groups 0 and 2 are in updates 0 and 2, groups 1 and 3 in updates 1 and 3."""
    groups = [with_context(experience(one, [0.0, one], lengths=[3, 2])) for one in range(1, 5)]
    halves = [groups[0::2], groups[1::2]]
    updates = [update(halves[index % 2], shift=float(index), dual=index == 3) for index in range(4)]
    got = with_token_figures(groups, updates, parts=2, most=3)
    assert [e.token_figures is not None for e in got] == [False, True, True, True]
    for e, last in ((got[2], 2.0), (got[3], 3.0)):
        for rollout, figures in zip(e.group.rollouts, e.token_figures, strict=True):
            places = np.flatnonzero(rollout.sampled)
            np.testing.assert_allclose(figures["ratio"][rollout.sampled], np.exp(-last - 0.01 * places), rtol=1e-5)
            np.testing.assert_allclose(figures["entropy"][rollout.sampled], last + 0.1 * places, rtol=1e-6)
            np.testing.assert_array_equal(figures["clipped"][rollout.sampled], last)
            assert all(row.shape == rollout.sampled.shape for row in figures.values())
            assert all(row.dtype == np.float32 for row in figures.values())


def test_a_step_without_updates_has_the_advantage_alone():
    one = experience(1, [0.0, 1.0])
    [got] = with_token_figures([one], [], parts=2, most=1)
    assert [list(figures) for figures in got.token_figures] == [["advantage"], ["advantage"]]


def test_a_loss_without_these_metrics_has_fewer_figures():
    one = experience(1, [0.0, 1.0])
    entropy = {"entropy": [tuple(np.ones(3, np.float32) for _ in range(2))]}
    [got] = with_token_figures([one], [an_update(metrics=entropy)], parts=1, most=1)
    assert list(got.token_figures[0]) == ["advantage", "entropy"]


def test_the_widest_of_all_ranks_are_kept():
    groups = [experience(one, [0.0, one]) for one in (1, 4, 2, 3)]
    ranks = [groups[:2], groups[2:]]
    marked = [with_token_figures(own, [update(own, 0.0)], parts=1, most=1) for own in ranks]
    kept = of_widest([e for own in marked for e in own], most=1)
    assert [e.token_figures is not None for e in kept] == [False, True, False, False]
