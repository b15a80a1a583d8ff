"""Advantages from rewards: one call shape for all methods, on whole batches.

`compute_advantages(name, RewardBatch(...), **options)` takes all groups of a step, gathered over the data-parallel
ranks, so that no statistic depends on how prompts were spread, and returns one entry per group, in order, each with one
entry per sample: a float32 number for all tokens of the response, or (token-level methods) a float32[R] array.
Both can be assigned to a row `[:R]`. Computed in float64.

The same for all methods:
- A sample whose reward is not finite (NaN: every reward function abstained) is left out of every statistic and gets 0.
- A group without spread gets exactly 0 from every method that has the group's own mean as baseline, and so does a group
  with one valid sample, which has nothing to be compared with. (verl keeps the raw reward there in `grpo`, `dr_grpo`
  and `rloo`, and 0 in `rloo_vectorized`; TRL gives 0.)
- Rewards per token (`token_rewards`, a KL penalty for instance) are added to the sample's reward; methods that are not
  token-level see their sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mindrlhf.algorithms.methods import Method, Methods, Setting

WHITEN_EPS = 1e-8  # added to the variance (verl, OpenRLHF)

_STD = Setting(
    "Standard deviation that an advantage is divided by (verl algorithm.norm_adv_by_std_in_grpo, TRL scale_rewards).",
    name="advantage_std",
)
Std = Annotated[Literal["group", "batch", "none"], _STD]
GroupStd = Annotated[Literal["group", "none"], _STD]
Eps = Annotated[
    float, Field(gt=0.0), Setting("Added to that standard deviation (verl: 1e-6, TRL: 1e-4).", name="advantage_eps")
]
LeaveOneOut = Annotated[bool, Setting("Compare a response with the others of its group, without itself.")]
PerFunction = Annotated[
    bool,
    Setting(
        "Normalise each reward function in its group before the weighted sum, GDPO "
        "(verl algorithm.adv_estimator=gdpo, TRL multi_objective_aggregation=normalize_then_sum).",
        name="normalize_functions",
    ),
]
Gamma = Annotated[float, Field(ge=0.0, le=1.0), Setting("Discount of later rewards (verl algorithm.gamma).")]
Lambda = Annotated[
    float,
    Field(ge=0.0, le=1.0),
    Setting("Lambda of gae, the generalised estimates (verl algorithm.lam)."),
]


@dataclass(frozen=True)
class AdvantageMethod(Method):
    """An advantage estimator.

    compares: it compares the responses of a group, so that a group needs two. uses_values: it needs a critic.
    uses_greedy: it needs the reward of a greedy response to each prompt.
    """

    compares: bool = False
    uses_values: bool = False
    uses_greedy: bool = False


ADVANTAGES: Methods[AdvantageMethod] = Methods("advantage", AdvantageMethod)


@dataclass(frozen=True, eq=False)
class RewardBatch:
    """Rewards, lengths and values of all groups of one step.

    Outer sequences run over groups (sizes may differ), inner ones over a group's samples.

    rewards: float[G] per group; NaN where a sample abstained.
    lengths: int[G] per group, response tokens; for opo, reinforce_plus_plus(_baseline), remax, gae.
    token_rewards: G arrays float[R] per group, added to the reward (which counts at the last token), or None.
    values: G arrays float[R] per group, the critic's estimate before each token; for gae.
    greedy_rewards: one number per group, the reward of the greedy response; for remax.
    rewards_by_function: name -> float[G] per group, unweighted, NaN where a function abstained; for `per_function`.
    function_weights: name -> weight of a function; for `per_function`.
    """

    rewards: Sequence[np.ndarray]
    lengths: Sequence[np.ndarray] | None = None
    token_rewards: Sequence[Sequence[np.ndarray]] | None = None
    values: Sequence[Sequence[np.ndarray]] | None = None
    greedy_rewards: Sequence[float] | None = None
    rewards_by_function: Sequence[Mapping[str, np.ndarray]] | None = None
    function_weights: Mapping[str, float] | None = None

    def scores(self) -> list[np.ndarray]:
        """Total reward of each sample, token rewards included: float64[G] per group."""
        scores = [np.asarray(rewards, np.float64) for rewards in self.rewards]
        if self.token_rewards is None:
            return scores
        return [
            score + np.array([np.sum(row, dtype=np.float64) for row in rows])
            for score, rows in zip(scores, self.token_rewards, strict=True)
        ]

    def require(self, field: str):
        """Return the named field.

        Raises ValueError where the caller left it out though the method needs it.
        """
        value = getattr(self, field)
        if value is None:
            raise ValueError(f"this advantage needs RewardBatch.{field}")
        return value


def _fill(scores: np.ndarray, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply `rule` to the valid scores of a group; the others get 0.

    All get 0 where fewer than two scores are valid or all are equal.
    """
    advantages = np.zeros(scores.shape)
    valid = np.isfinite(scores)
    if np.count_nonzero(valid) > 1 and np.ptp(scores[valid]) > 0:
        advantages[valid] = rule(scores[valid])
    return advantages


