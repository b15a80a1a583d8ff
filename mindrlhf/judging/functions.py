"""Reward functions that are models, in the process that scores."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mindrlhf.configs.grpo import RewardFunctionSettings
from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings, function_settings
from mindrlhf.judging.checkpoint import open_scoring_model
from mindrlhf.judging.encoding import Encoded, Encoder
from mindrlhf.judging.questions import JudgeTemplate, conversation
from mindrlhf.model_roles import REWARD_MODEL
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.process import Reply
from mindrlhf.rewards.results import Outcome

if TYPE_CHECKING:  # it imports MindSpore
    from mindrlhf.judging.scorer import ModelScorer

Enter = Callable[[str], AbstractContextManager[None]]

_open: dict[RewardModelSettings, "RewardModel"] = {}  # models in use: a run's training and its validation share them


class RewardModel:
    """Reward model or judge, whose weights are read when they are first needed.

    needs_ground_truth: the judge's question has the ground truth. users: of the object; the last one closes it. enter:
    times a phase of a run, with its weights in memory; None outside of a run.
    """

    def __init__(self, settings: RewardModelSettings):
        """Read architecture, tokenizer and template. Raises UserError."""
        self.settings = settings
        self.users = 0
        self.enter: Enter | None = None
        self._described = open_scoring_model(settings, weights=False)
        self._template = JudgeTemplate(settings) if isinstance(settings, JudgeSettings) else None
        self.needs_ground_truth = bool(self._template and self._template.needs_ground_truth)
        self._encoder = Encoder(
            self._described.tokenizer,
            settings.path,
            settings.chat_template,
            None if self._template else self._described.config.pad_token_id,
            replies=self._template is not None,
        )
        self._scorer: ModelScorer | None = None

    def load(self) -> "ModelScorer":
        """Read the weights, once. Raises UserError."""
        if self._scorer is None:
            from mindrlhf.judging.scorer import ModelScorer

            self._scorer = ModelScorer(self._described)
        return self._scorer

    @property
    def operations(self) -> float:
        """Operations of matrix products so far."""
        return self._scorer.operations if self._scorer else 0.0

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Score samples in their order; a sample that cannot be scored has an error."""
        encoded = [self._fitting(one) for one in self._encoder([self._conversation(sample) for sample in samples])]
        readable = [one for one in encoded if isinstance(one, Encoded)]
        with self.enter(REWARD_MODEL.scoring.phase) if self.enter else nullcontext():
            scores = iter(self.load()(readable) if readable else ())
        return [next(scores) if isinstance(one, Encoded) else Outcome(error=one) for one in encoded]

    def _conversation(self, sample: Sample) -> Any:
        try:
            if self._template:
                return self._template.messages(sample)
            return conversation(sample, self.settings.strip_thinking)
        except ValueError as error:
            return str(error)

    def _fitting(self, one: Encoded | str) -> Encoded | str:
        if isinstance(one, str) or one.size <= self.settings.max_length:
            return one
        return f"it has {one.size} tokens in the model's format, and max_length is {self.settings.max_length}"

    def close(self) -> None:
        """End the process that renders conversations."""
        self._encoder.close()


class ModelFunctions:
    """Functions of one runner that are models, by their place among its functions.

    needing: places of functions that need a ground truth.
    """

    def __init__(self, functions: Mapping[int, RewardFunctionSettings]):
        """Open the models; raises UserError."""
        self._models: dict[int, RewardModel] = {}
        for place, one in functions.items():
            settings = function_settings(one)
            model = _open.get(settings) or RewardModel(settings)
            _open[settings] = model
            model.users += 1
            self._models[place] = model
        self.needing = {place for place, model in self._models.items() if model.needs_ground_truth}

    @property
    def operations(self) -> float:
        """Operations of matrix products of all models so far."""
        return sum(model.operations for model in dict.fromkeys(self._models.values()))

    def __call__(self, samples: Sequence[Sample]) -> dict[int, list[Reply]]:
        """Score samples with each model."""
        return {place: _replies(model, samples) for place, model in self._models.items()}

    def load(
        self,
        register: Callable[[str, Iterable[Any]], None],
        enter: Enter,
    ) -> None:
        """Read all weights, and register the parameters of each model.

        register: takes a part of the memory group, and its parameters. enter: see `RewardModel`.
        """
        (group,) = REWARD_MODEL.weights
        for number, model in enumerate(dict.fromkeys(self._models.values())):
            register(f"{group}.{number}", model.load().parameters)
            model.enter = enter

    def close(self) -> None:
        """Let the models go that nobody else uses. May be called again."""
        for model in self._models.values():
            model.users -= 1
            if not model.users:
                del _open[model.settings]
                model.close()
        self._models = {}


def _replies(model: RewardModel, samples: Sequence[Sample]) -> list[Reply]:
    start = time.perf_counter()
    found = model.score(samples) if samples else []
    share = (time.perf_counter() - start) / max(1, len(found))
    return [Reply(score, details, share, error) for score, details, error in found]
