"""Checks of jobs and commands with a model that sees; each raises UserError."""

from collections.abc import Sequence
from typing import get_args

from mindrlhf.configs.grpo import GRPOSettings, RolloutSettings
from mindrlhf.configs.images import no_image_settings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.vision import PartName
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags


def check_seeing_policy(config: GRPOSettings, flags: TrainFlags) -> None:
    """Check the settings of reinforcement learning for a model that sees."""
    if flags.replay and not flags.mind_dataset_dir:
        raise UserError("--replay needs --mind_dataset_dir too with a model that sees: a record has no images.")


def check_seeing(model: ModelConfig, checkpoint: str) -> None:
    """Check that a model that sees has settings of images."""
    if model.vision and model.vision.images is None:
        raise no_image_settings(checkpoint)


def check_tool_images(rollout: RolloutSettings, model: ModelConfig) -> None:
    """Check that tools and environments can show images to a model."""
    if not rollout.tool_images:
        return
    given = "rollout.tool_images is True"
    if model.vision is None:
        raise UserError(f"{given}, and a model of the family {model.family} takes text alone; set it to False.")
    if not rollout.converses:
        raise UserError(f"{given}, and there are neither tools nor an environment; name some, or set it to False.")
    if rollout.tokens_per_step is not None:
        parts = f"rollout.tokens_per_step {rollout.tokens_per_step} draws answers in parts, whose pictures are not kept"
        raise UserError(f"{given}, and {parts}; set one of the two to its default.")


def check_seeing_alike(model: ModelConfig, policy: ModelConfig, where: str) -> None:
    """Check that a model reads the tokens and patches that the policy is shown."""
    if policy.vision is None:
        return
    if model.vision is None:
        raise UserError(f"{where} takes text alone, and the policy sees; give a model that sees.")
    for name in ("image_token_id", "patch_size", "temporal_patch_size", "merge_size"):
        ours, theirs = (getattr(one.vision, name) for one in (policy, model))
        if ours != theirs:
            raise UserError(f"{where} has {name} {theirs}, and the policy {ours}; give a model of the same kind.")


def check_frozen(config: GRPOSettings | SFTSettings, model: ModelConfig) -> None:
    """Check the parts that updates do not change."""
    parts = config.train.freeze
    if not parts:
        return
    given = f"train.freeze is [{', '.join(parts)}]"
    if model.vision is None:
        raise UserError(f"{given}, and a model of the family {model.family} has no such parts; leave it out.")
    if config.lora.enabled:
        raise UserError(f"{given}, and with lora only adapters train; leave it out, or see lora.exclude_modules.")
    if len(set(parts)) == len(get_args(PartName)):
        raise UserError(f"{given}, and nothing else would train; leave a part out.")


def check_generating_images(
    model: ModelConfig, checkpoint: str, images: Sequence[str] = (), rows: str | None = None
) -> None:
    """Check a generating command's images.

    images: of --image; rows: of --prompts.
    """
    if images and rows:
        raise UserError("--image is for --prompt; the rows of --prompts have their own images.")
    if images:
        check_shown(model, checkpoint, "--image")


def check_shown(model: ModelConfig, checkpoint: str, where: str) -> None:
    """Check that a model can be shown images, which `where` gives."""
    if model.vision is None:
        raise UserError(f"{where}: {checkpoint} is a model of the family {model.family}, which takes text alone.")
    if model.vision.images is None:
        raise no_image_settings(checkpoint)
