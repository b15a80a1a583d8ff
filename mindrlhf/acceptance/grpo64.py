"""GRPO's updates in float64: advantages, loss with a KL term, clipping, AdamW."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.acceptance.float64 import Node, exp, gradients, stopped
from mindrlhf.acceptance.inputs import rows_of
from mindrlhf.acceptance.reference import Reference
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import parameter_table

ADVANTAGE_EPSILON = 1e-6


@dataclass(frozen=True)
class ScoredGroup:
    """Prompt int[P] with G responses int[R] and their rewards float64[G]."""

    prompt: np.ndarray
    responses: Sequence[np.ndarray]
    rewards: np.ndarray

    @property
    def advantages(self) -> np.ndarray:
        """Compute (r - mean) / (std + eps) with the unbiased std.

        arXiv:2402.03300, section 4.1.2.
        """
        return (self.rewards - self.rewards.mean()) / (self.rewards.std(ddof=1) + ADVANTAGE_EPSILON)


@dataclass(frozen=True)
class AdamSettings:
    """Settings of AdamW with clipping of the global norm.

    Loshchilov & Hutter 2019, algorithm 2.
    """

    rate: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    max_norm: float

    def apply(
        self,
        slopes: Mapping[str, np.ndarray],
        moments: dict[str, tuple[np.ndarray, np.ndarray]],
        weights: dict[str, np.ndarray],
        decays: Mapping[str, bool],
        update: int,
    ) -> None:
        """Update moments and weights in place; update: 1 for the first."""
        norm = np.sqrt(sum((slope**2).sum() for slope in slopes.values()))
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        for name, slope in slopes.items():
            clipped = slope * scale
            first, second = moments.get(name, (np.zeros(slope.shape), np.zeros(slope.shape)))
            first = self.beta1 * first + (1 - self.beta1) * clipped
            second = self.beta2 * second + (1 - self.beta2) * clipped**2
            moments[name] = (first, second)
            step = first / (1 - self.beta1**update) / (np.sqrt(second / (1 - self.beta2**update)) + self.eps)
            weights[name] = weights[name] - self.rate * (step + self.decay * decays[name] * weights[name])


def trained_weights(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    steps: Iterable[Sequence[ScoredGroup]],
    adam: AdamSettings,
    beta: float,
) -> dict[str, np.ndarray]:
    """Compute the weights after steps of one update each.

    The loss is the mean over responses of the mean over their tokens of -advantage * ratio + beta * KL. The ratio is to
    the policy that begins the step, the KL is the estimator k3 to the first weights (arXiv:2402.03300, eq. 4).
    """
    first = Reference(config, weights)
    current = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    specs = [spec for spec in parameter_table(config) if spec.trains]
    decays = {spec.name: spec.decays for spec in specs}
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for update, groups in enumerate(steps, start=1):
        model = Reference(config, current)
        loss = _loss(model, first, groups, beta)
        slopes = gradients(loss, 1.0, [model[spec.name] for spec in specs])
        adam.apply(dict(zip(decays, slopes, strict=True)), moments, current, decays, update)
    return current


def _loss(model: Reference, first: Reference, groups: Sequence[ScoredGroup], beta: float) -> Node:
    count = sum(len(group.responses) for group in groups)
    total = Node(0.0)
    for group in groups:
        for response, advantage in zip(group.responses, group.advantages, strict=True):
            rows = rows_of(group.prompt, response)
            now = model.log_probs(rows, response)
            ratio = exp(now - stopped(now))
            away = stopped(first.log_probs(rows, response)) - now
            kl = exp(away) - away - 1.0
            total = total + (ratio * -advantage + kl * beta).sum() * (1.0 / len(response) / count)
    return total