def _std(values: np.ndarray) -> np.ndarray:
    """Compute the unbiased std over the last axis; exactly 0 for equal values."""
    if values.shape[-1] < 2:
        return np.zeros(values.shape[:-1])
    return np.where(np.ptp(values, axis=-1) > 0, values.std(axis=-1, ddof=1), 0.0)


def _others(rewards: np.ndarray) -> np.ndarray:
    """[n] -> [n, n-1]: row i holds every reward but the i-th."""
    count = rewards.size
    return np.broadcast_to(rewards, (count, count))[~np.eye(count, dtype=bool)].reshape(count, count - 1)


def _normalise(groups: list[np.ndarray], std: str, leave_one_out: bool, eps: float) -> list[np.ndarray]:
    """Normalise the scores of each group; options as in `grpo`."""
    pooled = np.concatenate(groups) if groups else np.zeros(0)
    batch_std = _std(pooled[np.isfinite(pooled)])

    def rule(rewards):
        basis = _others(rewards) if leave_one_out else rewards
        centred = rewards - basis.mean(axis=-1)
        if std == "none":
            return centred
        spread = _std(basis) if std == "group" else batch_std
        # Only a leave-one-out std can be 0 here: a 7-against-1 group, whose odd one is left undivided instead of
        # being blown up by 1/eps.
        return centred / np.where(spread > 0, spread + eps, 1.0)

    return [_fill(group, rule) for group in groups]


@ADVANTAGES.register(compares=True)
def grpo(
    batch: RewardBatch,
    *,
    std: Std = "group",
    leave_one_out: LeaveOneOut = False,
    per_function: PerFunction = False,
    eps: Eps = 1e-6,
) -> list[np.ndarray]:
    """Group-normalised advantage (r - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The std is unbiased.

    std: "group"; "batch" for the std of all rewards of the batch, the mean staying the group's; "none" for no division.
    leave_one_out: mean (and group std) over the other samples of the group; undivided where those do not differ.
    per_function: GDPO: each reward function is normalised by the options above, the weighted sum of these (a function
        that abstained adds 0) is normalised once more by mean and std of the batch.
    eps: 1e-6 in verl, 1e-4 in TRL.
    """
    if not per_function:
        return _normalise(batch.scores(), std, leave_one_out, eps)
    if batch.token_rewards is not None:
        raise ValueError("per_function normalises the reward functions, token_rewards belong to none of them")
    by_function, weights = batch.require("rewards_by_function"), batch.require("function_weights")
    sums = [np.zeros(np.shape(rewards)) for rewards in batch.rewards]
    for name, weight in weights.items():
        groups = [np.asarray(group[name], np.float64) for group in by_function]
        for total, part in zip(sums, _normalise(groups, std, leave_one_out, eps), strict=True):
            total += weight * part
    for total, rewards in zip(sums, batch.rewards, strict=True):
        total[~np.isfinite(rewards)] = np.nan
    pooled = np.concatenate(sums) if sums else np.zeros(0)
    pooled = pooled[np.isfinite(pooled)]
    spread = _std(pooled)
    if spread == 0:
        return [np.zeros(total.shape) for total in sums]
    return [np.nan_to_num((total - pooled.mean()) / (spread + eps), nan=0.0) for total in sums]


