"""Metrics of rollouts and their rewards, under verl's names.

Where several ranks hold copies of the same rows (tensor and pipeline parallelism), only one of them adds its rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mindrlhf.algorithms.advantages import differ
from mindrlhf.algorithms.mismatch import LOG_RATIO_LIMIT
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.types import Experience, Rollout, RolloutGroup, taken


def token_counts(experiences: Sequence[Experience]) -> tuple[int, int]:
    """Count sampled tokens, and tokens of responses, each with its prompt, as verl does."""
    sampled = sum(int(e.sampled_lengths.sum()) for e in experiences)
    return sampled, sum(int((len(e.group.prompt.token_ids) + e.lengths).sum()) for e in experiences)


def add_lengths(metrics: MetricSet, experiences: Sequence[Experience], max_prompt_length: int) -> None:
    """Add `response_length/*` (sampled tokens) and `prompt_length/*` in tokens, over responses.

    `clip_ratio` of responses: the fraction that ended because the limit was hit, as the engine recorded it; of prompts:
    the fraction with `max_prompt_length` tokens or more. `response/aborted_ratio`: the fraction of empty responses, as
    in verl.
    """
    pairs = [(e.group.prompt, rollout) for e in experiences for rollout in e.group.rollouts]
    prompts = np.array([len(prompt.token_ids) for prompt, _ in pairs])
    lengths = np.array([length for e in experiences for length in e.sampled_lengths])
    metrics.add_summary("response_length", lengths)
    metrics.add_values("response/aborted_ratio", lengths == 0)
    clipped = [rollout.finish_reason == "length" for _, rollout in pairs]
    metrics.add_values("response_length/clip_ratio", np.array(clipped))
    metrics.add_summary("prompt_length", prompts)
    metrics.add_values("prompt_length/clip_ratio", prompts >= max_prompt_length)


def add_rewards(metrics: MetricSet, experiences: Sequence[Experience]) -> None:
    """Add `critic/score/*`, `critic/rewards/*`, `critic/advantages/*`, `reward/<function>/*` and `group/*`.

    Score and rewards are the same number: a KL term in the reward is shown by itself (`actor/reward_kl_penalty`). NaN
    rewards are left out; `reward/unscored` counts them. The mean advantage is over tokens, as in verl.
    `reward/<function>/missing` counts samples without a value of that function. `group/zero_std_fraction` is the
    fraction of groups whose rewards do not differ and so teach nothing, left out if prompts have one response each
    (PPO); `group/reward_std` is the mean of the groups' unbiased standard deviations.
    """
    if not experiences:
        return
    rewards = np.concatenate([e.rewards for e in experiences], dtype=np.float64)
    for name in ("critic/score", "critic/rewards"):
        metrics.add_summary(name, rewards, ~np.isnan(rewards))
    metrics.add_total("reward/unscored", np.count_nonzero(np.isnan(rewards)))
    for function in dict.fromkeys(name for e in experiences for name in e.rewards_by_function):
        of = [e.rewards_by_function[function] for e in experiences if function in e.rewards_by_function]
        values = np.concatenate(of)
        given = ~np.isnan(values)
        metrics.add_values(f"reward/{function}/mean", values, given)
        metrics.add_std(f"reward/{function}/std", values, given)
        metrics.add_total(f"reward/{function}/missing", np.count_nonzero(~given))
    advantages = [row for e in experiences for row in taken(e.rows("advantages"), e.sampled)]
    metrics.add_summary("critic/advantages", np.concatenate(advantages))
    scored = [e.rewards[~np.isnan(e.rewards)] for e in experiences if len(e.rewards) > 1]
    metrics.add("group/zero_std_fraction", sum(not differ(rewards) for rewards in scored), len(scored))
    spreads = [rewards.std(ddof=1) for rewards in scored if rewards.size > 1]
    metrics.add("group/reward_std", sum(spreads), len(spreads))


def add_values(metrics: MetricSet, experiences: Sequence[Experience]) -> None:
    """Add `critic/values/*`, `critic/returns/*` and `critic/return_error/std` over tokens."""
    for e in experiences:
        if e.tokens.keys() >= {"values", "returns"}:
            values, returns = (np.concatenate(taken(e.rows(name), e.sampled)) for name in ("values", "returns"))
            metrics.add_summary("critic/values", values)
            metrics.add_summary("critic/returns", returns)
            metrics.add_std("critic/returns/std", returns)
            metrics.add_std("critic/return_error/std", returns - values)


def add_distillation(metrics: MetricSet, experiences: Sequence[Experience]) -> None:
    """Add `distillation/reverse_kl` with a teacher: KL(policy || teacher) in nats per sampled token.

    It is estimated from the sampled tokens: the log-ratio of a token is its advantage.
    """
    for e in experiences:
        if "teacher_log_probs" in e.tokens:
            metrics.add_values("distillation/reverse_kl", -np.concatenate(taken(e.rows("advantages"), e.sampled)))


def add_conversations(
    metrics: MetricSet,
    conversations: int,
    turns: int,
    calls: int,
    failures: int,
    lost: int,
    seconds: float,
    tokens: Mapping[str, int],
    images: int | None = None,
) -> None:
    """Add `conversation/*` and `tools/*` of this many conversations.

    `conversation/turns`, `conversation/<role>_tokens` and `tools/call_frequency` are means over conversations;
    `tools/failure_frequency` and `tools/seconds` over calls. `conversation/lost` counts environments that ended early
    or failed to give their rewards. images: for `conversation/images`, a mean too; None where none are taken.
    """
    metrics.add("conversation/turns", turns, conversations)
    metrics.add_total("conversation/lost", lost)
    if images is not None:
        metrics.add("conversation/images", images, conversations)
    for role, count in tokens.items():
        metrics.add(f"conversation/{role}_tokens", count, conversations)
    metrics.add("tools/call_frequency", calls, conversations)
    metrics.add("tools/failure_frequency", failures, calls)
    metrics.add("tools/seconds", seconds, calls)


def add_turns(metrics: MetricSet, groups: Sequence[RolloutGroup]) -> None:
    """Add `num_turns/*` of conversations (`Rollout.num_turns`)."""
    metrics.add_summary("num_turns", np.array([one.num_turns for group in groups for one in group.rollouts]))


def add_reward_components(metrics: MetricSet, components: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Add `reward_extra/<function>/<name>`, means of further numbers over the samples that have them."""
    for function, columns in components.items():
        for name, values in columns.items():
            metrics.add_values(f"reward_extra/{function}/{name}", values, ~np.isnan(values))


