"""Stored figures of the float64 answers.

Answers computed on another machine have to equal them.

`python -m mindrlhf.acceptance.make_answers` writes them. Of each answer there are two numbers: its norm, and its
product with random numbers.
"""

import json
from collections.abc import Iterator, Mapping
from importlib import resources

import numpy as np

from mindrlhf.acceptance.checks import Check, Finding, Trial
from mindrlhf.acceptance.float64 import Node, gradients
from mindrlhf.acceptance.grpo64 import trained_weights
from mindrlhf.acceptance.inputs import groups_of, numbers, rows_of, tiny_models, tiny_rows, tiny_weights
from mindrlhf.acceptance.record import ADAM, BETA, first_weights, recorded_steps, run_config
from mindrlhf.acceptance.reference import Reference

FIGURES = "figures.json"
TOLERANCE = 1e-9


def figures_of(name: str, answer: np.ndarray) -> tuple[float, float]:
    """Compute the norm of an array, and its mean product with random numbers."""
    drawn = numbers(f"{name} figure", answer.size)
    return float(np.linalg.norm(answer)), float(answer.ravel() @ drawn / np.sqrt(answer.size))


def answers() -> Iterator[tuple[str, np.ndarray]]:
    """Compute answers by name.

    They are logits and gradients of each tiny model, and the weights after the record's steps.
    """
    for family, config in tiny_models().items():
        weights = tiny_weights(config, family)
        model = Reference(config, weights)
        yield f"{family} logits", model.logits(tiny_rows(family, config.vocab_size)).value
        parts = [
            model.log_probs(rows_of(group.prompt_ids, response), response).sum()
            for group in groups_of(family, config.vocab_size)
            for response in group.responses
        ]
        slopes = gradients(sum(parts, Node(0.0)), 1.0, [model[name] for name in weights])
        for name, slope in zip(weights, slopes, strict=True):
            yield f"{family} gradient of {name}", slope
    config = run_config()
    for name, weight in trained_weights(config, first_weights(), recorded_steps(), ADAM, BETA).items():
        yield f"{name} after the record", weight


def stored_figures() -> Mapping[str, tuple[float, float]]:
    text = (resources.files(__package__) / "answers" / FIGURES).read_text("utf-8")
    return {name: (norm, product) for name, (norm, product) in json.loads(text).items()}


def check_figures(trial: Trial) -> Iterator[Finding]:
    """Check that this machine's float64 answers are the stored ones."""
    stored = stored_figures()
    missing = set(stored)
    for name, answer in answers():
        missing.discard(name)
        if name not in stored:
            yield Finding(name, float("nan"), TOLERANCE, "it has no stored figures")
            continue
        found = np.array(figures_of(name, answer))
        error = np.abs(found - stored[name]).max() / max(abs(stored[name][0]), 1e-300)
        yield Finding(name, float(error), TOLERANCE)
    for name in sorted(missing):
        yield Finding(name, float("nan"), TOLERANCE, "it is stored, and nothing computes it")


def answer_checks() -> Iterator[Check]:
    """List the check of the answers themselves."""
    yield Check("float64 answers", "operators", check_figures)