@ADVANTAGES.register(compares=True)
def dr_grpo(batch: RewardBatch) -> list[np.ndarray]:
    """Reward minus the group's mean (Dr. GRPO, arXiv 2503.20783)."""
    return _normalise(batch.scores(), "none", False, 0.0)


@ADVANTAGES.register(compares=True)
def rloo(batch: RewardBatch) -> list[np.ndarray]:
    """Reward minus the mean of the group's other samples (RLOO, arXiv 2402.14740)."""
    return _normalise(batch.scores(), "none", True, 0.0)


@ADVANTAGES.register(compares=True)
def opo(batch: RewardBatch) -> list[np.ndarray]:
    """Reward minus the length-weighted mean of the group (OPO, arXiv 2505.23585)."""
    lengths = [np.asarray(length, np.float64) for length in batch.require("lengths")]

    def one(scores, length):
        weights = length[np.isfinite(scores)]
        return _fill(scores, lambda valid: valid - (weights @ valid) / max(weights.sum(), 1.0))

    return [one(*pair) for pair in zip(batch.scores(), lengths, strict=True)]


@ADVANTAGES.register(compares=True)
def gpg(batch: RewardBatch, *, f_norm: float = 1.0) -> list[np.ndarray]:
    """Scaled reward minus the group's mean (GPG, arXiv 2504.02546).

    The value is alpha * (r - mean of the group) / f_norm, alpha = samples / samples with a reward other than 0. In
    the paper, alpha corrects for the part of the batch that gives no gradient; this measure of that part is verl's.
    """
    scores = batch.scores()
    pooled = np.concatenate(scores) if scores else np.zeros(0)
    pooled = pooled[np.isfinite(pooled)]
    alpha = pooled.size / max(np.count_nonzero(pooled), 1)
    return [_fill(group, lambda valid: alpha * (valid - valid.mean()) / f_norm) for group in scores]


@ADVANTAGES.register(compares=True)
def grpo_passk(batch: RewardBatch, *, std: GroupStd = "group", eps: Eps = 1e-6) -> list[np.ndarray]:
    """Advantage of a group's best sample over its second best (arXiv 2503.19595).

    The best sample gets (best - second best) / (std + eps), all others 0.
    std: "group" or "none". Of several best samples the first is taken; the difference is 0 then.
    """

    def rule(rewards):
        second, best = np.sort(rewards)[-2:]
        advantages = np.zeros(rewards.shape)
        advantages[np.argmax(rewards)] = (best - second) / (_std(rewards) + eps if std == "group" else 1.0)
        return advantages

    return [_fill(group, rule) for group in batch.scores()]


def _whiten(values: list[np.ndarray], counts: list[np.ndarray]) -> list[np.ndarray]:
    """Compute (x - mean) / sqrt(var + 1e-8) over the batch; 0 for NaN.

    values, counts: float64 arrays of equal shapes, one per group or row; x[i] stands for counts[i] tokens. The
    variance is unbiased. All results are 0 where fewer than two tokens are valid.
    """
    pooled, weights = np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0), *counts])
    used = np.isfinite(pooled) & (weights > 0)
    pooled, weights = pooled[used], weights[used]
    tokens = weights.sum()
    if tokens < 2 or np.ptp(pooled) == 0:
        return [np.zeros(value.shape) for value in values]
    mean = (weights @ pooled) / tokens
    variance = (weights @ (pooled - mean) ** 2) / (tokens - 1)
    return [np.nan_to_num((value - mean) / np.sqrt(variance + WHITEN_EPS), nan=0.0) for value in values]


@ADVANTAGES.register(compares=True)
def reinforce_plus_plus_baseline(batch: RewardBatch) -> list[np.ndarray]:
    """Reward minus the group's mean, whitened over the batch's tokens (arXiv 2501.03262)."""
    lengths = [np.asarray(length, np.float64) for length in batch.require("lengths")]
    scores = batch.scores()
    centred = _normalise(scores, "none", False, 0.0)
    for group, score in zip(centred, scores, strict=True):
        group[~np.isfinite(score)] = np.nan
    return _whiten(centred, lengths)


