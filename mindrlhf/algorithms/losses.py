"""Policy losses per token, for use in compiled graphs.

Each function here is called with its options, once, and returns the loss (or the loss and its token selection):

    losses(log_probs, old_log_probs, advantages, mask[, selected]) -> (losses, metrics)

log_probs: float32[B, T] of the policy now, the gradient flows through it. old_log_probs: float32[B, T] of the policy
that starts the update; `stop_gradient(log_probs)` when a batch is used once. advantages: float32[B, T].
mask: float32[B, T], 1 on response tokens; a row holds a whole response. selected: float32[B, T], 1 on chosen tokens.
losses: float32[B, T], not aggregated: the caller sums `weights * losses` with the weights of `aggregation.py`.
metrics: name -> float32[B, T], one value per token, to be averaged over the mask by the caller.
Both are 0 on padding, and so is the gradient, whatever stands there (NaN and inf too).

Options are Python numbers or strings, fixed when the graph is compiled. The loss is a closure over them and never a
`functools.partial`: MindSpore 2.9 then gives zeros for all gradients, without an error. MindSpore is imported when a
loss is made, so that settings are checked without it.

Log-ratios are clamped to +-20 before the exponential. An entropy bonus, the KL term and the correction for a rollout
that drew from another distribution are separate factors of the caller's sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from mindrlhf.algorithms.covariance import select_clip_cov, select_kl_cov
from mindrlhf.algorithms.methods import Method, Methods, Setting

EpsilonLow = Annotated[
    float,
    Field(ge=0.0),
    Setting("The ratio is clipped at 1 - epsilon_low (verl actor.clip_ratio_low, TRL epsilon)."),
]
EpsilonHigh = Annotated[
    float,
    Field(ge=0.0),
    Setting("The ratio is clipped at 1 + epsilon_high (verl actor.clip_ratio_high, TRL epsilon_high)."),
]
DualClip = Annotated[
    Annotated[float, Field(gt=1.0)] | None,
    Setting(
        "Bounds the loss of a negative advantage at this many times it; null is off "
        "(verl actor.clip_ratio_c, there always on with 3)."
    ),
]
Delta = Annotated[
    Annotated[float, Field(gt=1.0)] | None,
    Setting("Upper bound of the ratio for either sign of the advantage; null is off (TRL delta)."),
]
Level = Annotated[
    Literal["token", "sequence"],
    Setting(
        "Ratio of the token, or the length-normalised one of its row (TRL importance_sampling_level).",
        name="importance_level",
    ),
]
Cap = Annotated[
    Literal["relative", "absolute"],
    Setting(
        "cispo: epsilon_high is `relative` to 1, or the `absolute` cap of the weight (verl: relative, TRL: absolute).",
        name="cispo_cap",
    ),
]
TauPositive = Annotated[
    float,
    Field(gt=0.0),
    Setting("sapo: temperature where the advantage is positive (verl actor.tau_pos, TRL sapo_temperature_pos)."),
]
TauNegative = Annotated[
    float,
    Field(gt=0.0),
    Setting("sapo: temperature elsewhere (verl actor.tau_neg, TRL sapo_temperature_neg)."),
]
ClipCovRatio = Annotated[
    float,
    Field(gt=0.0, le=1.0),
    Setting("clip_cov: part of all tokens taken out of the gradient (verl actor.policy_loss.clip_cov_ratio)."),
]
ClipCovLow = Annotated[
    float, Setting("clip_cov: covariance from which a token may be taken (verl actor.policy_loss.clip_cov_lb).")
]
ClipCovHigh = Annotated[
    float, Setting("clip_cov: covariance up to which one may (verl actor.policy_loss.clip_cov_ub).")
]
KLCovRatio = Annotated[
    float,
    Field(gt=0.0, le=1.0),
    Setting("kl_cov: part of all tokens that gets the penalty (verl actor.policy_loss.kl_cov_ratio)."),
]
PPOKLCoef = Annotated[
    float, Field(ge=0.0), Setting("kl_cov: weight of the penalty (verl actor.policy_loss.ppo_kl_coef).")
]


@dataclass(frozen=True)
class LossMethod(Method):
    """Registered policy loss.

    aggregation: the only mode of `aggregation.MODES` that fits its definition; None for any.
    """

    aggregation: str | None = None


POLICY_LOSSES: Methods[LossMethod] = Methods("policy loss", LossMethod)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its options bound.

    losses: see the module. select: (log_probs, advantages, seed) -> float32[R] per row, 1 on chosen tokens, on the
        host; None where the loss takes no `selected`. aggregation: see `LossMethod`.
    """

    name: str
    losses: Callable
    select: Callable | None
    aggregation: str | None


