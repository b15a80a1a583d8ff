"""Checked data of fine-tuning: demonstrations, held-out demonstrations, and held-out problems."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.model_card import ModelCard, describe
from mindrlhf.checkpoint.tokenizer import check_token_ids
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.sft import SFTDataSettings, SFTSettings
from mindrlhf.configs.validate import check_lengths
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.stream import PromptStream
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.job import Job
from mindrlhf.run.picture_rows import Shown, read_shown
from mindrlhf.run.training_data import read_problems
from mindrlhf.shapes import longest_position
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.types import Prompt

HELD_OUT_DRAW = 1  # alongside the seed, to draw the rows that `data.val_share` holds out


@dataclass(frozen=True)
class TuningData:
    """Data that fine-tuning reads.

    source: file or name of the pairs. stream: pairs of a prompt and the response to imitate. rows: number of rows to
    train on. held_out: pairs whose loss is measured. problems: prompts whose answers are scored. max_positions: of a
    padded sequence.
    """

    source: Path | str
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
            pictures = b"".join(picture.digest for part in pair.pictures for picture in part)
            checksum = zlib.crc32(b"".join(array.tobytes() for array in content) + pictures, checksum)
        return {"count": self.rows, "crc32": checksum}

    def card(self, config: SFTSettings, path: str | None) -> ModelCard:
        """Make the card of the trained model; path: of its first weights."""
        pairs = f"{self.total_steps} steps of {config.data.pairs_per_step} pairs"
        method = f"supervised fine-tuning on answers; {pairs}"
        return describe(path, method, self.source, f"{self.rows} pairs", (), config)


def read_tuning_data(job: Job) -> TuningData:
    """Read and check the data of fine-tuning. Raises `UserError`."""
    data = job.config.data
    bucket = job.config.train.length_bucket

    def read(source: str, split: str | None = None) -> list[SequenceGroup]:
        return read_pairs(source, job.tokenizer, job.model, data, job.objects.datasets.get(source), split)

    every_pair = read(job.flags.mind_dataset_dir, "train")
    pairs, held_out = held_out_share(every_pair, data.val_share, job.config.seed)
    if data.val_dataset:
        held_out = read(data.val_dataset)
    every = [*pairs, *held_out]
    longest = [max(len(part(pair)) for pair in every) for part in (lambda p: p.prompt_ids, lambda p: p.responses[0])]
    positions = longest_position(*longest, bucket)
    problems = []
    if data.val_problems:
        reading = job.tokenizer, GRPOSettings(), job.objects.datasets
        limit = job.config.validation.limit
        problems = read_problems(data.val_problems, *reading, limit=limit, vision=job.model.vision)
        prompts = [problem.token_ids for problem in problems]
        check_token_ids(job.tokenizer, job.model, largest_id(prompts), data.val_problems)
        prompt = max(map(len, prompts))
        check_lengths(job.config, job.train, job.model, prompt, "validation")
        positions = max(positions, longest_position(prompt, job.config.validation.max_new_tokens, bucket))
    stream = PromptStream(pairs, data.pairs_per_step, data.shuffle, job.config.seed)
    trainer = job.config.trainer
    total = trainer.total_steps or max(1, trainer.epochs * len(pairs) // data.pairs_per_step)
    return TuningData(job.flags.mind_dataset_dir, stream, len(pairs), held_out, problems, positions, total)


def read_pairs(
    source: str,
    tokenizer: Tokenizer,
    model: ModelConfig,
    settings: SFTDataSettings,
    given: Sequence[Mapping[str, Any]] | None,
    split: str | None = None,
) -> list[SequenceGroup]:
    """Read demonstrations as groups of one response, identified by the row number.

    given: rows of the calling program, instead of a file's. split: of a folder or a hub's dataset without one behind a
    colon; None is the only one.
    """
    options = {"given": given, "split": split, "variables": settings.chat_template_kwargs}
    limits = settings.tool_format, settings.max_length
    if model.vision:
        shown = read_shown(source, tokenizer, model.vision, *limits, **options)
    else:
        shown = [Shown(turns) for turns in read_demonstrations(source, tokenizer, *limits, **options)]
    rows = [one.turns for one in shown]
    largest = largest_id(chain.from_iterable((turns.prompt_ids, turns.response_ids) for turns in rows))
    check_token_ids(tokenizer, model, largest, source)
    pictures = [(one.prompt, one.response) if one.prompt or one.response else () for one in shown]
    return [
        SequenceGroup(t.prompt_ids, (t.response_ids,), (t.sampled,), (row,), own)
        for row, (t, own) in enumerate(zip(rows, pictures, strict=True))
    ]


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
