"""Data of a run: prompts or recorded rollouts, and held-out problems, checked."""

from dataclasses import dataclass

from mindrlhf.checkpoint.open import check_token_ids
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.validate import check_lengths
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.evaluation.validation import read_validation, validation_positions
from mindrlhf.job import Job
from mindrlhf.records.formats import read_record
from mindrlhf.shapes import longest_position
from mindrlhf.types import Experience, Prompt

Recorded = list[tuple[int, list[Experience]]]


@dataclass(frozen=True)
class TrainingData:
    """Data that a run reads.

    stream: of the dataset's prompts; None for a replay. recorded: (step, experiences) to replay; empty when the run
    generates. rows: of the dataset. prompts: of the dataset, or of the recorded steps. problems: held out.
    longest_prompt: tokens. max_positions: of the longest sequence, padded.
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
    args, config = job.args, job.config
    recorded = read_record(args.replay) if args.replay else []
    rows = [] if args.replay else read_prompts(args.mind_dataset_dir, job.tokenizer)
    prompts = rows or [e.group.prompt for _, step in recorded for e in step]
    recorded = recorded[: config.trainer.total_steps]
    longest = check_prompts(job, prompts)
    check_recorded(job, recorded)
    total = len(recorded) or total_steps(config, len(rows))
    problems = read_validation(job) if rows else []
    bucket = config.train.length_bucket
    positions = longest_position(longest, config.rollout.max_new_tokens, bucket)
    positions = max(positions, validation_positions(job, problems))
    stream = PromptStream(rows, config.data.prompts_per_step, config.data.shuffle, config.seed) if rows else None
    return TrainingData(stream, recorded, len(rows), prompts, problems, longest, positions, total)


def check_recorded(job: Job, recorded: Recorded) -> None:
    """Check that a replay's rollouts fit this run.

    Its steps have to divide, and the model has to have room for its responses.
    """
    unit = job.train.parallel.data_parallel * job.config.algorithm.updates_per_iteration
    limit = job.config.rollout.max_new_tokens
    for step, experiences in recorded:
        if len(experiences) % unit:
            raise UserError(
                f"{job.args.replay}: step {step} has {len(experiences)} prompts, which data_parallel x "
                f"updates_per_iteration {unit} does not divide; replay it with the settings of the run that "
                "recorded it."
            )
        responses = [rollout.response_ids for experience in experiences for rollout in experience.group.rollouts]
        longest, largest = (max(int(measure(ids)) for ids in responses) for measure in (len, max))
        if longest > limit:
            raise UserError(
                f"{job.args.replay}: step {step} has a response of {longest} tokens, and rollout.max_new_tokens is "
                f"{limit}; set it to {longest} or more."
            )
        if largest >= job.model.vocab_size:
            raise UserError(
                f"{job.args.replay}: step {step} has token id {largest}, and the model's vocab_size is "
                f"{job.model.vocab_size}; replay it with the model that it was recorded with."
            )


def check_prompts(job: Job, prompts: list[Prompt]) -> int:
    """Check the dataset against tokenizer and model; returns the longest prompt's tokens."""
    largest = max(int(prompt.token_ids.max()) for prompt in prompts)
    check_token_ids(job.tokenizer, job.model, largest, str(job.args.replay or job.args.mind_dataset_dir))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for yaml in (job.train, job.infer):
        check_lengths(job.config, yaml, job.model, longest)
    return longest


def total_steps(config: GRPOConfig, rows: int) -> int:
    """Return the run's steps: as set, or as the epochs give."""
    if config.trainer.total_steps:
        return config.trainer.total_steps
    steps = config.trainer.epochs * rows // config.data.prompts_per_step
    if not steps:
        raise UserError(
            f"data.prompts_per_step is {config.data.prompts_per_step} and the dataset has {rows} rows, which is no "
            f"whole step; set it to {rows} or fewer, or set trainer.total_steps."
        )
    return steps
