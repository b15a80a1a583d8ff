"""Groups of answers as texts, read from a run's JSONL files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from mindrlhf.configs.base import Settings
from mindrlhf.configs.problems import build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.files.json import read_json_lines
from mindrlhf.files.naming import image_path

SHARED = ("step", "prompt_id", "prompt", "ground_truth", "images")  # the same in all rows of a group


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Row(Settings):
    model_config = ConfigDict(extra="ignore", strict=True)


class TokenRows(_Row):
    """Figures of an answer's tokens, in the order of the response."""

    text: list[str]
    sampled: list[int]
    advantage: list[float | None] = []
    ratio: list[float | None] = []
    entropy: list[float | None] = []
    clipped: list[float | None] = []


class RolloutRow(_Row):
    """Row of a rollout dump, which may have other keys too."""

    prompt_id: int
    prompt: str
    completion: str
    reward: float | None
    sample_index: int = 0
    rewards: dict[str, float | None] | None = None
    advantage: float | None = None
    response_length: int = 0
    finish_reason: str | None = None
    ground_truth: str | None = None
    turns: list[Annotated[list[bool | str], Field(min_length=2, max_length=2)]] | None = None
    tokens: TokenRows | None = None
    reward_notes: dict[str, dict[str, str]] = {}
    images: list[Digest] = []
    turn_images: list[list[Digest]] | None = None


@dataclass(frozen=True)
class RolloutGroupText:
    """Prompt with its answers as text.

    samples: rows without the prompt's own columns; `turn_images` are files. images: files of the prompt's pictures.
    """

    step: int
    prompt_id: int
    prompt: str
    ground_truth: str | None
    samples: tuple[Mapping[str, Any], ...]
    images: tuple[Path, ...] = ()

    def answers(self) -> list[list[Mapping[str, Any]]]:
        """Put samples with equal texts and rewards together.

        Best first, more frequent ones before others.
        """
        found: dict[tuple, list[Mapping[str, Any]]] = {}
        for row in self.samples:
            turns = tuple(map(tuple, row.get("turns") or ()))
            shown = tuple(map(tuple, row.get("turn_images") or ()))
            found.setdefault((row["completion"], turns, shown, row["reward"]), []).append(row)
        return sorted(found.values(), key=lambda rows: (-_or_least(rows[0]["reward"]), -len(rows)))


def read_groups(path: Path, step: int) -> list[RolloutGroupText]:
    """Read a step's answers by prompt; UserError for content that no run has written."""
    together: dict[int, list[dict[str, Any]]] = {}
    for number, row in enumerate(read_json_lines(path), start=1):
        build(RolloutRow, row, Layer(row, {(): f"{path}, line {number}"}), strict=False)
        if named := row.get("turn_images"):
            row["turn_images"] = [[image_path(path.parent, name) for name in names] for names in named]
        together.setdefault(row["prompt_id"], []).append(row)
    groups = []
    for prompt_id, rows in together.items():
        samples = tuple({key: value for key, value in row.items() if key not in SHARED} for row in rows)
        first = rows[0]
        images = tuple(image_path(path.parent, name) for name in first.get("images") or ())
        groups.append(RolloutGroupText(step, prompt_id, first["prompt"], first.get("ground_truth"), samples, images))
    return groups


def _or_least(reward: float | None) -> float:
    return -math.inf if reward is None else reward
