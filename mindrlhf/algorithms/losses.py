"""Policy losses per token, for use in compiled graphs.

Each registered function is called with its options, once, and returns the loss (or the loss and its token selection):

    losses(log_probs, old_log_probs, advantages, mask[, selected]) -> (losses, metrics)

All are float32[B, T]. log_probs: of the policy now, the gradient flows through it. old_log_probs: of the policy that
starts the update; `stop_gradient(log_probs)` when a batch is used once. mask: 1 on response tokens; a row holds a whole
response. selected: 1 on chosen tokens. losses: the caller sums `weights * losses` (`aggregation.py`). metrics: by name,
to be averaged over the mask. Losses, metrics and gradient are 0 on padding, for any inputs there (NaN and inf too).

The loss is a closure over its options and never a `functools.partial`, with which MindSpore 2.9 gives zeros for all
gradients, without an error. MindSpore is imported only when a loss is made: settings are checked without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mindrlhf.algorithms.covariance import select_clip_cov, select_kl_cov
from mindrlhf.algorithms.methods import Method, Methods

AboveOne = Annotated[float, Field(gt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class LossMethod(Method):
    """Policy loss.

    aggregation: the only mode that fits its definition, None for any. selects: it chooses tokens by their log-probs.
    """

    aggregation: str | None = None
    selects: bool = False


_ELSEWHERE = dict.fromkeys(("ppo", "vanilla", "dual_clip"), "clip")
_ELSEWHERE |= {name: f"clip, with --grpo_config preset:{name}" for name in ("grpo", "dapo", "dr_grpo")}
_ELSEWHERE |= {"bnpo": "clip with aggregation token-mean", "gmpo": "geo_mean"}
POLICY_LOSSES: Methods[LossMethod] = Methods("policy loss", LossMethod, _ELSEWHERE)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its options bound.

    losses: (log_probs, old_log_probs, advantages, mask[, selected]), each float32[B, T] -> losses float32[B, T], and
        metrics by name. select: (log_probs, advantages, seed) -> float32[R] per row, 1 on chosen tokens, on the host;
        None if the loss takes no `selected`. aggregation: the only one that its definition allows, if any.
    """

    name: str
    losses: Callable
    select: Callable | None
    aggregation: str | None


