"""Per-token objectives: closures over the pure functions of `algorithms`, for compiled graphs."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, ops

from mindrlhf.algorithms.kl import kl_estimator
from mindrlhf.algorithms.log_ratio import masked_log_ratio, row_mean
from mindrlhf.algorithms.losses import Level, PolicyLoss
from mindrlhf.algorithms.value_loss import clipped_value_loss
from mindrlhf.models.layer import Side
from mindrlhf.token_arrays import CURRENT_POLICY, TOKEN_ARRAYS


@dataclass(frozen=True)
class Objective:
    """Loss as a sum over tokens of `weights * losses`, for `training.graphs.Loss`.

    fields: names in `token_arrays` of further inputs [B, R] after outputs and mask.
    losses: (outputs, mask, *fields in their order) -> (losses [B, R], {metric name: values [B, R]}); outputs is the
        tuple that the head gives.
    terms: (name, coefficient) of side outputs float32[] of layers or the head. Their weighted sum is added to the loss
        of every token.
    """

    fields: tuple[str, ...]
    losses: Callable
    terms: tuple[tuple[str, float], ...] = ()

    @functools.cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, in the order of `losses`, found by running one token."""
        one = Tensor(np.ones((1, 1), np.float32))
        fields = (Tensor(np.ones((1, 1), TOKEN_ARRAYS[name].dtype)) for name in self.fields)
        return tuple(self.losses((one, one), one, *fields)[1])

    def terms_of(self, sides: Mapping[Side, np.ndarray]) -> dict[str, float]:
        """Compute each term by name: its coefficient times the sum of some side outputs."""
        sums = {term: sum(float(array) for (_, name), array in sides.items() if name == term) for term, _ in self.terms}
        return {name: coefficient * sums[name] for name, coefficient in self.terms}


def policy_objective(
    loss: PolicyLoss,
    *,
    on_policy: bool,
    kl: str | None = None,
    beta: float | None = None,
    kl_ratio: Level | None = None,
    correction: Callable | None = None,
    entropy_coef: float = 0.0,
) -> Objective:
    """Make the policy's objective: loss with importance weights, KL and entropy terms.

    It is correction * policy_loss(now, old) + beta * KL(now || reference) - entropy_coef * entropy.

    on_policy: the batch is used for one update, so that the old policy is the one being updated: its log-probs are the
        current ones, without gradient. Tokens with CURRENT_POLICY in the field `old_log_probs` use them too. (Those of
        another graph differ in their last digits, and the sign of that difference would be kl_cov's gradient.)
    kl: an estimator of `algorithms.kl`, None for no KL term. beta: its weight; None uses the field `kl_coefficients`.
    kl_ratio: level of the ratio now / old that multiplies it, gradient included (arXiv 2512.02556), or None.
    correction: importance weights for the rollout's distribution (`algorithms.rollout_correction`), or None.
    entropy_coef: if it is not 0, the head has to give the entropy a gradient.
    """
    policy_loss = loss.losses
    wanted = {
        "advantages": True,
        "old_log_probs": not on_policy,
        "selected": loss.select is not None,
        "behaviour_log_probs": correction is not None,
        "reference_log_probs": kl is not None,
        "kl_coefficients": kl is not None and beta is None,
    }
    fields = tuple(name for name, is_wanted in wanted.items() if is_wanted)
    # Indices into `given`, -1 for a field that is not used: graphs do not support dictionaries of tensors.
    old_at, selected_at, rollout_at, reference_at, coefficient_at = (
        fields.index(name) if wanted[name] else -1 for name in list(wanted)[1:]
    )
    kl_term = _kl_term(kl, kl_ratio) if kl else None

    def losses(outputs, mask, *given):
        log_probs, entropy = outputs
        old = ops.stop_gradient(log_probs)
        if old_at >= 0:
            old = ops.where(given[old_at] > 0.5 * CURRENT_POLICY, old, given[old_at])
        if selected_at >= 0:
            total, metrics = policy_loss(log_probs, old, given[0], mask, given[selected_at])
        else:
            total, metrics = policy_loss(log_probs, old, given[0], mask)
        if rollout_at >= 0:
            weights, metrics["importance_weight_outside"] = correction(old, given[rollout_at], mask)
            total = total * weights
        metrics["pg_loss"] = total
        metrics["entropy"] = ops.where(mask > 0, entropy, 0.0)
        if reference_at >= 0:
            metrics["kl"] = kl_term(log_probs, old, given[reference_at], mask)
            total = total + (given[coefficient_at] if coefficient_at >= 0 else beta) * metrics["kl"]
        if entropy_coef > 0:
            total = total - entropy_coef * metrics["entropy"]
        return total, metrics

    return Objective(fields, losses)


def _kl_term(name: str, level: Level | None) -> Callable:
    """Make the KL term.

    It is an estimate, times the ratio now / old if it has a level.
    """
    estimate = kl_estimator(name)

    def term(log_probs, old_log_probs, reference, mask):
        kl = estimate(log_probs, reference, mask)
        if level is None:
            return kl
        log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
        return kl * ops.exp(row_mean(log_ratio, mask) if level == "sequence" else log_ratio)

    return term


def value_objective(value_clip: float | None) -> Objective:
    """Make the critic's clipped squared error; see `algorithms.value_loss`."""

    def losses(outputs, mask, old_values, returns):
        return clipped_value_loss(outputs[0], old_values, returns, mask, value_clip=value_clip)

    return Objective(("values", "returns"), losses)


def _negative_log_likelihood(outputs, mask):
    log_probs, entropy = outputs
    return ops.where(mask > 0, -log_probs, 0.0), {"entropy": entropy}


# Supervised: -log p(target).
NEGATIVE_LOG_LIKELIHOOD = Objective((), _negative_log_likelihood)
