"""Checks of a tiny model of each family.

Rows after each half, an update, and generation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from mindspore import Parameter, nn

from mindrlhf import backend
from mindrlhf.acceptance.checks import TOLERANCES, Check, Finding, Trial, compared, tolerance_of
from mindrlhf.acceptance.float64 import Node, gradients, log_softmax
from mindrlhf.acceptance.graphs import Once, arrays_of, tensors
from mindrlhf.acceptance.grpo64 import AdamSettings
from mindrlhf.acceptance.inputs import batch_arrays, groups_of, rows_of, tiny_models, tiny_rows, tiny_weights
from mindrlhf.acceptance.layers import TEMPERATURE, open_decoder
from mindrlhf.acceptance.reference import Reference, Rows
from mindrlhf.configs.grpo import OptimizerSettings, SamplingSettings, TrainSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.halves import ALL_ROWS
from mindrlhf.models.parameters import parameter_table
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.updater import Updater
from mindrlhf.types import Prompt

# A large epsilon, so that updates are nearly proportional to gradients, and a rate at which float32 holds the change.
OPTIMIZER = OptimizerSettings(lr=1.0, eps=1e-1, weight_decay=0.1, max_grad_norm=1.0)
BUCKET = 8
SEED, STEP, NEW, SLOTS, TOP_K = 5, 2, 8, 4, 20


class _Halves(nn.Cell):
    """Rows after the embedding and after each half, and the logits of the completions."""

    def __init__(self, decoder: Decoder, rows: Rows):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.layers = decoder.layers
        self.split = rows.split
        self.before = rows.split[0] * rows.split[1]

    def construct(self, *inputs):
        given = self.decoder.layer_inputs(inputs, self.split)
        x = self.decoder.tokens(inputs)
        found = (x,)
        for layer in self.layers:
            x = layer.attention(x, given, self.split, ALL_ROWS)[0]
            found += (x,)
            x = layer.feed_forward(x, given, self.split, ALL_ROWS)[0]
            found += (x,)
        hidden = self.decoder.final_norm(x[self.before :])
        return (*found, self.decoder.logits(hidden))


def check_rows(family: str, dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check the rows after each half, and the logits.

    The first half that differs has a note.
    """
    config = tiny_models()[family]
    weights = tiny_weights(config, family)
    rows = tiny_rows(family, config.vocab_size)
    decoder, _ = open_decoder(config, weights, dtype, trial)
    graph = Once(_Halves(decoder, rows))
    found = arrays_of(graph(*tensors(*batch_arrays(rows))))
    model = Reference(config, weights)
    answers = {name: node.value for name, node in model.halves(rows).items()}
    tolerance = TOLERANCES[dtype]["model"]
    first = ""
    real = rows.real
    for (name, answer), own in zip(answers.items(), found, strict=False):
        finding = compared(f"rows after {name}", own[real], answer[real], tolerance)
        if not finding.passed and not first:
            first = name
            finding = Finding(
                finding.part, finding.error, tolerance, f"the first that differs; {finding.note}".strip("; ")
            )
        yield finding
    kept = real[rows.split[0] * rows.split[1] :]
    yield compared("logits", found[-1][kept], model.logits(rows).value[kept], tolerance)


class Pass(NamedTuple):
    """Log-probs of tokens, their mean negative, and its gradients by parameter."""

    log_probs: np.ndarray
    loss: np.ndarray
    gradients: dict[str, np.ndarray]


def exact_pass(config: ModelConfig, weights: Mapping[str, np.ndarray], groups: Sequence[SequenceGroup]) -> Pass:
    """Compute the pass of the responses in float64."""
    model = Reference(config, weights)
    log_probs = [
        model.log_probs(rows_of(group.prompt_ids, response), response, TEMPERATURE)
        for group in groups
        for response in group.responses
    ]
    tokens = sum(one.value.size for one in log_probs)
    loss = sum((-one.sum() * (1.0 / tokens) for one in log_probs), Node(0.0))
    names = [spec.name for spec in parameter_table(config) if spec.trains]
    slopes = gradients(loss, 1.0, [model[name] for name in names])
    return Pass(
        np.concatenate([one.value for one in log_probs]), np.array(loss.value), dict(zip(names, slopes, strict=True))
    )


def own_update(
    config: ModelConfig, weights: Mapping[str, np.ndarray], groups: Sequence[SequenceGroup], dtype: str, trial: Trial
) -> tuple[Pass, Mapping[str, Parameter]]:
    """Update through the graphs of training.

    Returns the pass, and the parameters behind the update.
    """
    specs = [spec for spec in parameter_table(config) if spec.trains]
    decoder, parameters = open_decoder(config, weights, dtype, trial)
    optimizer = AdamW(OPTIMIZER, [parameters[spec.name] for spec in specs], specs, operators=decoder.operators)
    found: dict[str, np.ndarray] = {}

    def keep() -> None:
        pairs = zip(optimizer.parameters, optimizer.gradients, strict=True)
        found.update((one.name, np.array(backend.read(buffer))) for one, buffer in pairs)

    head = PolicyLogProbs(decoder, TEMPERATURE)
    updater = Updater(head, NEGATIVE_LOG_LIKELIHOOD, optimizer, TrainSettings(length_bucket=BUCKET), keep)
    tokens = sum(len(response) for group in groups for response in group.responses)
    share = [tuple(np.full(len(one), 1 / tokens, np.float32) for one in group.responses) for group in groups]
    update = updater(groups, OPTIMIZER.lr, weights=share)
    rows = [row for group in update.outputs for row in group]
    return Pass(np.concatenate(rows), np.array(update.loss), found), parameters