def policy_loss(name: str, options: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the policy loss called `name`, with defaults for missing options.

    Raises UserError for an unknown name, an option the method does not take, or a value that does not fit.
    """
    method = POLICY_LOSSES.find(name)
    made = method.function(**method.checked(options))
    losses, select = made if isinstance(made, tuple) else (made, None)
    return PolicyLoss(name, losses, select, method.aggregation)


@POLICY_LOSSES.register()
def clip(
    *,
    epsilon_low: EpsilonLow = 0.2,
    epsilon_high: EpsilonHigh = 0.2,
    dual_clip: DualClip = None,
    delta: Delta = None,
    level: Level = "token",
):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds.

    The separate bounds are DAPO's (arXiv 2503.14476).

    epsilon_low, epsilon_high: the ratio is clipped to [1 - epsilon_low, 1 + epsilon_high].
    dual_clip: c > 1 bounds the loss of a negative advantage by -c * A (arXiv 1912.09729); None is off. verl's
        vanilla loss always has it, with c = 3.
    delta: caps the ratio itself, so also where the advantage is negative (INTELLECT-2, arXiv 2505.07291; TRL's
        `delta`); give it above 1 + epsilon_high; None is off.
    level: "token", or "sequence" for the ratio of GSPO.
    Metrics: clip_fraction (the clip acts), its parts clip_fraction_low and clip_fraction_high, policy_kl (old - now, in
    nats), and dual_clip_fraction with `dual_clip`.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import as_float, masked_log_ratio, ratio_of

    def losses(log_probs, old_log_probs, advantages, mask):
        valid = mask > 0
        advantages = ops.where(valid, advantages, 0.0)
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        ratio = ratio_of(log_probs, log_ratio, mask, level)
        if delta is not None:
            ratio = ops.clamp(ratio, None, delta)
        unclipped = -advantages * ratio
        clipped = -advantages * ops.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
        losses = ops.maximum(unclipped, clipped)
        acts = clipped > unclipped
        metrics = {
            "clip_fraction": as_float(acts, mask),
            "clip_fraction_low": as_float(ops.logical_and(acts, advantages < 0), mask),
            "clip_fraction_high": as_float(ops.logical_and(acts, advantages > 0), mask),
            "policy_kl": -log_ratio,
        }
        if dual_clip is not None:
            negative = advantages < 0
            bound = -advantages * dual_clip
            metrics["dual_clip_fraction"] = as_float(ops.logical_and(negative, losses > bound), mask)
            losses = ops.where(negative, ops.minimum(losses, bound), losses)
        return ops.where(valid, losses, 0.0), metrics

    return losses


@POLICY_LOSSES.register(aggregation="seq-mean-token-mean")
def gspo(*, epsilon_low: EpsilonLow = 3e-4, epsilon_high: EpsilonHigh = 4e-4):
    """GSPO: `clip` with the row's length-normalised ratio (arXiv 2507.18071).

    This is the paper's token form, which has the same value and gradient. The bounds are the paper's; they are
    tighter than PPO's because the ratio is a mean.

    Belongs to aggregation seq-mean-token-mean. Metrics as `clip`.
    """
    return clip(epsilon_low=epsilon_low, epsilon_high=epsilon_high, level="sequence")


@POLICY_LOSSES.register()
def cispo(
    *, epsilon_low: EpsilonLow = 1.0, epsilon_high: EpsilonHigh = 2.0, cap: Cap = "relative", level: Level = "token"
):
    """CISPO: -sg(clipped ratio) * A * log p (MiniMax-M1, arXiv 2506.13585).

    Only a token's weight is clipped, so that every token keeps a gradient.

    cap: "relative" clips the ratio to [1 - epsilon_low, 1 + epsilon_high] (MiniMax-M1, verl); "absolute" to at most
        epsilon_high, without a lower bound (ScaleRL, arXiv 2510.13786; TRL; 5.0 there), and epsilon_low is not used.
    level: "token", or "sequence" for the ratio of GSPO.
    Metrics: clip_fraction (the weight is clipped), policy_kl.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import as_float, masked_log_ratio, ratio_of

    def losses(log_probs, old_log_probs, advantages, mask):
        valid = mask > 0
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        ratio = ratio_of(log_probs, log_ratio, mask, level)
        if cap == "relative":
            weight = ops.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
        else:
            weight = ops.clamp(ratio, None, epsilon_high)
        losses = -ops.stop_gradient(weight) * ops.where(valid, advantages, 0.0) * ops.where(valid, log_probs, 0.0)
        return losses, {"clip_fraction": as_float(weight != ratio, mask), "policy_kl": -log_ratio}

    return losses


@POLICY_LOSSES.register(aggregation="seq-mean-token-mean")
def sapo(*, tau_positive: TauPositive = 1.0, tau_negative: TauNegative = 1.05, level: Level = "token"):
    """SAPO: a soft gate in place of the clip (arXiv 2511.20347).

    The loss is -A * sigmoid(tau * (ratio - 1)) * 4 / tau.
    tau_positive where A > 0, tau_negative elsewhere. level: "token", or "sequence" for the ratio of GSPO.
    Belongs to aggregation seq-mean-token-mean. Metrics: policy_kl.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import masked_log_ratio, ratio_of

    def losses(log_probs, old_log_probs, advantages, mask):
        advantages = ops.where(mask > 0, advantages, 0.0)
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        ratio = ratio_of(log_probs, log_ratio, mask, level)
        tau = ops.where(advantages > 0, tau_positive, tau_negative)
        return -advantages * ops.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, {"policy_kl": -log_ratio}

    return losses


@POLICY_LOSSES.register(aggregation="seq-mean-token-mean")
def geo_mean(*, epsilon_low: EpsilonLow = 0.4, epsilon_high: EpsilonHigh = 0.4):
    """GMPO: -A * geometric mean of the row's clipped token ratios (arXiv 2507.20673).

    epsilon_low, epsilon_high: bounds of the log-ratio, [-epsilon_low, epsilon_high], one-sided by the sign of A.
    The row's one loss (with the row's mean advantage) stands at each of its tokens.
    Belongs to aggregation seq-mean-token-mean; verl takes the mean over all rows, empty ones included.
    Metrics: clip_fraction (the clip acts; verl also counts tokens that leave the range on the side where it does not),
    its parts clip_fraction_low and clip_fraction_high, policy_kl.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import as_float, masked_log_ratio

    def losses(log_probs, old_log_probs, advantages, mask):
        valid = mask > 0
        advantages = ops.where(valid, advantages, 0.0)
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        limited = ops.clamp(log_ratio, -epsilon_low, epsilon_high)
        too_high = ops.logical_and(advantages > 0, log_ratio > limited)
        too_low = ops.logical_and(advantages < 0, log_ratio < limited)
        acts = ops.logical_or(too_high, too_low)
        lengths = ops.clamp(mask.sum(-1, keepdims=True), 1.0)
        ratio = ops.exp((ops.where(acts, limited, log_ratio) * mask).sum(-1, keepdims=True) / lengths)
        losses = -((advantages * mask).sum(-1, keepdims=True) / lengths) * ratio
        metrics = {
            "clip_fraction": as_float(acts, mask),
            "clip_fraction_low": as_float(too_low, mask),
            "clip_fraction_high": as_float(too_high, mask),
            "policy_kl": -log_ratio,
        }
        return ops.where(valid, losses, 0.0), metrics

    return losses


