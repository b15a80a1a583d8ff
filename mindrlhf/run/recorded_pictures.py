"""Pictures of recorded prompts, which a record names and does not hold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.run.picture_prompts import DIGESTS
from mindrlhf.types import Experience, Prompt

Recorded = list[tuple[int, list[Experience]]]


def with_pictures(recorded: Recorded, prompts: Sequence[Prompt], record: Path, rows: str) -> Recorded:
    """Give recorded prompts the pictures of the rows that they were made of.

    prompts: of the rows. Raises UserError if a prompt is not one of them, or has had other pictures.
    """
    known = {prompt.id: prompt for prompt in prompts}
    return [(step, [_shown(one, known, step, record, rows) for one in experiences]) for step, experiences in recorded]


def _shown(experience: Experience, known: dict[int, Prompt], step: int, record: Path, rows: str) -> Experience:
    prompt = experience.group.prompt
    own = known.get(prompt.id)
    # An environment's first text moves a prompt's end to the response.
    same = own is not None and np.array_equal(own.token_ids[: len(prompt.token_ids)], prompt.token_ids)
    if not same or _digests(own) != _digests(prompt):
        found = f"{record}: step {step} has a prompt that is not row {prompt.id} of {rows}, or had other images"
        raise UserError(f"{found}; give --mind_dataset_dir the rows of the recorded run.")
    return replace(experience, group=replace(experience.group, prompt=prompt.showing(own)))


def _digests(prompt: Prompt) -> str:
    return prompt.fields.get(DIGESTS, "")
