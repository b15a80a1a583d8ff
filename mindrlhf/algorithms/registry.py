"""The compiled parts of the algorithm by name, options bound: policy losses and the correction for the rollout.

Names are known without MindSpore, which is imported when a function is asked for. Advantages have their own registry
(`advantages.compute_advantages`), as have KL estimators (`kl.kl_estimator`) and aggregations (`aggregation.MODES`).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindrlhf.algorithms import covariance
from mindrlhf.algorithms.names import checked_options, options_of, unknown_name


@dataclass(frozen=True)
class LossTraits:
    """What the trainer has to know of a loss besides its formula.

    aggregation: the one mode of `aggregation.MODES` that the method is defined with, or None for a free choice.
    select: chooses tokens on the host, and the loss takes the result as its fifth tensor; or None.
    """

    aggregation: str | None = None
    select: Callable | None = None


# Each name is the function of that name in losses.py.
POLICY_LOSSES: dict[str, LossTraits] = {
    "clip": LossTraits(),
    "gspo": LossTraits(aggregation="seq-mean-token-mean"),
    "cispo": LossTraits(),
    "sapo": LossTraits(aggregation="seq-mean-token-mean"),
    "geo_mean": LossTraits(aggregation="seq-mean-token-mean"),
    "gpg": LossTraits(),
    "clip_cov": LossTraits(select=covariance.select_clip_cov),
    "kl_cov": LossTraits(select=covariance.select_kl_cov),
}


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its options bound.

    losses: (log_probs, old_log_probs, advantages, mask[, selected]) -> (float32[B, T], metrics), for a compiled graph;
        see losses.py. It takes the fifth tensor exactly where `select` is given.
    select: (log_probs, advantages, seed) -> float32[R] per row, 1 on chosen tokens; see covariance.py; or None.
    aggregation: the mode the method is defined with, or None.
    """

    name: str
    losses: Callable
    select: Callable | None
    aggregation: str | None


def _bound(function: Callable, options: Mapping[str, object]) -> Callable:
    """`function` with those of the options that it takes, in a closure: graphs lose gradients through `partial`."""
    own = {key: value for key, value in options.items() if key in options_of(function)}

    def bound(*arguments):
        return function(*arguments, **own)

    return bound


def policy_loss(name: str, options: Mapping[str, object] | None = None) -> PolicyLoss:
    """The policy loss called `name`; options that are not given keep the method's defaults.

    Raises UserError for an unknown name, an option the method does not take, or a value that does not fit.
    """
    if name not in POLICY_LOSSES:
        raise unknown_name("policy loss", name, POLICY_LOSSES)
    traits = POLICY_LOSSES[name]
    function = getattr(importlib.import_module("mindrlhf.algorithms.losses"), name)
    functions = (function, traits.select) if traits.select else (function,)
    checked = checked_options(f"policy loss {name}", functions, options)
    select = _bound(traits.select, checked) if traits.select else None
    return PolicyLoss(name, _bound(function, checked), select, traits.aggregation)


def options_of_loss(name: str) -> set[str]:
    """Names of the options of a known loss, those of its choice of tokens included. Imports MindSpore."""
    select = POLICY_LOSSES[name].select
    function = getattr(importlib.import_module("mindrlhf.algorithms.losses"), name)
    return {*options_of(function), *(options_of(select) if select else ())}


def rollout_correction(options: Mapping[str, object] | None = None) -> Callable:
    """`rollout_correction.importance_weights` with its options bound: (log_probs, rollout_log_probs, mask) ->
    (float32[B, T] weights, metrics). Raises UserError for an unknown option or a value that does not fit."""
    function = importlib.import_module("mindrlhf.algorithms.rollout_correction").importance_weights
    return _bound(function, checked_options("the rollout correction", (function,), options))