def add_reward_troubles(metrics: MetricSet, failures: Mapping[str, int], timeouts: Mapping[str, int]) -> None:
    """Add `reward/<function>/failures` (raised) and `/timeouts` (given up), in samples."""
    for kind, counts in (("failures", failures), ("timeouts", timeouts)):
        for function, count in counts.items():
            metrics.add_total(f"reward/{function}/{kind}", count)


def add_log_prob_difference(
    metrics: MetricSet, rollouts: Sequence[Rollout], train_log_probs: Sequence[np.ndarray]
) -> None:
    """Add differences between log-probs of the rollouts and the train graph.

    train_log_probs: float32[R] for each rollout. With d = train - behaviour (which drew the tokens), as in verl:
    `rollout_corr/kl` mean -d, `rollout_corr/k3_kl` mean exp(d) - d - 1, KL(rollout || train) in nats per token. With
    d = train - policy, one distribution computed by two graphs: `rollout_corr/log_prob_diff/{mean,max}` of |d|, and
    `training/rollout_probs_diff_{mean,max}` of the probabilities.
    """
    if not rollouts:
        return
    sampled = np.concatenate([rollout.sampled for rollout in rollouts])
    drawn = np.concatenate([one.row("behaviour_log_probs") for one in rollouts], dtype=np.float64)[sampled]
    engine = np.concatenate([one.row("policy_log_probs") for one in rollouts], dtype=np.float64)[sampled]
    train = np.concatenate(train_log_probs, dtype=np.float64)[sampled]
    log_ratio = np.clip(train - drawn, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics.add_values("rollout_corr/kl", -log_ratio)
    metrics.add_values("rollout_corr/k3_kl", np.expm1(log_ratio) - log_ratio)
    for name, values in (
        ("rollout_corr/log_prob_diff/", np.abs(train - engine)),
        ("training/rollout_probs_diff_", np.abs(np.exp(train) - np.exp(engine))),
    ):
        metrics.add_values(f"{name}mean", values)
        metrics.add_max(f"{name}max", values.max())


def add_experience(metrics: MetricSet, experiences: Sequence[Experience], max_prompt_length: int) -> None:
    """Add all metrics of experiences; log-prob differences only with old log-probs."""
    add_lengths(metrics, experiences, max_prompt_length)
    add_rewards(metrics, experiences)
    add_values(metrics, experiences)
    add_distillation(metrics, experiences)
    both = [e for e in experiences if "old_log_probs" in e.tokens]
    rollouts = [rollout for e in both for rollout in e.group.rollouts]
    add_log_prob_difference(metrics, rollouts, [train for e in both for train in e.rows("old_log_probs")])