def compared_passes(whose: str, found: Pass, answer: Pass, tolerance: float) -> Iterator[Finding]:
    """Compare log-probs, loss and each gradient. whose: words before each part."""
    yield compared(f"{whose}log-probs", found.log_probs, answer.log_probs, tolerance)
    yield compared(f"{whose}loss", found.loss, answer.loss, tolerance)
    for name, gradient in answer.gradients.items():
        part = f"{whose}gradient of {name}"
        yield compared(part, found.gradients[name], gradient, tolerance_of(name, tolerance))


def check_update(family: str, dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check an update through the graphs of training.

    Log-probs, loss, each gradient, and the change of each weight.
    """
    config = tiny_models()[family]
    weights = tiny_weights(config, family)
    groups = groups_of(family, config.vocab_size)
    expected = exact_pass(config, weights, groups)
    found, parameters = own_update(config, weights, groups, dtype, trial)
    tolerance = TOLERANCES[dtype]["model"]
    yield from compared_passes("", found, expected, tolerance)
    updated = {name: np.asarray(weights[name], np.float64) for name in expected.gradients}
    adam = AdamSettings(
        rate=OPTIMIZER.lr,
        beta1=OPTIMIZER.beta1,
        beta2=OPTIMIZER.beta2,
        eps=OPTIMIZER.eps,
        decay=OPTIMIZER.weight_decay,
        max_norm=OPTIMIZER.max_grad_norm,
    )
    decays = {spec.name: spec.decays for spec in parameter_table(config) if spec.trains}
    adam.apply(expected.gradients, {}, updated, decays, 1)
    for name, weight in updated.items():
        moved = np.asarray(backend.read(parameters[name]), np.float64) - weights[name]
        yield compared(f"update of {name}", moved, weight - weights[name], tolerance_of(name, tolerance))


def check_generation(family: str, top_k: int, dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check the tokens that generation draws, and their log-probs.

    Tokens are those of the random numbers.

    top_k: 0, or a filter, with which some devices draw one token at a time.
    """
    config = tiny_models()[family]
    weights = tiny_weights(config, family)
    decoder, _ = open_decoder(config, weights, dtype, trial)
    sampling = SamplingSettings(max_new_tokens=NEW, top_k=top_k)
    prompts = [Prompt(7 * i, group.prompt_ids) for i, group in enumerate(groups_of(family, config.vocab_size))]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = Engine(config, decoder, sampling, SLOTS, longest, (), SEED, BUCKET)
    model = Reference(config, weights)
    found, expected, outside = [], [], [0.0]
    for group in engine.generate(prompts, 2, STEP):
        for rollout in group.rollouts:
            rows = rows_of(group.prompt.token_ids, rollout.response_ids)
            every = log_softmax(model.logits(rows)).value
            places = np.arange(len(rollout.response_ids))
            found.append(rollout.row("policy_log_probs"))
            expected.append(every[places, rollout.response_ids])
            drawn = uniform(SEED, STEP, group.prompt.id, rollout.sample_index, places)
            outside.append(_outside(np.exp(every), rollout.response_ids, drawn))
    tolerance = TOLERANCES[dtype]["model"]
    yield compared("log-probs of the tokens drawn", np.concatenate(found), np.concatenate(expected), tolerance)
    if not top_k:
        yield Finding("tokens drawn by their random numbers", max(outside), tolerance)


def _outside(probabilities: np.ndarray, tokens: np.ndarray, drawn: np.ndarray) -> float:
    """Compute the largest distance of a random number from its token's interval.

    Intervals are those of the cumulated probabilities.
    """
    ends = np.cumsum(probabilities, axis=1)
    places = np.arange(len(tokens))
    last = ends[places, tokens]
    first = last - probabilities[places, tokens]
    return float(np.maximum(np.maximum(first - drawn, drawn - last), 0.0).max())


def model_checks(dtypes: Sequence[str]) -> Iterator[Check]:
    """List the checks of tiny models."""

    def bound(check: Callable[..., Iterator[Finding]], *given) -> Callable[[Trial], Iterator[Finding]]:
        return lambda trial: check(*given, trial)

    decoding = ("decode_tokens", "admit")
    alone = ("decode_attention_half", "decode_feed_forward_half", "decode_logits")
    for dtype in dtypes:
        for family, config in tiny_models().items():
            experts = ("decode_experts_half",) if config.num_experts else ()
            yield Check(f"{family} rows {dtype}", "model", bound(check_rows, family, dtype))
            yield Check(f"{family} update {dtype}", "model", bound(check_update, family, dtype), ("adamw",))
            yield Check(f"{family} generation {dtype}", "model", bound(check_generation, family, 0, dtype), decoding)
            yield Check(
                f"{family} generation with top-k {dtype}",
                "model",
                bound(check_generation, family, TOP_K, dtype),
                (*alone, *experts),
            )


def smallest_margin(config: ModelConfig, name: str) -> float:
    """Compute the smallest margin of the experts' choices in the checks."""
    model = Reference(config, tiny_weights(config, name))
    sequences = [
        rows_of(group.prompt_ids, response)
        for group in groups_of(name, config.vocab_size)
        for response in group.responses
    ]
    return min(model.routing_margin(rows) for rows in (tiny_rows(name, config.vocab_size), *sequences))
