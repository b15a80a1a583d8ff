"""Outputs of a run for people: metrics, sampled rollouts, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from mindrlhf.configs.base import Settings
from mindrlhf.configs.problems import build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json_lines
from mindrlhf.files.naming import ROLLOUTS_FOLDER, TEXT, step_files, step_path
from mindrlhf.files.settings_file import read_settings
from mindrlhf.metrics.writers import METRICS_FILE, read_metrics, run_folder

SHARED = ("step", "prompt_id", "prompt", "ground_truth")  # the same in all rows of a group


class RolloutRow(Settings):
    """Row of a rollout dump, with other keys too."""

    model_config = ConfigDict(extra="ignore", strict=True)

    prompt_id: int
    prompt: str
    completion: str
    reward: float | None
    rewards: dict[str, float | None] | None = None
    response_length: int = 0
    ground_truth: str | None = None
    turns: list[list[bool | str]] | None = None


@dataclass(frozen=True)
class RolloutGroupText:
    """Prompt with its answers as text; samples: rows without the prompt's own columns."""

    step: int
    prompt_id: int
    prompt: str
    ground_truth: str | None
    samples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Run:
    """Outputs of one run.

    rows: a dict a step, with `step`. groups: see `sample_rollouts`. rollout_steps: with a dump. settings: dotted name
    -> value as text, empty without a settings file.
    """

    label: str
    folder: Path
    rows: Sequence[Mapping[str, float]]
    groups: Sequence[RolloutGroupText]
    rollout_steps: Sequence[int]
    settings: Mapping[str, str]


def read_run(path: Path, label: str, samples: int, most_steps: int, begun: bool = True) -> Run:
    """Read a run from its folder or its metrics file. Raises UserError.

    samples, most_steps: see `sample_rollouts`. begun: False accepts a run without metrics.
    """
    folder = run_folder(Path(path))
    metrics = folder / METRICS_FILE
    if begun and not metrics.is_file():
        raise UserError(f"{path}: there is no {METRICS_FILE} in it; give the output folder of a run.")
    rows = read_metrics(metrics) if metrics.is_file() else []
    # Files of later steps are those of an earlier, longer run in the same folder.
    done = rows[-1]["step"] if rows else 0
    steps = [step for step in step_files(folder / ROLLOUTS_FOLDER) if step <= done]
    groups = sample_rollouts(folder / ROLLOUTS_FOLDER, steps, samples, most_steps)
    return Run(label, folder, rows, groups, steps, flatten(read_settings(folder)))


def sample_rollouts(folder: Path, steps: Sequence[int], samples: int, most_steps: int) -> list[RolloutGroupText]:
    """Select the first groups of evenly chosen steps, the first and last step included.

    samples: responses of a step, rounded up to whole groups. most_steps: how many steps, at most.
    """
    count, last = min(most_steps, len(steps)), len(steps) - 1
    chosen = [steps[round(place * last / max(1, count - 1))] for place in range(count)]
    groups = []
    for step in chosen:
        wanted = samples
        for group in read_groups(folder, step):
            if wanted > 0:
                groups.append(group)
                wanted -= len(group.samples)
    return groups


def read_groups(folder: Path, step: int) -> list[RolloutGroupText]:
    """Read a step's rollouts by prompt; UserError for content that no run has written."""
    path = step_path(folder, step, TEXT)
    together: dict[int, list[dict[str, Any]]] = {}
    for number, row in enumerate(read_json_lines(path), start=1):
        build(RolloutRow, row, Layer(row, {(): f"{path}, line {number}"}), strict=False)
        together.setdefault(row["prompt_id"], []).append(row)
    groups = []
    for prompt_id, rows in together.items():
        samples = tuple({key: value for key, value in row.items() if key not in SHARED} for row in rows)
        groups.append(RolloutGroupText(step, prompt_id, rows[0]["prompt"], rows[0].get("ground_truth"), samples))
    return groups


def flatten(settings: Any, name: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted names with values as text; lists stay whole."""
    if isinstance(settings, Mapping) and settings:
        inner = [flatten(value, f"{name}.{key}" if name else str(key)) for key, value in settings.items()]
        return {key: value for group in inner for key, value in group.items()}
    return {name: "null" if settings is None else str(settings)} if name else {}


def differing(runs: Sequence[Run]) -> list[str]:
    """List the settings that differ between the runs that have settings, by name."""
    known = [run.settings for run in runs if run.settings]
    names = sorted({name for settings in known for name in settings})
    return [name for name in names if len({settings.get(name) for settings in known}) > 1]