@POLICY_LOSSES.register()
def gpg():
    """REINFORCE, -A * log p, without ratio and clip (GPG, arXiv 2504.02546).

    Metrics: policy_kl.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import masked_log_ratio

    def losses(log_probs, old_log_probs, advantages, mask):
        valid = mask > 0
        losses = -ops.where(valid, advantages, 0.0) * ops.where(valid, log_probs, 0.0)
        return losses, {"policy_kl": -masked_log_ratio(log_probs, old_log_probs, mask)}

    return losses


@POLICY_LOSSES.register()
def clip_cov(
    *,
    epsilon_low: EpsilonLow = 0.2,
    epsilon_high: EpsilonHigh = 0.2,
    clip_cov_ratio: ClipCovRatio = 0.0002,
    clip_cov_lb: ClipCovLow = 1.0,
    clip_cov_ub: ClipCovHigh = 5.0,
):
    """Clip-Cov: `clip` without the gradient of some high-covariance tokens (arXiv 2505.22617).

    selected: float32[B, T], 1 on the tokens that `covariance.select_clip_cov` drew from the whole update batch. A
    selected token that the clip already holds keeps its (constant) loss, as in verl. Metrics as `clip`, and
    selected_fraction.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import as_float

    clipped = clip(epsilon_low=epsilon_low, epsilon_high=epsilon_high)

    def losses(log_probs, old_log_probs, advantages, mask, selected):
        losses, metrics = clipped(log_probs, old_log_probs, advantages, mask)
        dropped = ops.logical_and(selected > 0, metrics["clip_fraction"] == 0)
        metrics["selected_fraction"] = as_float(dropped, mask)
        return ops.where(dropped, 0.0, losses), metrics

    select = partial(select_clip_cov, ratio=clip_cov_ratio, low=clip_cov_lb, high=clip_cov_ub)
    return losses, select


@POLICY_LOSSES.register()
def kl_cov(*, kl_cov_ratio: KLCovRatio = 0.0002, ppo_kl_coef: PPOKLCoef = 1.0):
    """KL-Cov: a KL penalty on high-covariance tokens in place of the clip (arXiv 2505.22617).

    The loss is -A * ratio, plus ppo_kl_coef * |log-ratio| on selected tokens.

    selected: float32[B, T], 1 on the tokens that `covariance.select_kl_cov` chose from the whole update batch.
    Metrics: selected_fraction, policy_kl.
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import as_float, masked_log_ratio

    def losses(log_probs, old_log_probs, advantages, mask, selected):
        advantages = ops.where(mask > 0, advantages, 0.0)
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        penalty = ops.where(selected > 0, ops.abs(log_ratio), 0.0)
        losses = -advantages * ops.exp(log_ratio) + ppo_kl_coef * penalty
        return losses, {"selected_fraction": as_float(selected > 0, mask), "policy_kl": -log_ratio}

    return losses, partial(select_kl_cov, ratio=kl_cov_ratio)
