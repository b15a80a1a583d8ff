"""Settings of the reward functions `model` and `judge`, whose scores a model computes."""

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from mindrlhf.configs.base import Settings
from mindrlhf.configs.problems import build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError

Text = Annotated[str, Field(min_length=1)]


class RewardModelSettings(Settings):
    """Reward model: a classifier with one label, whose output is the score."""

    path: str = Field(min_length=1)
    """Folder in HF's format, folder of an adapter in PEFT's format, or a hub's id."""
    adapter: Text | None = None
    """Adapter in PEFT's format over the model of path."""
    chat_template: Text | None = None
    """Chat template in place of the tokenizer's own: the name of another one of it, or jinja2."""
    max_length: int = Field(2048, ge=2)
    """Longest prompt and answer in the model's format, in tokens; a longer one stays unscored."""
    max_tokens_per_batch: int = Field(16384, ge=1)
    """Padded tokens that are scored at once."""
    strip_thinking: bool = False
    """Leave out an answer's text up to its last </think>."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of matrix products."""

    @property
    def verdict_tokens(self) -> int:
        """Longest verdict that the model writes, in tokens; 0 if it writes none."""
        return 0


class JudgeSettings(RewardModelSettings):
    """Judge: a language model that says yes or no to an answer."""

    template: str = Field("correct", min_length=1)
    """Question to the judge: correct compares with the ground truth, rubric asks for the rubric, or a jinja2 file."""
    rubric: Text | None = None
    """Demands on an answer, for rows without a field rubric."""
    words: tuple[Text, Text] = ("yes", "no")
    """The words of a good and of a bad verdict; with log_probs each must be one token."""
    verdict: Literal["log_probs", "generated"] = "log_probs"
    """log_probs: the score is P(good) / (P(good) + P(bad)) of the judge's first word. generated: the judge writes, and
    the last of the words decides, 1 or 0."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest generated verdict, in tokens."""

    @property
    def verdict_tokens(self) -> int:
        return self.max_new_tokens if self.verdict == "generated" else 0


MODEL_REWARDS: Mapping[str, type[RewardModelSettings]] = {"model": RewardModelSettings, "judge": JudgeSettings}


def with_model_args(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the settings of a model's function below `args`, and check them.

    given: an entry of `reward.functions`; those of other functions stay as they are. Settings may also follow the name,
    as in `judge path=DIR`, for commands that take a name alone. Raises ValueError, and UserError for such a text.
    """
    name, *texts = _words_of(given.get("name"))
    if name not in MODEL_REWARDS:
        return given
    entry = {"name": name, **({"weight": given["weight"]} if "weight" in given else {})}
    args = {key: value for key, value in given.items() if key not in ("name", "weight", "args")}
    args |= given.get("args") or {}
    if texts:
        args |= {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in texts)}
    elif args:  # a name alone is refused when the function is opened
        model_settings(name, args)
    return {**entry, "args": args}


def _words_of(name: Any) -> list[str]:
    """Split the name of a model's function from settings behind it. Raises UserError."""
    if not isinstance(name, str) or name.partition(" ")[0] not in MODEL_REWARDS:
        return [""]
    try:
        return shlex.split(name)
    except ValueError as error:
        raise UserError(f"reward {name!r}: {error}; give a name, then settings as KEY=VALUE.") from None


def model_settings(name: str, args: Mapping[str, Any]) -> RewardModelSettings:
    """Build the settings of a function in `MODEL_REWARDS`. Raises ValueError."""
    try:
        return build(MODEL_REWARDS[name], args, Layer(dict(args), {(): name}))
    except UserError as error:
        raise ValueError(str(error).removesuffix(".")) from None


def scoring_models(reward: Any) -> list[RewardModelSettings]:
    """List the settings of a run's reward models and judges, each once.

    reward: the settings' group of this name. Raises UserError.
    """
    return list(dict.fromkeys(function_settings(one) for one in reward.functions if one.name in MODEL_REWARDS))


def function_settings(function: Any) -> RewardModelSettings:
    """Build the settings of the model of an entry of `reward.functions`. Raises UserError."""
    try:
        return model_settings(function.name, function.args)
    except ValueError as error:
        raise UserError(f"{error}.") from None
