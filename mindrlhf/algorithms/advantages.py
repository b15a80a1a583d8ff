"""Advantages from rewards: one call shape for all methods, on whole batches, in float64.

A method takes all groups of a step, of all data-parallel ranks. It returns an entry per group with an entry per sample:
a number for all tokens of the response, or (token-level methods) an array [R]. Both can be assigned to a row `[:R]`.
- A sample whose reward is not finite (a reward function failed, or all abstained) is left out of every statistic and
  gets 0.
- A group without spread (`differ`), or with one valid sample, gets exactly 0 from every method that compares with the
  group's own mean. (verl keeps the raw reward of a single sample in `grpo`, `dr_grpo` and `rloo`; TRL gives 0.)
- Methods that are not token-level see the sum of rewards per token (a KL penalty) and the sample's reward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from mindrlhf.algorithms.methods import Method, Methods

WHITEN_EPS = 1e-8  # added to the variance (verl, OpenRLHF)
ROUNDING = 1e-10  # rewards that differ by less, relative to the largest, are equal numbers computed in other ways

Discount = Annotated[float, Field(ge=0.0, le=1.0)]
Groups = list[np.ndarray]
TokenGroups = list[list[np.ndarray]]


@dataclass(frozen=True)
class AdvantageMethod(Method):
    """An advantage estimator.

    compares: it compares a group's responses, so it needs two. uses_values: it needs a critic's values. uses_greedy: it
    needs the reward of a greedy response to each prompt. uses_teacher: it needs a teacher's log-probs.
    """

    compares: bool = False
    uses_values: bool = False
    uses_greedy: bool = False
    uses_teacher: bool = False


_ELSEWHERE = {"ppo": "gae", "gdpo": "grpo with normalize_functions", "dapo": "grpo, with --grpo_config preset:dapo"}
ADVANTAGES: Methods[AdvantageMethod] = Methods("advantage", AdvantageMethod, _ELSEWHERE)


@dataclass(frozen=True, eq=False)
class RewardBatch:
    """Rewards, lengths and values of all groups of one step, as far as needed.

    rewards: float[G] per group; NaN where a sample is unscored. lengths: int[G] per group, response tokens.
    token_rewards: G arrays float[R] per group, added to the reward, which counts at the last token.
    turn_rewards: G arrays float[R] per group, the parts of the reward that count at other tokens, at ends of turns.
    values: G arrays float[R] per group, the critic's estimate before each token.
    teacher_log_ratios: G arrays float[R] per group, log-prob of each token: teacher's minus policy's.
    greedy_rewards: one number per group, the reward of the greedy response.
    rewards_by_function: name -> float[G] per group, unweighted, NaN where a function abstained. function_weights: name
        -> weight.
    """

    rewards: Sequence[np.ndarray]
    lengths: Sequence[np.ndarray] | None = None
    token_rewards: Sequence[Sequence[np.ndarray]] | None = None
    values: Sequence[Sequence[np.ndarray]] | None = None
    greedy_rewards: Sequence[float] | None = None
    rewards_by_function: Sequence[Mapping[str, np.ndarray]] | None = None
    function_weights: Mapping[str, float] | None = None
    turn_rewards: Sequence[Sequence[np.ndarray]] | None = None
    teacher_log_ratios: Sequence[Sequence[np.ndarray]] | None = None

    def scores(self) -> Groups:
        """Compute the total reward of each sample, token rewards included: float64[G] per group."""
        scores = [np.asarray(rewards, np.float64) for rewards in self.rewards]
        if self.token_rewards is None:
            return scores
        sums = ([np.sum(row, dtype=np.float64) for row in rows] for rows in self.token_rewards)
        return [score + np.array(added) for score, added in zip(scores, sums, strict=True)]

    def require(self, field: str):
        """Return the named field. Raises ValueError if the caller left it out."""
        value = getattr(self, field)
        if value is None:
            raise ValueError(f"this advantage needs RewardBatch.{field}")
        return value


def _apply(rule: Callable[..., np.ndarray], scores: Groups, *others: Sequence[np.ndarray]) -> Groups:
    """Apply `rule` to each group's valid scores and the matching entries of `others`.

    Other samples get 0; so do all samples of a group with fewer than two valid scores or with equal scores.
    """
    results = []
    for score, *more in zip(scores, *others, strict=True):
        result = np.zeros(score.shape)
        valid = np.isfinite(score)
        if differ(score[valid]):
            result[valid] = rule(score[valid], *(other[valid] for other in more))
        results.append(result)
    return results


def _pooled(groups: Groups) -> np.ndarray:
    """Join the valid numbers of all groups."""
    pooled = np.concatenate([np.zeros(0), *groups])
    return pooled[np.isfinite(pooled)]


def differ(values: np.ndarray) -> np.ndarray:
    """Test finite values for differences beyond rounding, over the last axis."""
    if values.shape[-1] < 2:
        return np.zeros(values.shape[:-1], bool)
    return np.ptp(values, axis=-1) > ROUNDING * np.abs(values).max(axis=-1)


def _std(values: np.ndarray) -> np.ndarray:
    """Compute the unbiased std over the last axis; exactly 0 for equal values."""
    if values.shape[-1] < 2:
        return np.zeros(values.shape[:-1])
    return np.where(differ(values), values.std(axis=-1, ddof=1), 0.0)


def _normalise(groups: Groups, std: str = "none", leave_one_out: bool = False, eps: float = 0.0) -> Groups:
    """Normalise the scores of each group: (r - mean) / (std + eps).

    std: the unbiased std of the "group" or the "batch", or "none". leave_one_out: mean (and group std) over the group's
    other samples.
    """
    batch_std = _std(_pooled(groups))

    def rule(rewards):
        basis = np.array([np.delete(rewards, i) for i in range(rewards.size)]) if leave_one_out else rewards
        centred = rewards - basis.mean(axis=-1)
        if std == "none":
            return centred
        spread = _std(basis) if std == "group" else batch_std
        # Only a leave-one-out std can be 0 here: in a 7-against-1 group the odd sample stays undivided instead of being
        # multiplied by 1/eps.
        return centred / np.where(spread > 0, spread + eps, 1.0)

    return _apply(rule, groups)


@ADVANTAGES.register(compares=True)
def grpo(
    batch: RewardBatch,
    *,
    advantage_std: Literal["group", "batch", "none"] = "group",
    leave_one_out: bool = False,
    normalize_functions: bool = False,
    advantage_eps: PositiveFloat = 1e-6,
) -> Groups:
    """Group-normalised advantage (r - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    advantage_std: divide by the unbiased std of the "group" or of all rewards of the "batch", the mean being the
        group's in both cases; "none" for no division.
    leave_one_out: mean (and group std) over the other samples of the group; undivided if these do not differ.
    normalize_functions: GDPO: normalise each reward function by the options above (0 where it abstained), then the
        weighted sum by mean and std of the batch.
    """
    options = advantage_std, leave_one_out, advantage_eps
    if not normalize_functions:
        return _normalise(batch.scores(), *options)
    if batch.token_rewards is not None:
        raise ValueError("normalize_functions is of the reward functions, token_rewards belong to none of them")
    sums = [np.where(np.isfinite(rewards), 0.0, np.nan) for rewards in batch.rewards]
    for name, weight in batch.require("function_weights").items():
        groups = zip(batch.require("rewards_by_function"), batch.rewards, strict=True)
        parts = [np.where(np.isfinite(rewards), group[name], np.nan) for group, rewards in groups]
        sums = [total + weight * part for total, part in zip(sums, _normalise(parts, *options), strict=True)]
    pooled = _pooled(sums)
    spread = _std(pooled)
    if spread == 0:
        return [np.zeros(total.shape) for total in sums]
    return [np.nan_to_num((total - pooled.mean()) / (spread + advantage_eps)) for total in sums]


@ADVANTAGES.register(compares=True)
def dr_grpo(batch: RewardBatch) -> Groups:
    """Reward minus the group's mean (Dr. GRPO, arXiv 2503.20783)."""
    return _normalise(batch.scores())


@ADVANTAGES.register(compares=True)
def rloo(batch: RewardBatch) -> Groups:
    """Reward minus the mean of the group's other samples (RLOO, arXiv 2402.14740)."""
    return _normalise(batch.scores(), leave_one_out=True)


@ADVANTAGES.register(compares=True)
def opo(batch: RewardBatch) -> Groups:
    """Reward minus the length-weighted mean of the group (OPO, arXiv 2505.23585)."""

    def rule(rewards, lengths):
        return rewards - (lengths @ rewards) / max(lengths.sum(), 1.0)

    return _apply(rule, batch.scores(), batch.require("lengths"))


@ADVANTAGES.register(compares=True)
def gpg(batch: RewardBatch, *, f_norm: float = 1.0) -> Groups:
    """Scaled reward minus the group's mean (GPG, arXiv 2504.02546).

    The value is alpha * (r - mean of the group) / f_norm, alpha = samples / samples with a reward other than 0: verl's
    measure of the part of the batch that gives a gradient.
    """
    scores = batch.scores()
    pooled = _pooled(scores)
    alpha = pooled.size / max(np.count_nonzero(pooled), 1)
    return _apply(lambda rewards: alpha * (rewards - rewards.mean()) / f_norm, scores)


@ADVANTAGES.register(compares=True)
def grpo_passk(
    batch: RewardBatch, *, advantage_std: Literal["group", "none"] = "group", advantage_eps: PositiveFloat = 1e-6
) -> Groups:
    """Advantage of a group's best sample over its second best (arXiv 2503.19595).

    All others get 0. The best sample gets (best - second best) / (std + eps); of several best samples the first does,
    with difference 0.
    """

    def rule(rewards):
        second, best = np.sort(rewards)[-2:]
        scale = _std(rewards) + advantage_eps if advantage_std == "group" else 1.0
        return np.where(np.arange(rewards.size) == np.argmax(rewards), (best - second) / scale, 0.0)

    return _apply(rule, batch.scores())


def _whiten(values: list[np.ndarray], counts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute (x - mean) / sqrt(var + 1e-8) over the batch; 0 for NaN.

    values, counts: arrays of equal shapes; x[i] stands for counts[i] tokens. The variance is unbiased. All results are
    0 if fewer than two tokens are valid.
    """
    pooled, weights = (np.concatenate([np.zeros(0), *arrays]) for arrays in (values, counts))
    used = np.isfinite(pooled) & (weights > 0)
    pooled, weights = pooled[used], weights[used]
    tokens = weights.sum()
    if tokens < 2 or not differ(pooled):
        return [np.zeros(value.shape) for value in values]
    mean = (weights @ pooled) / tokens
    variance = (weights @ (pooled - mean) ** 2) / (tokens - 1)
    return [np.nan_to_num((value - mean) / np.sqrt(variance + WHITEN_EPS)) for value in values]


def _whiten_rows(groups: TokenGroups) -> TokenGroups:
    """Whiten over all tokens of the batch; tokens that are NaN get 0."""
    rows = [row for group in groups for row in group]
    whitened = iter(_whiten(rows, [np.ones(row.shape) for row in rows]))
    return [[next(whitened) for _ in group] for group in groups]


@ADVANTAGES.register(compares=True)
def reinforce_plus_plus_baseline(batch: RewardBatch) -> Groups:
    """Reward minus the group's mean, whitened over the batch's tokens (arXiv 2501.03262)."""
    scores = batch.scores()
    centred = zip(_normalise(scores), scores, strict=True)
    return _whiten([np.where(np.isfinite(score), group, np.nan) for group, score in centred], batch.require("lengths"))


def _token_rewards(batch: RewardBatch) -> TokenGroups:
    """Compute token rewards float64[R], the sample's reward included; NaN for an abstention."""

    def row(reward, length, added, turns):
        rewards = np.zeros(int(length)) + added + turns
        rewards[-1:] += reward - np.sum(turns, dtype=np.float64)
        return rewards if np.isfinite(reward) else np.full(rewards.shape, np.nan)

    none = [[0.0] * len(rewards) for rewards in batch.rewards]
    parts = batch.token_rewards or none, batch.turn_rewards or none
    groups = zip(batch.rewards, batch.require("lengths"), *parts, strict=True)
    return [[row(*sample) for sample in zip(*group, strict=True)] for group in groups]


def _discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Sum x_t + discount * (x_{t+1} + ...) from each position to the end."""
    return np.array(list(accumulate(rewards[::-1], lambda later, reward: reward + discount * later)))[::-1]


@ADVANTAGES.register()
def reinforce_plus_plus(batch: RewardBatch, *, gamma: Discount = 1.0) -> TokenGroups:
    """Discounted future reward, whitened over the tokens of the batch (arXiv 2501.03262)."""
    return _whiten_rows([[_discounted(row, gamma) for row in rows] for rows in _token_rewards(batch)])


@ADVANTAGES.register(uses_greedy=True)
def remax(batch: RewardBatch) -> TokenGroups:
    """Future reward minus the greedy response's reward, 0 without one (arXiv 2310.10505)."""
    groups = zip(_token_rewards(batch), batch.require("greedy_rewards"), strict=True)
    return [[np.nan_to_num(_discounted(row, 1.0) - float(baseline)) for row in rows] for rows, baseline in groups]


def gae_with_returns(batch: RewardBatch, gamma: float = 1.0, lam: float = 0.95) -> tuple[TokenGroups, TokenGroups]:
    """Compute generalised advantage estimates and the critic's targets (Schulman et al. 2016, eq. 16).

    The value after the last token is 0. Returns (advantages, returns), each groups of float64[R] rows: advantages not
    whitened, NaN for a sample that abstained; returns = advantages + values, the values alone for such a sample.
    """

    def estimate(rewards, values):
        return _discounted(rewards + gamma * np.append(values[1:], 0.0)[: rewards.size] - values, gamma * lam)

    values = [[np.asarray(row, np.float64) for row in group] for group in batch.require("values")]
    groups = zip(_token_rewards(batch), values, strict=True)
    advantages = [[estimate(*sample) for sample in zip(*group, strict=True)] for group in groups]
    groups = zip(advantages, values, strict=True)
    returns = [[np.nan_to_num(row) + value for row, value in zip(*group, strict=True)] for group in groups]
    return advantages, returns


@ADVANTAGES.register(uses_values=True)
def gae(batch: RewardBatch, *, gamma: Discount = 1.0, lam: Discount = 0.95) -> TokenGroups:
    """Generalised advantage estimates, whitened over the tokens of the batch, as in PPO."""
    return _whiten_rows(gae_with_returns(batch, gamma, lam)[0])


@ADVANTAGES.register(uses_teacher=True)
def distillation(batch: RewardBatch) -> TokenGroups:
    """Log-ratio of teacher and policy at each token, without rewards (arXiv 2306.13649).

    Over tokens that the policy draws, its mean is the negative of the reverse KL(policy || teacher) per token, so that
    each token is credited only with its own part, not with the parts of later tokens.
    """
    return [[np.asarray(row, np.float64) for row in rows] for rows in batch.require("teacher_log_ratios")]


def compute_advantages(name: str, batch: RewardBatch, **options) -> Groups | TokenGroups:
    """Compute the advantages of every sample by the method called `name`.

    Returns, per group, float32[G], or from a token-level method a list of G arrays float32[R]. Raises UserError for a
    name or an option that is not known.
    """
    method = ADVANTAGES.find(name)
    return [
        [row.astype(np.float32) for row in group] if isinstance(group, list) else group.astype(np.float32)
        for group in method.function(batch, **method.checked(options))
    ]
