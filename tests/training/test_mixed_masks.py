"""Loss and gradient of conversations, whose context is attended to and never trained on, against NumPy in float64."""

from dataclasses import replace

import numpy as np
import pytest
from slow_cases import few_of
from small_model import SmallModel, log_softmax
from small_updater import BETA, LENGTHS, TEMPERATURE, Subject, clip_and_kl, random_groups, rows_like

from mindrlhf.algorithms.aggregation import batch_totals, token_weights

ENTROPY, EPS = 0.05, 1e-5
CLIP = 0.2


def turns(length: int, rng) -> np.ndarray:
    """bool[length]: runs of drawn and of given tokens in turn; some responses have only given ones."""
    runs = rng.integers(1, 4, length)
    return np.repeat(np.arange(length) % 2 == rng.integers(2), runs)[:length]


class Conversations:
    """An update off policy with a reference model; nothing finite stands on the context."""

    def __init__(self, model: SmallModel, aggregation: str):
        rng = np.random.default_rng(7)
        self.model = model
        plain = random_groups(4)
        self.masks = [tuple(turns(len(row), rng) for row in group.responses) for group in plain]
        self.groups = [replace(group, sampled=of) for group, of in zip(plain, self.masks, strict=True)]
        totals = batch_totals([mask.sum() for masks in self.masks for mask in masks])
        weights = [tuple(token_weights(mask[None], aggregation, totals)[0] for mask in masks) for masks in self.masks]
        exact = [tuple(model.log_probs(g.prompt_ids, r, TEMPERATURE) for r in g.responses) for g in plain]
        old, reference = (
            [tuple(row + rng.normal(size=len(row)) * spread for row in rows) for rows in exact] for spread in (0.2, 0.3)
        )
        rows = {
            "advantages": rows_like(plain, lambda n: np.full(n, rng.normal())),
            "old_log_probs": old,
            "reference_log_probs": reference,
        }
        self.rows = {"weights": weights} | {
            name: [tuple(map(on_context, *pair)) for pair in zip(values, self.masks, strict=True)]
            for name, values in rows.items()
        }

    def loss(self, arrays) -> float:
        """Of the drawn tokens: PPO's clipped loss, BETA times k3, and a bonus for entropy."""
        total = 0.0
        for place, (group, masks) in enumerate(zip(self.groups, self.masks, strict=True)):
            for sample, (response, mask) in enumerate(zip(group.responses, masks, strict=True)):
                ids = np.concatenate([group.prompt_ids, response])[:-1]
                logits = self.model.logits(ids, arrays)[len(group.prompt_ids) - 1 :]
                every = log_softmax(logits / TEMPERATURE)[mask]
                log_probs = every[np.arange(mask.sum()), response[mask]]
                weights, advantages, old, reference = (rows[place][sample][mask] for rows in self.rows.values())
                ratio = np.exp(log_probs - old)
                policy = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 1 - CLIP, 1 + CLIP))
                k3 = np.exp(reference - log_probs) - 1 - (reference - log_probs)
                entropy = -(np.exp(every) * every).sum(-1)
                total += (weights * (policy + BETA * k3 - ENTROPY * entropy)).sum()
        return total


def on_context(row, mask):
    return np.where(mask, row, np.nan)


@pytest.fixture(scope="module")
def model():
    return SmallModel.random(6, num_layers=1)


@pytest.mark.parametrize("aggregation", few_of(["seq-mean-token-mean"], ["token-mean"]))
def test_loss_and_gradient_are_those_of_the_drawn_tokens(model, aggregation):
    given = Conversations(model, aggregation)
    counts = [mask.sum() for masks in given.masks for mask in masks]
    lengths = [length for _, responses in LENGTHS for length in responses]
    assert 0 in counts
    assert 0 < sum(counts) < sum(lengths) - 10
    subject = Subject(model, clip_and_kl(entropy_coef=ENTROPY), TEMPERATURE, entropy_gradient=True)
    update = subject.updater(given.groups, 0.0, **given.rows)
    np.testing.assert_allclose(update.loss, given.loss({}), rtol=1e-5, atol=1e-6)
    rng = np.random.default_rng(2)
    for name, gradient in subject.gradients.items():
        size = np.linalg.norm(gradient)
        other = rng.normal(size=gradient.shape)
        # Along the gradient itself, where its size shows, and across.
        direction = gradient.astype(np.float64) / size + other / np.linalg.norm(other)
        step = EPS * direction
        ahead, behind = (given.loss({name: model.arrays[name].astype(np.float64) + d}) for d in (step, -step))
        expected = (ahead - behind) / (2 * EPS)
        np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=0, atol=1e-5 * size, err_msg=name)
