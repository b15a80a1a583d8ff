"""Answers of a run for the page: an index, and packed texts.

A chunk is some steps' groups as JSON, gzip and base64; the page unpacks the chunks that it shows or searches. Equal
answers to a prompt with equal rewards are one entry, with a list of its samples.
"""

import base64
import gzip
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindrlhf.files.json import json_line
from mindrlhf.files.naming import ROLLOUTS_FOLDER, step_files
from mindrlhf.files.printable import shortened
from mindrlhf.report.groups import RolloutGroupText, read_groups

MOST_TEXT = 20_000  # characters of one prompt or completion that a report shows
MOST_SIDE = 384  # pixels of a picture that a report shows
MOST_TOKENS = 4000  # of one answer with figures that a report shows
CHUNK_BYTES = 2**20  # of JSON; a chunk of this size takes no further step
DIGITS = 4  # significant, of a reward in the index
COLUMNS = ("step", "prompt", "chunk", "different", "rewards")


@dataclass(frozen=True)
class StepAnswers:
    """One step's answers.

    groups: (prompt id, number of different answers, rewards) of each. texts: each group's content as JSON. rewards,
    lengths: float64[n] of all answers; rewards are NaN if unscored, lengths are in sampled tokens.
    """

    step: int
    groups: Sequence[tuple[int, int, list[float | None]]]
    texts: Sequence[bytes]
    rewards: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Answers:
    """Answers of a run: some of `all_steps` steps.

    chunks: name -> packed content. index: COLUMNS with an entry for each group, in the order of the chunks; `chunk`
    counts them from 0.
    """

    steps: Sequence[StepAnswers]
    all_steps: int
    chunks: Mapping[str, str]
    index: Mapping[str, list]


class AnswerReader:
    """Reader of answers that does not read or pack unchanged steps again.

    samples: answers per step, rounded up to whole groups. most_steps: number of steps, evenly chosen, the first and
    last included. None means all.
    """

    def __init__(self, samples: int | None = None, most_steps: int | None = None):
        self._samples = samples
        self._most_steps = most_steps
        self._steps: dict[Path, tuple[tuple[int, int], StepAnswers]] = {}
        self._packed: dict[str, str] = {}

    def read(self, folder: Path, last_step: int) -> Answers:
        """Read answers up to a step; an earlier run may have more."""
        files = {step: path for step, path in step_files(folder / ROLLOUTS_FOLDER).items() if step <= last_step}
        steps = [self._step(files[step], step) for step in _evenly(list(files), self._most_steps)]
        chunks: dict[str, str] = {}
        entries = []
        for part in _parts(steps):
            entries += [(one.step, prompt, len(chunks), *rest) for one in part for prompt, *rest in one.groups]
            content = b"[" + b",".join(text for one in part for text in one.texts) + b"]"
            name = hashlib.sha256(content).hexdigest()[:16]
            if name not in self._packed:
                self._packed[name] = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
            chunks[name] = self._packed[name]
        index = dict(zip(COLUMNS, map(list, zip(*entries, strict=True)), strict=True)) if entries else {}
        return Answers(steps, len(files), chunks, index)

    def _step(self, path: Path, step: int) -> StepAnswers:
        status = path.stat()
        stamp = status.st_mtime_ns, status.st_size
        if path not in self._steps or self._steps[path][0] != stamp:
            self._steps[path] = stamp, _step_answers(step, self._chosen(read_groups(path, step)))
        return self._steps[path][1]

    def _chosen(self, groups: Iterable[RolloutGroupText]) -> Iterator[RolloutGroupText]:
        left = math.inf if self._samples is None else self._samples
        for group in groups:
            if left > 0:
                yield group
            left -= len(group.samples)


def _evenly(steps: Sequence[int], most: int | None) -> list[int]:
    if most is None or most >= len(steps):
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / max(1, most - 1))] for place in range(most)]


def _parts(steps: Iterable[StepAnswers]) -> Iterator[list[StepAnswers]]:
    """Cut steps into chunks; further steps change only the last chunk."""
    part: list[StepAnswers] = []
    size = 0
    for one in steps:
        part.append(one)
        size += sum(map(len, one.texts))
        if size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _step_answers(step: int, groups: Iterable[RolloutGroupText]) -> StepAnswers:
    entries = []
    texts = []
    rewards = []
    lengths = []
    for group in groups:
        answers = list(map(answer_entry, group.answers()))
        own = [row["reward"] for row in group.samples]
        shown = [None if reward is None else float(f"{reward:.{DIGITS}g}") for reward in own]
        entries.append((group.prompt_id, len(answers), shown))
        content = {
            "step": step,
            "prompt": shortened(group.prompt, MOST_TEXT),
            "truth": group.ground_truth,
            "answers": answers,
        }
        if group.images:
            content["images"] = list(map(shown_image, group.images))
        texts.append(json_line(content).rstrip())
        rewards += own
        lengths += [row.get("response_length", 0) for row in group.samples]
    return StepAnswers(step, entries, texts, np.array(rewards, np.float64), np.array(lengths, np.float64))


def shown_image(path: Path) -> str | None:
    """Write a picture's file as a data URI, in small if it is large.

    None for a file that is not there or no picture.
    """
    try:
        with Image.open(path, formats=("PNG",)) as image:
            content = path.read_bytes()
            if max(image.size) > MOST_SIDE:
                image.thumbnail((MOST_SIDE, MOST_SIDE))
                buffer = BytesIO()
                image.save(buffer, "PNG")
                content = buffer.getvalue()
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def answer_entry(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe an answer that equal rows have.

    It has its text, `turns`, `pictures` of each turn, `tokens` and `notes` if there are any, its rewards, and
    `samples`: (index, advantage, sampled tokens, reason of its end) for each row. notes: (function and name, text) of
    all rows, each once.
    """
    first = rows[0]
    fields = ("sample_index", "advantage", "response_length", "finish_reason")
    answer = {
        "text": shortened(first["completion"], MOST_TEXT),
        "reward": first["reward"],
        "samples": [[row.get(name) for name in fields] for row in rows],
    }
    if turns := first.get("turns"):  # all turns together may be as long as one completion
        answer["turns"] = [(drawn, shortened(text, MOST_TEXT // len(turns))) for drawn, text in turns]
    if shown := first.get("turn_images"):
        answer["pictures"] = [list(map(shown_image, files)) for files in shown]
    if len(first.get("rewards") or {}) > 1:
        answer["rewards"] = first["rewards"]
    noted = [item for row in rows for item in (row.get("reward_notes") or {}).items()]
    if notes := [(f"{function} {name}", text) for function, texts in noted for name, text in texts.items()]:
        answer["notes"] = list(dict.fromkeys(notes))
    if tokens := next((row["tokens"] for row in rows if row.get("tokens")), None):
        answer["tokens"] = {name: values[:MOST_TOKENS] for name, values in tokens.items()}
        answer["more_tokens"] = max(0, len(tokens["text"]) - MOST_TOKENS)
    return answer
