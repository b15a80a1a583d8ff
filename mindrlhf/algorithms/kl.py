"""Per-token estimators of KL(policy || reference), for use in compiled graphs.

Tokens are drawn from the policy. With r = log(policy / reference), clamped to +-20 (J. Schulman, "Approximating KL
divergence", 2020):

    k1 = r                    unbiased, may be negative; its expected gradient as a loss is 0
    abs = |r|
    k2 = r**2 / 2             its gradient as a loss is the unbiased gradient of the reverse KL
    k3 = exp(-r) - 1 + r      unbiased, never negative; what GRPO (arXiv 2402.03300, eq. 4) adds to the loss
    low_var_kl                k3 with the result clamped to +-10, as verl publishes it, there also called k3

A name that ends in `+` (`k3+`) has the value of that estimator and the gradient of k2 (straight-through).
"""

from collections.abc import Callable

from mindspore import ops

from mindrlhf.algorithms.kl_names import KL_ESTIMATORS, check_kl_estimator
from mindrlhf.algorithms.log_ratio import masked_log_ratio

LOW_VAR_KL_LIMIT = 10.0


def _k1(log_ratio):
    return log_ratio


def _k2(log_ratio):
    return 0.5 * log_ratio * log_ratio


def _k3(log_ratio):
    return ops.expm1(-log_ratio) + log_ratio


def _low_var_kl(log_ratio):
    return ops.clamp(_k3(log_ratio), -LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


ESTIMATORS = dict(zip(KL_ESTIMATORS, (_k1, ops.abs, _k2, _k3, _low_var_kl), strict=True))


def kl_estimator(name: str) -> Callable:
    """Return the estimator called `name`; call it before a graph is compiled.

    The result is a function (log_probs, reference_log_probs, mask), each float32[B, T], -> float32[B, T] in nats, 0 on
    padding, whatever it holds. Raises UserError for an unknown name.
    """
    plain = check_kl_estimator(name)
    straight_through = plain != name
    estimate = ESTIMATORS[plain]

    def kl(log_probs, reference_log_probs, mask):
        log_ratio = masked_log_ratio(log_probs, reference_log_probs, mask)
        if not straight_through:
            return estimate(log_ratio)
        gradient_form = _k2(log_ratio)
        # The bracket is exactly 0, so the value keeps every bit of the estimator.
        return ops.stop_gradient(estimate(log_ratio)) + (gradient_form - ops.stop_gradient(gradient_form))

    return kl


def steered_coefficient(coefficient: float, kl: float, samples: int, target: float, horizon: int) -> float:
    """Adapt a KL coefficient to a step's mean KL (Ziegler et al. 2019).

    kl, target: in nats. samples: number of sequences over all ranks. horizon: in samples; an update on n samples
    changes the coefficient by at most 0.2 * n / horizon of itself.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)
