"""Data of a run: prompts or recorded rollouts, and held-out problems, checked."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.model_card import ModelCard, card_of_run
from mindrlhf.checkpoint.tokenizer import check_token_ids
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.validate import check_lengths
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.convert_problems import convert_rows
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.source import given_rows, is_source, read_sources
from mindrlhf.data.stream import PromptStream
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.environments.pool import tool_schemas
from mindrlhf.errors import UserError
from mindrlhf.job import Job
from mindrlhf.models.routing import Routing, RoutingForm
from mindrlhf.records.formats import read_record
from mindrlhf.run.picture_prompts import PictureForm, PicturePrompts, without_pictures
from mindrlhf.run.picture_source import picture_rows
from mindrlhf.run.recorded_pictures import Recorded, with_pictures
from mindrlhf.shapes import longest_position
from mindrlhf.types import Experience, Prompt, Rollout


@dataclass(frozen=True)
class TrainingData:
    """Data that a run reads.

    source: file or name of the prompts, or the record. stream: the prompts; None for a replay. recorded: (step,
    experiences) to replay; empty when the run generates. rows: number in the dataset. prompts: all of the dataset, or
    of the replay. problems: held-out problems. longest_prompt: in tokens. max_positions: of a padded sequence.
    """

    source: Path | str
    stream: PromptStream | None
    recorded: Recorded
    rows: int
    prompts: list[Prompt]
    problems: list[Prompt]
    longest_prompt: int
    max_positions: int
    total_steps: int

    def fingerprint(self) -> dict[str, int]:
        """Describe the prompts and their ground truths, for `run_identity`."""
        prompts = truths = 0
        for prompt in self.prompts:
            pictures = b"".join(picture.digest for picture in prompt.pictures)
            prompts = zlib.crc32(np.int64(prompt.id).tobytes() + prompt.token_ids.tobytes() + pictures, prompts)
            truths = zlib.crc32(prompt.fields.get("ground_truth", "").encode() + b"\0", truths)
        return {"count": len(self.prompts), "crc32": prompts, "ground_truths_crc32": truths}

    def card(self, config: GRPOSettings, path: str | None) -> ModelCard:
        """Make the card of the trained model; path: of its first weights."""
        return card_of_run(config, path, self.source, self.prompts, self.total_steps)


def read_training_data(job: Job) -> TrainingData:
    """Read and check a run's data. Raises `UserError`."""
    flags = job.flags
    config = job.config
    reading = job.tokenizer, config, job.objects.datasets
    recorded = read_record(flags.replay) if flags.replay else []
    vision = job.model.vision
    read = not flags.replay or vision  # a record has no pictures
    rows = read_problems(flags.mind_dataset_dir, *reading, split="train", vision=vision) if read else []
    if recorded and vision:
        recorded = with_pictures(recorded, rows, flags.replay, flags.mind_dataset_dir)
        rows = []
    prompts = rows or [e.group.prompt for _, step in recorded for e in step]
    recorded = recorded[: config.trainer.total_steps]
    source = flags.replay or flags.mind_dataset_dir
    model = job.model
    longest = check_prompts(prompts, source, model, job.tokenizer, config, (job.train, job.infer))
    positions = longest_position(longest, config.rollout.max_new_tokens, config.train.length_bucket)
    check_recorded(recorded, flags.replay, job.train.parallel.data_parallel, config, model)
    total = len(recorded) or total_steps(config, len(rows))
    problems = []
    held_out = config.data.val_dataset
    if rows and held_out is not None:
        problems = read_problems(held_out, *reading, limit=config.validation.limit, vision=vision)
        length = check_prompts(problems, held_out, model, job.tokenizer, config, (job.infer,), of="validation")
        answer = config.validation.completed(config.rollout).max_new_tokens
        positions = max(positions, longest_position(length, answer, job.config.train.length_bucket))
    stream = PromptStream(rows, config.data.prompts_per_step, config.data.shuffle, config.seed) if rows else None
    return TrainingData(source, stream, recorded, len(rows), prompts, problems, longest, positions, total)


