"""Scores of a reward model or judge over its parameters, in batches."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import mindspore
import numpy as np
from mindspore import Parameter

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.backend.device import Device
from mindrlhf.backend.devices import default_device, device_in_use
from mindrlhf.backend.process.launch import launch, under_msrun
from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.configs.grpo import SamplingSettings, TrainSettings
from mindrlhf.configs.reward_models import JudgeSettings
from mindrlhf.errors import UserError
from mindrlhf.judging.checkpoint import ScoringModel
from mindrlhf.judging.encoding import Encoded
from mindrlhf.judging.questions import read_verdict
from mindrlhf.judging.sizes import BUCKET, VERDICT_SLOTS, score_positions, verdict_positions
from mindrlhf.metrics.flops import forward_flops
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.parameters import parameter_table
from mindrlhf.rewards.results import Outcome, details
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import Values
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Prompt


class ModelScorer:
    """Scorer of encoded conversations with one set of weights.

    A score depends on its conversation alone, not on the others or their order; padding moves its last digits at most.

    parameters: everything that scoring needs in memory, a cache for generated verdicts included. operations: of matrix
    products so far, as in `metrics.flops`. Raises UserError for weights that do not fit.
    """

    def __init__(self, model: ScoringModel):
        settings = model.settings
        device = _device()
        try:
            operators = device.operators(device.product_dtype(settings.compute_dtype))
        except UserError as error:
            raise UserError(f"{settings.path}: compute_dtype is {settings.compute_dtype}, and {error}.") from None
        read, self._bias = model.weights()
        weights = build_parameters(parameter_table(model.config), read)
        self._model = model
        # Of its graphs, with their own constants; they do not depend on the job's settings.
        self._settings = f"{device.name} {model.config.model_dump()} {settings.compute_dtype} {settings.verdict_tokens}"
        self.operations = 0.0
        self.parameters: list[Parameter] = list(weights.values())
        if model.config.value_head:
            decoder = Decoder(model.config, weights, operators, score_positions(settings))
            pieces = TrainSettings(max_tokens_per_micro_batch=settings.max_tokens_per_batch, length_bucket=BUCKET)
            self._scorer = Scorer(Values(decoder), pieces)
        else:
            decoder = Decoder(model.config, weights, operators, verdict_positions(settings))
            self._engine = _open_engine(model, settings, decoder)
            self.parameters += self._engine.cache.parameters

    def __call__(self, conversations: Sequence[Encoded]) -> list[Outcome]:
        """Score conversations in their order; equal ones are computed once."""
        distinct = {one.key: one for one in conversations}
        with Graph.cache.depending_on(self._settings) if Graph.cache else nullcontext():
            scored = (self._values if self._model.config.value_head else self._verdicts)(list(distinct.values()))
        by_key = dict(zip(distinct, scored, strict=True))
        return [by_key[one.key] for one in conversations]

    def _values(self, conversations: Sequence[Encoded]) -> list[Outcome]:
        """Compute the outputs at last tokens; a shared prompt is computed once."""
        by_head: dict[bytes, list[int]] = {}
        for index, one in enumerate(conversations):
            by_head.setdefault(one.head.tobytes(), []).append(index)
        groups = [
            SequenceGroup(conversations[members[0]].head, tuple(_shifted(conversations[i].rest) for i in members))
            for members in by_head.values()
        ]
        lengths = [(len(group.prompt_ids), [len(rest) - 1 for rest in group.responses]) for group in groups]
        self.operations += sum(forward_flops(self._model.config, *one) for one in lengths)
        scores = [Outcome()] * len(conversations)
        for members, rows in zip(by_head.values(), self._scorer(groups), strict=True):
            for index, row in zip(members, rows, strict=True):
                scores[index] = self._score(float(row[-1]))
        return scores

    def _score(self, value: float) -> Outcome:
        if not math.isfinite(value):
            return Outcome(error=f"the score is {value}, and not a finite number")
        return Outcome(1 / (1 + math.exp(-max(value, -700.0))) if self._model.words else value + self._bias)

    def _verdicts(self, conversations: Sequence[Encoded]) -> list[Outcome]:
        """Let the judge write, and read its verdicts."""
        ids = [np.concatenate([one.head, one.rest]) for one in conversations]
        prompts = [Prompt(index, tokens) for index, tokens in enumerate(ids)]
        written = [group.rollouts[0].response_ids for group in self._engine.generate(prompts, 1, 0)]
        lengths = [(len(read), [len(verdict)]) for read, verdict in zip(ids, written, strict=True)]
        self.operations += sum(forward_flops(self._model.config, *one) for one in lengths)
        texts = [self._model.tokenizer.decode(verdict, skip_special_tokens=True) for verdict in written]
        words = self._model.settings.words
        found = [(read_verdict(text, words), text) for text in texts]
        without = f"the judge says neither {words[0]} nor {words[1]}"
        return [
            Outcome(error=f"{without}: {text[-80:]!r}") if score is None else Outcome(score, details({"verdict": text}))
            for score, text in found
        ]


def _open_engine(model: ScoringModel, settings: JudgeSettings, decoder: Decoder) -> Engine:
    sampling = SamplingSettings(max_new_tokens=settings.max_new_tokens, temperature=0.0)
    return Engine(
        model.config,
        decoder,
        sampling,
        VERDICT_SLOTS,
        settings.max_length,
        stop_ids(model.tokenizer, model.config),
        seed=0,
        length_bucket=BUCKET,
        decode_text=model.tokenizer.decode,
    )


def _shifted(rest: np.ndarray) -> np.ndarray:
    """Append a token: its value is the head's output at the last token."""
    return np.append(rest, np.int32(0))


def _device() -> Device:
    """Return this process's device, prepared if no command has done so."""
    if not under_msrun() and mindspore.get_context("mode") != mindspore.GRAPH_MODE:
        launch(default_device())
    return device_in_use()