def _token_rewards(batch: RewardBatch) -> list[list[np.ndarray]]:
    """Token rewards of each sample, its reward added at the last token.

    Returns float64[R] for each sample; all NaN for a sample that abstained.
    """
    rows_of_groups = []
    for index, (rewards, lengths) in enumerate(zip(batch.rewards, batch.require("lengths"), strict=True)):
        rows = []
        for sample, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            row = np.zeros(int(length))
            if batch.token_rewards is not None:
                row += batch.token_rewards[index][sample]
            row[-1:] += reward
            rows.append(row if np.isfinite(reward) else np.full(row.shape, np.nan))
        rows_of_groups.append(rows)
    return rows_of_groups


def _discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Sum x_t + discount * (x_{t+1} + ...) from each position to the end."""
    sums, running = np.empty(rewards.shape), 0.0
    for position in range(rewards.size - 1, -1, -1):
        running = rewards[position] + discount * running
        sums[position] = running
    return sums


def _whiten_rows(groups: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Whiten over all tokens of the batch; tokens that are NaN get 0."""
    rows = [row for group in groups for row in group]
    whitened = iter(_whiten(rows, [np.ones(row.shape) for row in rows]))
    return [[next(whitened) for _ in group] for group in groups]


@ADVANTAGES.register()
def reinforce_plus_plus(batch: RewardBatch, *, gamma: Gamma = 1.0) -> list[list[np.ndarray]]:
    """Discounted future reward, whitened over the tokens of the batch (arXiv 2501.03262)."""
    return _whiten_rows([[_discounted(row, gamma) for row in rows] for rows in _token_rewards(batch)])


@ADVANTAGES.register(uses_greedy=True)
def remax(batch: RewardBatch) -> list[list[np.ndarray]]:
    """Future reward minus the reward of the greedy response (arXiv 2310.10505).

    A group whose greedy response has no reward (NaN) gets 0.
    """
    baselines = batch.require("greedy_rewards")
    return [
        [np.nan_to_num(_discounted(row, 1.0) - float(baseline), nan=0.0) for row in rows]
        for rows, baseline in zip(_token_rewards(batch), baselines, strict=True)
    ]


def gae_with_returns(batch: RewardBatch, gamma: float = 1.0, lam: float = 0.95):
    """Compute generalised advantage estimates and the critic's targets (Schulman et al. 2016, eq. 16).

    The value after the last token is 0.

    Returns (advantages, returns), each groups of float64[R] rows: advantages not whitened, NaN for a sample that
    abstained; returns = advantages + values, and the values themselves for a sample that abstained.
    """
    advantages, returns = [], []
    for rows, values_of_group in zip(_token_rewards(batch), batch.require("values"), strict=True):
        group_advantages, group_returns = [], []
        for row, values in zip(rows, values_of_group, strict=True):
            values = np.asarray(values, np.float64)
            errors = row + gamma * np.append(values[1:], 0.0)[: row.size] - values
            estimate = _discounted(errors, gamma * lam)
            group_advantages.append(estimate)
            group_returns.append(np.nan_to_num(estimate, nan=0.0) + values)
        advantages.append(group_advantages)
        returns.append(group_returns)
    return advantages, returns


@ADVANTAGES.register(uses_values=True)
def gae(batch: RewardBatch, *, gamma: Gamma = 1.0, lam: Lambda = 0.95) -> list[list[np.ndarray]]:
    """Generalised advantage estimates, whitened over the tokens of the batch, as in PPO."""
    return _whiten_rows(gae_with_returns(batch, gamma, lam)[0])


def compute_advantages(name: str, batch: RewardBatch, **options) -> list:
    """Compute the advantages of every sample by the method called `name`.

    The module's docstring has the shapes. Returns, per group, float32[G], or from a token-level method a list of G
    arrays float32[R]. Raises UserError for a name or an option that is not known.
    """
    method = ADVANTAGES.find(name)
    return [_as_float32(group) for group in method.function(batch, **method.checked(options))]


def _as_float32(group: np.ndarray | list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    return [row.astype(np.float32) for row in group] if isinstance(group, list) else group.astype(np.float32)
