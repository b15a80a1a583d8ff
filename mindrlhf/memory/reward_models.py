"""Graphs of reward models and judges on the ranks that score. Pure Python."""

from collections.abc import Sequence

from mindrlhf.configs.grpo import RolloutSettings
from mindrlhf.configs.model_yaml import ModelYaml, RecomputeSettings
from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings
from mindrlhf.judging.sizes import BUCKET, VERDICT_SLOTS, verdict_cache
from mindrlhf.memory.activations import Engine
from mindrlhf.shapes import padded_prefix
from mindrlhf.training.batch import MicroBatch, cut_alike


def scoring_yaml(yaml: ModelYaml, settings: RewardModelSettings) -> ModelYaml:
    """Change the model YAML of generation to that of a model that scores."""
    model = yaml.model.model_copy(update={"compute_dtype": settings.compute_dtype})
    return yaml.model_copy(update={"model": model, "recompute": RecomputeSettings()})


def verdict_engine(settings: JudgeSettings) -> Engine:
    """Describe the engine of a judge that writes its verdicts."""
    prefix = padded_prefix(settings.max_length, BUCKET)
    return Engine(VERDICT_SLOTS, prefix, VERDICT_SLOTS, verdict_cache(settings))


def scoring_batches(
    settings: RewardModelSettings, rollout: RolloutSettings, groups: int, prompt: int
) -> Sequence[MicroBatch]:
    """Cut the longest groups of one rank, largest first.

    prompt: tokens of the policy's longest prompt; the model's own tokens are assumed to be as many.
    """
    return cut_alike(
        groups=groups,
        prompt=min(prompt, settings.max_length),
        samples=rollout.num_generations,
        response=min(rollout.max_new_tokens, settings.max_length - 1) + 1,
        max_tokens=settings.max_tokens_per_batch,
        bucket=BUCKET,
    )
