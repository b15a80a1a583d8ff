"""Advantages, KL term, loss weights and token choice of a step: by definition, and the same on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
from responses import with_advantages
from step_parts import (
    Rank,
    advantages,
    an_update,
    assert_same_rows,
    experience,
    on_ranks,
    rows_of,
    with_context,
    without,
)

from mindrlhf.algorithms.advantages import RewardBatch, compute_advantages, gae_with_returns
from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.algorithms.covariance import select_kl_cov
from mindrlhf.algorithms.losses import policy_loss
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.metrics.progress import Progress
from mindrlhf.metrics.timer import Timers
from mindrlhf.roles.parts import Parts
from mindrlhf.roles.policy import Policy
from mindrlhf.roles.policy_updates import PolicyUpdates, loss_weights
from mindrlhf.roles.reference import Following
from mindrlhf.run.run import Run
from mindrlhf.run.step_report import StepReport
from mindrlhf.trainer.credit import Credit, KLTerm
from mindrlhf.trainer.dynamic_sampling import mark_trained
from mindrlhf.trainer.grpo import GRPOLoop
from mindrlhf.training.objective import Objective
from mindrlhf.types import put_back, taken


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo", ["algorithm.advantage_std=batch"]),
        ("remax", ["algorithm.kl_in_reward=True", "algorithm.beta=0.3"]),
        ("reinforce_plus_plus", ["algorithm.kl_in_reward=True", "algorithm.kl_estimator=k1", "algorithm.gamma=0.9"]),
        ("gae", ["algorithm.kl_in_reward=True", "algorithm.lam=0.8"]),
        ("opo", []),
    ],
)
def test_advantages_of_a_step(step, name, overrides, size):
    settings = load_grpo_config(None, [f"algorithm.advantage={name}", *overrides])
    algorithm = settings.algorithm
    token_rewards = None
    if algorithm.kl_in_reward:
        estimate = {"k1": lambda r: r, "k3": lambda r: np.exp(-r) - 1 + r}[algorithm.kl_estimator]
        token_rewards = [
            [
                -algorithm.beta * estimate(now.astype(np.float64) - reference)
                for now, reference in zip(one.rows("old_log_probs"), one.rows("reference_log_probs"), strict=True)
            ]
            for one in step
        ]
    batch = RewardBatch(
        rewards=[one.rewards for one in step],
        lengths=[one.lengths for one in step],
        token_rewards=token_rewards,
        values=[one.rows("values") for one in step],
        greedy_rewards=[one.greedy_reward for one in step],
    )
    got = advantages(step, settings, size)
    expected = compute_advantages(name, batch, **algorithm.options_of(algorithm.method))
    for one, given in zip(got, expected, strict=True):
        for mine, theirs, length in zip(one.rows("advantages"), given, one.lengths, strict=True):
            assert mine.shape == (length,)
            assert mine.dtype == np.float32
            np.testing.assert_allclose(mine, np.broadcast_to(theirs, length), rtol=1e-5, atol=1e-6)
    if name == "gae":
        returns = [row for rows in gae_with_returns(batch, **algorithm.options_of(algorithm.method))[1] for row in rows]
        assert_same_rows(rows_of(got, "returns"), returns, 1e-5)
    else:
        assert not any("returns" in one.tokens for one in got)


@pytest.mark.parametrize("name", ["grpo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
def test_tokens_that_were_not_sampled_change_no_advantage(step, name):
    by_token = ["algorithm.kl_in_reward=True"] if name in ("remax", "reinforce_plus_plus", "gae") else []
    settings = load_grpo_config(None, [f"algorithm.advantage={name}", *by_token])
    expected, got = (advantages(given, settings, 2) for given in (step, list(map(with_context, step))))
    for one, other in zip(got, expected, strict=True):
        assert_same_rows(taken(one.rows("advantages"), one.sampled), other.rows("advantages"))
        assert all(np.isfinite(row).all() for row in one.rows("advantages"))
        assert [len(row) for row in one.rows("advantages")] == one.lengths.tolist()
        if name == "gae":
            assert_same_rows(taken(one.rows("returns"), one.sampled), other.rows("returns"))


def test_the_advantage_of_a_response_is_the_mean_over_sampled_tokens(step):
    settings = load_grpo_config(None, ["algorithm.advantage=gae", "algorithm.lam=0.8"])
    for one in advantages(list(map(with_context, step)), settings, 2):
        means = [row.mean() for row in taken(one.rows("advantages"), one.sampled)]
        np.testing.assert_array_equal(one.advantages, np.float32(means))


def test_each_function_by_itself(step):
    functions = "reward.functions=[{name: gsm8k, weight: 2}, {name: format, weight: 0.5}]"
    settings = load_grpo_config(None, ["algorithm.normalize_functions=True", "algorithm.beta=0", functions])
    expected = compute_advantages(
        "grpo",
        RewardBatch(
            [one.rewards for one in step],
            rewards_by_function=[one.rewards_by_function for one in step],
            function_weights={"gsm8k": 2.0, "format": 0.5},
        ),
        normalize_functions=True,
    )
    assert_same_rows([one.advantages for one in advantages(step, settings, 2)], expected)


def test_groups_that_only_fill_a_step_move_no_statistic(step):
    settings = load_grpo_config(
        None, ["algorithm.advantage=reinforce_plus_plus", "algorithm.beta=0", "dynamic_sampling.enabled=True"]
    )
    flat = experience(9, [5, 5, 5], lengths=[4, 4, 4])
    alone = [one for one in step if np.ptp(one.rewards)]
    with_it = advantages([*alone, flat], settings, 1)
    assert_same_rows(rows_of(with_it[:-1], "advantages"), rows_of(advantages(alone, settings, 1), "advantages"))
    assert not any(row.any() for row in with_it[-1].rows("advantages"))


def test_the_coefficient_is_steered_by_all_ranks_tokens(step):
    settings = load_grpo_config(None, ["algorithm.kl_target=0.1", "algorithm.kl_horizon=100"]).algorithm
    rows = [
        np.exp(reference - now) - 1 - (reference - now)
        for one in step
        for now, reference in zip(one.rows("old_log_probs"), one.rows("reference_log_probs"), strict=True)
    ]
    kl = np.concatenate(rows).astype(np.float64).mean()

    def work(rank: Rank):
        term = KLTerm(settings, rank)
        figures = term.steer(rank.share(step))
        return figures, term.coefficient

    factor = 1 + np.clip(kl / 0.1 - 1, -0.2, 0.2) * 12 / 100
    for size in (1, 2):
        for figures, coefficient in on_ranks(size, work):
            assert figures == {"actor/kl_coef": settings.beta}
            assert coefficient == pytest.approx(settings.beta * factor, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_weights_do_not_depend_on_ranks_and_leave_responses_out(step, mode):
    settings = load_grpo_config(None, ["algorithm.mask_truncated=True"])
    finishes = iter(["eos", "length", "eos"] * 4)
    cut = [
        replace(
            one, group=replace(one.group, rollouts=tuple(replace(r, finish_reason=next(finishes)) for r in rollouts))
        )
        for one in step
        for rollouts in [one.group.rollouts]
    ]
    marked = mark_trained(cut, settings)
    masks = [one.trained_tokens for one in marked]
    expected, tokens = on_ranks(1, lambda rank: loss_weights(masks, mode, 11, rank))[0]
    assert tokens == sum(one.lengths[[0, 2]].sum() for one in marked)
    for rows in expected:
        assert rows[0].all()
        assert not rows[1].any()
    parts = on_ranks(2, lambda rank: loss_weights(rank.share(masks), mode, 11, rank)[0])
    assert_same_rows(
        [row for part in parts for rows in part for row in rows], [row for rows in expected for row in rows]
    )


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_were_not_sampled_have_no_weight(step, mode):
    step[1] = replace(step[1], trained=np.array([True, False, True]))
    step[2] = replace(step[2], trained=np.zeros(3, bool))
    mixed = list(map(with_context, step))
    (expected, tokens), (got, count) = (
        on_ranks(1, lambda rank, masks=[one.trained_tokens for one in given]: loss_weights(masks, mode, 11, rank))[0]
        for given in (step, mixed)
    )
    assert count == tokens
    for one, rows, others in zip(mixed, got, expected, strict=True):
        assert_same_rows(taken(rows, one.sampled), others)
        assert not any(row.any() for row in taken(rows, [~mask for mask in one.sampled]))


def test_tokens_that_were_not_sampled_do_not_steer(step):
    settings = load_grpo_config(None, ["algorithm.kl_target=0.1", "algorithm.kl_in_reward=True"]).algorithm

    def work(rank: Rank, given):
        term = KLTerm(settings, rank)
        return term.steer(rank.share(given)), term.coefficient

    for size in (1, 2):
        expected, got = (
            on_ranks(size, lambda rank, given=given: work(rank, given))
            for given in (step, list(map(with_context, step)))
        )
        assert got == expected
        assert got[0][0]["actor/reward_kl_penalty"] > 0


def test_tokens_that_were_not_sampled_do_not_count_as_mismatch(step):
    report = StepReport.__new__(StepReport)
    report._gather = lambda sums: [sums]
    expected, got = (report._mismatch(given, []) for given in (step, list(map(with_context, step))))
    assert got == expected
    assert expected["rollout_corr/chi2_token"] != 0


class Recorded:
    """Stands for an updater: keeps what it was given."""

    objective = Objective(("advantages", "selected"), losses=None)

    def __call__(self, groups, rate, **fields):
        self.rate, self.fields = rate, fields
        return an_update()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_are_chosen_from_the_mini_batch_of_all_ranks(step, size):
    settings = load_grpo_config(None, ["algorithm.policy_loss=kl_cov", "algorithm.kl_cov_ratio=0.2"])
    loss = settings.algorithm.loss()
    marked = mark_trained([with_advantages(one, one.rewards - 1) for one in step], settings)
    marked[1] = replace(marked[1], trained=np.array([True, False, True]))

    def work(rank: Rank):
        updater = Recorded()
        PolicyUpdates(settings, updater, loss, rank)(rank.share(marked), 0.1, lambda share: None)
        assert updater.rate == 0.1
        return [row for rows in updater.fields["selected"] for row in rows]

    chosen = [row for part in on_ranks(size, work) for row in part]
    kept = [
        (log_probs[mask], advantage)
        for one in marked
        for log_probs, advantage, mask in zip(
            one.rows("old_log_probs"), one.advantages, one.trained_tokens, strict=True
        )
    ]
    expected = select_kl_cov([row for row, _ in kept], [a for _, a in kept], 0, ratio=0.2)
    assert sum(row.sum() for row in expected) > 1
    assert_same_rows(chosen, put_back(expected, [mask for one in marked for mask in one.trained_tokens]))


def test_tokens_that_were_not_sampled_are_not_chosen(step):
    settings = load_grpo_config(None, ["algorithm.policy_loss=kl_cov", "algorithm.kl_cov_ratio=0.2"])
    marked = mark_trained([with_advantages(one, one.rewards - 1) for one in step], settings)
    mixed = list(map(with_context, marked))

    def chosen(given):
        updater = Recorded()
        update = lambda rank: PolicyUpdates(settings, updater, settings.algorithm.loss(), rank)  # noqa: E731
        on_ranks(1, lambda rank: update(rank)(given, 0.1, lambda share: None))
        return updater.fields["selected"]

    for one, rows, others in zip(mixed, chosen(mixed), chosen(marked), strict=True):
        assert_same_rows(rows, put_back(others, one.sampled))


def test_nothing_to_train_on_moves_nothing(step):
    settings = load_grpo_config(None, [])
    updater = Recorded()
    updater.objective = Objective(("advantages",), losses=None)
    left_out = [replace(one, trained=np.zeros(3, bool)) for one in step]
    update = lambda rank: PolicyUpdates(settings, updater, policy_loss("clip"), rank)  # noqa: E731
    on_ranks(1, lambda rank: update(rank)(left_out, 0.1, lambda share: None))
    assert updater.fields["empty"]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("share", "expected"), [(1.0, 3.0), (0.25, 1.5)])
def test_the_reference_follows_every_so_many_steps(share, expected):
    import mindspore
    from mindspore import Parameter, Tensor

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    mine, policy = (
        {"a": Parameter(Tensor(np.full(4, value, np.float32)), name=name)} for name, value in (("r", 1.0), ("p", 3.0))
    )
    following = Following(every=3, share=share)
    assert [following.due(step) for step in range(1, 7)] == [False, False, True] * 2
    following.move(mine, policy)
    np.testing.assert_allclose(mine["a"].asnumpy(), expected)
    np.testing.assert_array_equal(policy["a"].asnumpy(), np.full(4, 3.0))
    assert not Following().due(3)


def test_later_passes_have_the_log_probs_that_the_first_update_gave(step):
    """A group that was kept has its own already."""
    fresh = [without(e, "old_log_probs") for e in step]
    fresh[1] = step[1]
    seen = []

    def update(part, rate, advance, kl_coefficient):
        seen.append([e.tokens.get("old_log_probs") for e in part])
        outputs = [tuple(np.full(n, -float(len(seen)), np.float32) for n in e.lengths) for e in part]
        return an_update(outputs=outputs)

    config = load_grpo_config(None, ["algorithm.num_iterations=3", "algorithm.beta=0"])
    policy = Policy.__new__(Policy)
    policy.scores_old = False
    policy.update = update
    run = Run.__new__(Run)
    run.total_steps = 1
    run.timers = Timers()
    run.progress = Progress(enabled=False)
    trainer = GRPOLoop(config, None, Parts(policy=policy), Credit(config, None), run)
    assert len(trainer.update_policy(fresh, 1)) == 3
    first, *later = seen
    assert [rows is None for rows in first] == [True, False, True, True]
    for passed in later:
        for index, (rows, one) in enumerate(zip(passed, step, strict=True)):
            expected = one.rows("old_log_probs") if index == 1 else [np.full(n, -1.0) for n in one.lengths]
            assert_same_rows(rows, expected)