def policy_loss(name: str, options: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the policy loss called `name` with these options.

    Raises UserError for an unknown name, an option the method does not take, or a value that does not fit.
    """
    method = POLICY_LOSSES.find(name)
    made = method.function(**method.checked(options or {}))
    losses, select = made if isinstance(made, tuple) else (made, None)
    return PolicyLoss(name, losses, select, method.aggregation)


def _masked(formula: Callable) -> Callable:
    """Make a loss from a formula that may ignore padding.

    formula: (log_probs, log_ratio, advantages, mask[, selected]) -> (losses, conditions), log-ratios clamped to +-20.
    A metric is 1 where its condition bool[B, T] holds; policy_kl (old - now, in nats) is added.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import masked_log_ratio

    def losses(log_probs, old_log_probs, advantages, mask, *selected):
        valid = mask > 0
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        log_probs = ops.where(valid, log_probs, 0.0)
        advantages = ops.where(valid, advantages, 0.0)
        losses, conditions = formula(log_probs, log_ratio, advantages, mask, *selected)
        metrics = {name: ops.where(condition, mask, 0.0) for name, condition in conditions.items()}
        metrics["policy_kl"] = -log_ratio
        return ops.where(valid, losses, 0.0), metrics

    return losses


@POLICY_LOSSES.register()
def clip(
    *,
    epsilon_low: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
    dual_clip: AboveOne | None = None,
    delta: AboveOne | None = None,
    importance_level: Level = "token",
):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds.

    The separate bounds are DAPO's (arXiv 2503.14476).
    dual_clip: c > 1 bounds the loss of a negative advantage by -c * A (arXiv 1912.09729).
    delta: caps the ratio itself, also where the advantage is negative (INTELLECT-2, arXiv 2505.07291); set it above
        1 + epsilon_high.
    Metrics: clip_fraction (the clip acts), its parts clip_fraction_low and clip_fraction_high, and dual_clip_fraction.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import ratio_of

    def formula(log_probs, log_ratio, advantages, mask):
        ratio = ratio_of(log_probs, log_ratio, mask, importance_level)
        if delta is not None:
            ratio = ops.clamp(ratio, None, delta)
        unclipped = -advantages * ratio
        clipped = -advantages * ops.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
        losses = ops.maximum(unclipped, clipped)
        acts = clipped > unclipped
        negative = advantages < 0
        conditions = {
            "clip_fraction": acts,
            "clip_fraction_low": ops.logical_and(acts, negative),
            "clip_fraction_high": ops.logical_and(acts, advantages > 0),
        }
        if dual_clip is not None:
            bound = -advantages * dual_clip
            conditions["dual_clip_fraction"] = ops.logical_and(negative, losses > bound)
            losses = ops.where(negative, ops.minimum(losses, bound), losses)
        return losses, conditions

    return _masked(formula)


@POLICY_LOSSES.register(aggregation="seq-mean-token-mean")
def gspo(*, epsilon_low: NonNegativeFloat = 3e-4, epsilon_high: NonNegativeFloat = 4e-4):
    """GSPO: `clip` with the row's length-normalised ratio, in token form (arXiv 2507.18071)."""
    return clip(epsilon_low=epsilon_low, epsilon_high=epsilon_high, importance_level="sequence")


@POLICY_LOSSES.register()
def cispo(
    *,
    epsilon_low: NonNegativeFloat = 1.0,
    epsilon_high: NonNegativeFloat = 2.0,
    cispo_cap: Literal["relative", "absolute"] = "relative",
    importance_level: Level = "token",
):
    """CISPO: -sg(clipped ratio) * A * log p (MiniMax-M1, arXiv 2506.13585).

    cispo_cap: "relative" clips the ratio to [1 - epsilon_low, 1 + epsilon_high] (MiniMax-M1, verl); "absolute" to at
        most epsilon_high, without a lower bound (ScaleRL, arXiv 2510.13786; TRL; 5.0 there).
    Metrics: clip_fraction (the weight is clipped; every token keeps a gradient).
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import ratio_of

    low, high = (1.0 - epsilon_low, 1.0 + epsilon_high) if cispo_cap == "relative" else (None, epsilon_high)

    def formula(log_probs, log_ratio, advantages, mask):
        ratio = ratio_of(log_probs, log_ratio, mask, importance_level)
        weight = ops.clamp(ratio, low, high)
        return -ops.stop_gradient(weight) * advantages * log_probs, {"clip_fraction": weight != ratio}

    return _masked(formula)


@POLICY_LOSSES.register(aggregation="seq-mean-token-mean")
def sapo(*, tau_positive: PositiveFloat = 1.0, tau_negative: PositiveFloat = 1.05, importance_level: Level = "token"):
    """SAPO: -A * sigmoid(tau * (ratio - 1)) * 4 / tau (arXiv 2511.20347)."""
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import ratio_of

    def formula(log_probs, log_ratio, advantages, mask):
        tau = ops.where(advantages > 0, tau_positive, tau_negative)
        ratio = ratio_of(log_probs, log_ratio, mask, importance_level)
        return -advantages * ops.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, {}

    return _masked(formula)


@POLICY_LOSSES.register(aggregation="seq-mean-token-mean")
def geo_mean(*, epsilon_low: NonNegativeFloat = 0.4, epsilon_high: NonNegativeFloat = 0.4):
    """GMPO: -A * geometric mean of the row's clipped token ratios (arXiv 2507.20673).

    The log-ratio is bounded to [-epsilon_low, epsilon_high], one-sided by the sign of A. Each token has its row's loss
    (with the row's mean advantage). verl takes the mean over all rows, empty ones included.
    Metrics: clip_fraction (the clip acts; verl also counts tokens that leave the range on the other side), its parts
    clip_fraction_low and clip_fraction_high.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import row_mean

    def formula(log_probs, log_ratio, advantages, mask):
        limited = ops.clamp(log_ratio, -epsilon_low, epsilon_high)
        too_high = ops.logical_and(advantages > 0, log_ratio > limited)
        too_low = ops.logical_and(advantages < 0, log_ratio < limited)
        acts = ops.logical_or(too_high, too_low)
        ratio = ops.exp(row_mean(ops.where(acts, limited, log_ratio), mask))
        losses = -row_mean(advantages, mask) * ratio
        return losses, {"clip_fraction": acts, "clip_fraction_low": too_low, "clip_fraction_high": too_high}

    return _masked(formula)


@POLICY_LOSSES.register()
def gpg():
    """REINFORCE, -A * log p, without ratio and clip (GPG, arXiv 2504.02546)."""

    def formula(log_probs, log_ratio, advantages, mask):
        return -advantages * log_probs, {}

    return _masked(formula)


@POLICY_LOSSES.register(selects=True)
def clip_cov(
    *,
    epsilon_low: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
    clip_cov_ratio: Share = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
):
    """Clip-Cov: `clip` without the gradient of some high-covariance tokens (arXiv 2505.22617).

    A selected token that the clip already holds keeps its (constant) loss, as in verl. Metrics: also selected_fraction.
    """
    from mindspore import ops

    clipped = clip(epsilon_low=epsilon_low, epsilon_high=epsilon_high)

    def losses(log_probs, old_log_probs, advantages, mask, selected):
        losses, metrics = clipped(log_probs, old_log_probs, advantages, mask)
        dropped = ops.logical_and(selected > 0, metrics["clip_fraction"] == 0)
        metrics["selected_fraction"] = ops.where(dropped, mask, 0.0)
        return ops.where(dropped, 0.0, losses), metrics

    return losses, partial(select_clip_cov, ratio=clip_cov_ratio, low=clip_cov_lb, high=clip_cov_ub)


@POLICY_LOSSES.register(selects=True)
def kl_cov(*, kl_cov_ratio: Share = 0.0002, ppo_kl_coef: NonNegativeFloat = 1.0):
    """KL-Cov: a KL penalty on high-covariance tokens in place of the clip (arXiv 2505.22617).

    The loss is -A * ratio, plus ppo_kl_coef * |log-ratio| on selected tokens. Metrics: selected_fraction.
    """
    from mindspore import ops

    def formula(log_probs, log_ratio, advantages, mask, selected):
        chosen = selected > 0
        penalty = ops.where(chosen, ops.abs(log_ratio), 0.0)
        return -advantages * ops.exp(log_ratio) + ppo_kl_coef * penalty, {"selected_fraction": chosen}

    return _masked(formula), partial(select_kl_cov, ratio=kl_cov_ratio)
