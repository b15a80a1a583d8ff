"""Memory of reward models and judges on the ranks that score. Pure Python."""

from collections.abc import Sequence

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.reward_models import MODEL_REWARDS, JudgeSettings, model_settings
from mindrlhf.judging.checkpoint import ScoringModel, open_scoring_model
from mindrlhf.judging.sizes import BUCKET, VERDICT_SLOTS, verdict_cache
from mindrlhf.memory import activations
from mindrlhf.memory.activations import Engine, Stage
from mindrlhf.models.parameters import parameter_count
from mindrlhf.shapes import padded_prefix
from mindrlhf.training.batch import cut_alike
from mindrlhf.units import FLOAT32


def read_reward_models(config: GRPOSettings) -> list[ScoringModel]:
    """Read the architectures of a run's reward models and judges, each once."""
    functions = (one for one in config.reward.functions if one.name in MODEL_REWARDS)
    every = dict.fromkeys(model_settings(one.name, one.args) for one in functions)
    return [open_scoring_model(settings, weights=False) for settings in every]


def resident_bytes(models: Sequence[ScoringModel], fused: bool) -> list[int]:
    """Compute the bytes of each model's weights, with its cache for verdicts."""
    found = []
    for model in models:
        cache = 0 if model.config.value_head else activations.cache_bytes(_stage(model, fused), _engine(model.settings))
        found.append(parameter_count(model.config) * FLOAT32 + cache)
    return found


def scoring_bytes(models: Sequence[ScoringModel], config: GRPOSettings, groups: int, prompt: int, fused: bool) -> int:
    """Compute the peak bytes of activations while the models score.

    groups: number of prompts; the models score one after the other. prompt: tokens of the policy's longest prompt; the
    models' own tokens are assumed to be as many.
    """
    peak = 0
    for model in models:
        settings = model.settings
        stage = _stage(model, fused)
        if model.config.value_head:
            response = min(config.rollout.max_new_tokens, settings.max_length - 1)
            sizes = groups, min(prompt, settings.max_length), config.rollout.num_generations, response + 1
            micro = cut_alike(*sizes, settings.max_tokens_per_batch, BUCKET)[0]
            peak = max(peak, activations.score_bytes(stage, micro))
        else:
            peak = max(peak, activations.generate_bytes(stage, _engine(settings)))
    return peak


def _stage(model: ScoringModel, fused: bool) -> Stage:
    rounds = model.settings.compute_dtype == "bfloat16"
    itemsize = activations.ITEMSIZE["float32"]
    return Stage(model.config, 1, model.config.num_layers, True, False, itemsize, fused, rounds=rounds)


def _engine(settings: JudgeSettings) -> Engine:
    prefix = padded_prefix(settings.max_length, BUCKET)
    return Engine(VERDICT_SLOTS, prefix, VERDICT_SLOTS, verdict_cache(settings))
