"""Checked data of fine-tuning: demonstrations, held-out demonstrations, and held-out problems."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mindrlhf.checkpoint.model_card import ModelCard, describe
from mindrlhf.checkpoint.open import check_token_ids
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.validate import check_lengths
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.job import Job
from mindrlhf.run.training_data import read_problems
from mindrlhf.shapes import longest_position
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.types import Prompt

HELD_OUT_DRAW = 1  # alongside the seed, to draw the rows that `data.val_share` holds out


@dataclass(frozen=True)
class TuningData:
    """Data that fine-tuning reads.

    stream: pairs of a prompt and the response to imitate. rows: number of rows to train on. held_out: pairs whose loss
    is measured. problems: prompts whose answers are scored. max_positions: of a padded sequence.
    """

    stream: PromptStream
    rows: int
    held_out: list[SequenceGroup]
    problems: list[Prompt]
    max_positions: int
    total_steps: int

    def fingerprint(self) -> dict[str, int]:
        """Describe the pairs, for `run_identity`."""
        checksum = 0
        for pair in self.stream.prompts:
            content = (np.int64(pair.identity), pair.prompt_ids, *pair.responses, *pair.sampled)
            checksum = zlib.crc32(b"".join(array.tobytes() for array in content), checksum)
        return {"count": self.rows, "crc32": checksum}

    def card(self, job: Job) -> ModelCard:
        """Make the card of the model that is trained."""
        pairs = f"{self.total_steps} steps of {job.config.data.pairs_per_step} pairs"
        method = f"supervised fine-tuning on answers; {pairs}"
        data = job.flags.mind_dataset_dir
        return describe(job.policy_path, method, data, f"{self.rows} pairs", (), job.config)


def read_tuning_data(job: Job) -> TuningData:
    """Read and check the data of fine-tuning. Raises `UserError`."""
    data = job.config.data
    bucket = job.config.train.length_bucket
    every_pair = read_pairs(job, job.flags.mind_dataset_dir, "train")
    pairs, held_out = held_out_share(every_pair, data.val_share, job.config.seed)
    if data.val_dataset:
        held_out = read_pairs(job, data.val_dataset)
    every = [*pairs, *held_out]
    longest = [max(len(part(pair)) for pair in every) for part in (lambda p: p.prompt_ids, lambda p: p.responses[0])]
    positions = longest_position(*longest, bucket)
    problems = []
    if data.val_problems:
        reading = job.tokenizer, GRPOSettings(), job.objects.datasets
        problems = read_problems(data.val_problems, *reading, limit=job.config.validation.limit)
        prompts = [problem.token_ids for problem in problems]
        check_token_ids(job.tokenizer, job.model, largest_id(prompts), data.val_problems)
        prompt = max(map(len, prompts))
        check_lengths(job.config, job.train, job.model, prompt, "validation")
        positions = max(positions, longest_position(prompt, job.config.validation.max_new_tokens, bucket))
    stream = PromptStream(pairs, data.pairs_per_step, data.shuffle, job.config.seed)
    trainer = job.config.trainer
    total = trainer.total_steps or max(1, trainer.epochs * len(pairs) // data.pairs_per_step)
    return TuningData(stream, len(pairs), held_out, problems, positions, total)


def read_pairs(job: Job, source: str, split: str | None = None) -> list[SequenceGroup]:
    """Read demonstrations as groups of one response, identified by the row number.

    split: of a folder or a hub's dataset without one behind a colon; None is the only one.
    """
    data = job.config.data
    given = job.objects.datasets.get(source)
    options = {"given": given, "split": split, "variables": data.chat_template_kwargs}
    rows = read_demonstrations(source, job.tokenizer, data.tool_format, data.max_length, **options)
    largest = largest_id(chain.from_iterable((turns.prompt_ids, turns.response_ids) for turns in rows))
    check_token_ids(job.tokenizer, job.model, largest, source)
    return [SequenceGroup(t.prompt_ids, (t.response_ids,), (t.sampled,), (row,)) for row, t in enumerate(rows)]


def largest_id(sequences: Iterable[np.ndarray]) -> int:
    return max(int(ids.max()) for ids in sequences)


def held_out_share(
    pairs: list[SequenceGroup], share: float, seed: int
) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
    """Divide pairs into a part to train on and a share to hold out.

    The draw depends on the seed; both parts keep their order.
    """
    count = round(share * len(pairs))
    if share and not 0 < count < len(pairs):
        found = f"data.val_share is {share:g}, which holds out {count} of {len(pairs)} rows"
        raise UserError(f"{found}; set it to another, or give data.val_dataset.")
    drawn = set(np.random.default_rng([seed, HELD_OUT_DRAW]).permutation(len(pairs))[:count].tolist())
    parts = ([pair for row, pair in enumerate(pairs) if (row in drawn) == held] for held in (False, True))
    return tuple(parts)