def read_problems(
    source: str | Path,
    tokenizer: Tokenizer | None,
    config: GRPOSettings,
    datasets: Mapping[str, Any],
    split: str | None = None,
    limit: int | None = None,
    vision: VisionConfig | None = None,
) -> list[Prompt]:
    """Read prompts of a MindRecord, a file of rows, or the calling program.

    split: of a folder or a hub's dataset without one behind a colon; None is the only one. limit: number of first rows.
    vision: of a model that sees, for which rows may have images.
    """
    given = datasets.get(str(source))
    rollout = config.rollout
    data = config.data
    if given is None and not is_source(source):
        prompts = read_prompts(source, tokenizer)[:limit]
        return without_pictures(prompts, vision, source) if vision else prompts
    if tokenizer is None:
        raise UserError(f"{source}: no tokenizer is given for its rows; use --tokenizer_path.")
    tools = tool_schemas(rollout.environment if isinstance(rollout.environment, str) else None, rollout.tools)
    if vision:
        form = PictureForm(
            template=data.template,
            tools=tools,
            variables=data.chat_template_kwargs,
            fields=data.fields,
            max_prompt_length=data.max_prompt_length,
            truncation=data.truncation,
        )
        shown = picture_rows(source, given, split, limit)
        return PicturePrompts(tokenizer, vision, source, form).of_rows(shown)
    rows = read_sources(source, limit, split) if given is None else given_rows(given, str(source))[:limit]
    options = {"template": data.template, "max_prompt_length": data.max_prompt_length}
    options |= {"truncation": data.truncation, "fields": data.fields}
    return convert_rows(rows, tokenizer, tools=tools, variables=data.chat_template_kwargs, **options)


def check_recorded(
    recorded: Recorded, source: Path | None, data_parallel: int, config: GRPOSettings, model: ModelConfig
) -> None:
    """Check that a replay's steps divide and its responses fit the model.

    data_parallel: training replicas.
    """
    unit = data_parallel * config.algorithm.updates_per_iteration
    limit = config.rollout.max_new_tokens
    for step, experiences in recorded:
        responses = [rollout.response_ids for experience in experiences for rollout in experience.group.rollouts]
        longest, largest = (max(int(measure(ids)) for ids in responses) for measure in (len, max))
        if len(experiences) % unit:
            found = f"{len(experiences)} prompts, which data_parallel x updates_per_iteration {unit} does not divide"
            right = "replay it with the settings of the run that recorded it"
        elif longest > limit:
            found = f"a response of {longest} tokens, and rollout.max_new_tokens is {limit}"
            right = f"set it to {longest} or more"
        elif not all(shows_alike(rollout, model) for one in experiences for rollout in one.group.rollouts):
            found = "a response with pictures of a tool that are not those of this model's image tokens"
            right = "replay it with the model that it was recorded with"
        elif largest >= model.vocab_size:
            found = f"token id {largest}, and the model's vocab_size is {model.vocab_size}"
            right = "replay it with the model that it was recorded with"
        elif config.rollout.records_routing and not all(fits_routing(e, model) for e in experiences):
            found = "a response without the routing of this model's experts, and rollout.routing_replay is rollout"
            right = "replay a record of a run with that setting, or set old or off"
        else:
            continue
        raise UserError(f"{source}: step {step} has {found}; {right}.")


def shows_alike(rollout: Rollout, model: ModelConfig) -> bool:
    """Test that a response's image tokens are those of its pictures in this model."""
    if model.vision is None:
        return not rollout.pictures
    of_images = rollout.response_ids == model.vision.image_token_id
    expected = np.zeros(len(of_images), bool)
    for place, picture in rollout.pictures.items():
        expected[place : place + picture.tokens] = True
    settings = {picture.settings for picture in rollout.pictures.values()}
    alike = all(_patches(one) == _patches(model.vision.images) for one in settings)
    return alike and bool((of_images == expected).all())


def _patches(settings: ImageSettings | None) -> dict[str, Any] | None:
    """Return the settings by which pixels become patches."""
    return settings and settings.model_dump(exclude={"min_pixels", "max_pixels"})


def fits_routing(experience: Experience, model: ModelConfig) -> bool:
    """Test that a group has a routing that is one of the model's."""
    form = RoutingForm.of(model)
    known = Routing.of_rollouts(tuple(rollout.tokens for rollout in experience.group.rollouts))
    if known is None:
        return False
    arrays = (known.prompt, *known.responses)
    return all(one.shape[1] == form.width and one.max(initial=0) <= form.experts for one in arrays)


def check_prompts(
    prompts: list[Prompt],
    source: str | Path,
    model: ModelConfig,
    tokenizer: Tokenizer,
    config: GRPOSettings,
    yamls: Iterable[ModelYaml],
    of: str = "rollout",
) -> int:
    """Check prompts against the settings of the group `of`; returns the longest prompt's tokens."""
    check_token_ids(tokenizer, model, max(int(prompt.token_ids.max()) for prompt in prompts), str(source))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for yaml in yamls:
        check_lengths(config, yaml, model, longest, of)
    return longest


def total_steps(config: GRPOSettings, rows: int) -> int:
    """Count the run's steps, as set or computed from the epochs."""
    if config.trainer.total_steps:
        return config.trainer.total_steps
    prompts = config.data.prompts_per_step
    if steps := config.trainer.epochs * rows // prompts:
        return steps
    found = f"data.prompts_per_step is {prompts} and the dataset has {rows} rows, which is no whole step"
    raise UserError(f"{found}; set it to {rows} or fewer, or set trainer.total_steps.")
