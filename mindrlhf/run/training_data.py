"""Data of a run: prompts or recorded rollouts, and held-out problems, checked."""

from dataclasses import dataclass
from pathlib import Path

from mindrlhf.checkpoint.open import check_token_ids
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.validate import check_lengths
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.job import Job
from mindrlhf.records.formats import read_record
from mindrlhf.shapes import longest_position
from mindrlhf.types import Experience, Prompt

Recorded = list[tuple[int, list[Experience]]]


@dataclass(frozen=True)
class TrainingData:
    """Data that a run reads.

    stream: of prompts; None for a replay. recorded: (step, experiences) to replay; empty when the run generates. rows:
    of the dataset. prompts: of the dataset, or recorded. problems: held out. longest_prompt: tokens. max_positions:
    padded.
    """

    stream: PromptStream | None
    recorded: Recorded
    rows: int
    prompts: list[Prompt]
    problems: list[Prompt]
    longest_prompt: int
    max_positions: int
    total_steps: int


def read_training_data(job: Job) -> TrainingData:
    """Read and check a run's data. Raises `UserError`."""
    args, config, bucket = job.args, job.config, job.config.train.length_bucket
    recorded = read_record(args.replay) if args.replay else []
    rows = [] if args.replay else read_prompts(args.mind_dataset_dir, job.tokenizer)
    prompts = rows or [e.group.prompt for _, step in recorded for e in step]
    recorded = recorded[: config.trainer.total_steps]
    longest = check_prompts(job, prompts, args.replay or args.mind_dataset_dir, job.train, job.infer)
    positions = longest_position(longest, config.rollout.max_new_tokens, bucket)
    check_recorded(job, recorded)
    total = len(recorded) or total_steps(config, len(rows))
    problems, source = [], config.data.val_dataset
    if rows and source is not None:
        problems = read_prompts(source, job.tokenizer)[: config.validation.limit]
        length = check_prompts(job, problems, source, job.infer, of="validation")
        answer = config.validation.completed(config.rollout).max_new_tokens
        positions = max(positions, longest_position(length, answer, bucket))
    stream = PromptStream(rows, config.data.prompts_per_step, config.data.shuffle, config.seed) if rows else None
    return TrainingData(stream, recorded, len(rows), prompts, problems, longest, positions, total)


def check_recorded(job: Job, recorded: Recorded) -> None:
    """Check that a replay's steps divide and its responses fit the model."""
    unit = job.train.parallel.data_parallel * job.config.algorithm.updates_per_iteration
    limit, vocabulary = job.config.rollout.max_new_tokens, job.model.vocab_size
    for step, experiences in recorded:
        responses = [rollout.response_ids for experience in experiences for rollout in experience.group.rollouts]
        longest, largest = (max(int(measure(ids)) for ids in responses) for measure in (len, max))
        there = f"{job.args.replay}: step {step} has"
        if len(experiences) % unit:
            raise UserError(
                f"{there} {len(experiences)} prompts, which data_parallel x updates_per_iteration {unit} does not "
                "divide; replay it with the settings of the run that recorded it."
            )
        if longest > limit:
            over = f"a response of {longest} tokens, and rollout.max_new_tokens is {limit}"
            raise UserError(f"{there} {over}; set it to {longest} or more.")
        if largest >= vocabulary:
            over = f"token id {largest}, and the model's vocab_size is {vocabulary}"
            raise UserError(f"{there} {over}; replay it with the model that it was recorded with.")


def check_prompts(job: Job, prompts: list[Prompt], source: str | Path, *yamls: ModelYaml, of: str = "rollout") -> int:
    """Check prompts for the settings of the group `of`; returns the longest one's tokens."""
    check_token_ids(job.tokenizer, job.model, max(int(prompt.token_ids.max()) for prompt in prompts), str(source))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for yaml in yamls:
        check_lengths(job.config, yaml, job.model, longest, of)
    return longest


def total_steps(config: GRPOConfig, rows: int) -> int:
    """Return the run's steps: as set, or as the epochs give."""
    if config.trainer.total_steps:
        return config.trainer.total_steps
    prompts = config.data.prompts_per_step
    if steps := config.trainer.epochs * rows // prompts:
        return steps
    found = f"data.prompts_per_step is {prompts} and the dataset has {rows} rows, which is no whole step"
    raise UserError(f"{found}; set it to {rows} or fewer, or set trainer.total_steps.")
