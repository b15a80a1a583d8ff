"""Outputs of a run for people: metrics, answers, settings, and its starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.configs.layers import flatten
from mindrlhf.errors import UserError
from mindrlhf.files.settings_file import STARTS, read_settings
from mindrlhf.metrics.writers import METRICS_FILE, read_metrics, run_folder
from mindrlhf.report.answers import AnswerReader, Answers


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of one run.

    rows: a dict per step, with `step`. settings: of the settings file, empty without one. starts: date, host, system,
    command, folder and commit of the first start, and of each start of a resumed run.
    """

    label: str
    folder: Path
    rows: Sequence[Mapping[str, float]]
    answers: Answers
    settings: Mapping[str, Any]
    starts: Sequence[Mapping[str, Any]]

    @property
    def flat_settings(self) -> dict[str, str]:
        """Settings as dotted name -> value as text."""
        return flatten(self.settings)


def read_run(path: Path, label: str, reader: AnswerReader, begun: bool = True) -> RunOutputs:
    """Read a run from its folder or its metrics file. Raises UserError.

    begun: False accepts a run without metrics.
    """
    folder = run_folder(Path(path))
    metrics = folder / METRICS_FILE
    if begun and not metrics.is_file():
        raise UserError(f"{path}: there is no {METRICS_FILE} in it; give the output folder of a run.")
    rows = read_metrics(metrics) if metrics.is_file() else []
    answers = reader.read(folder, rows[-1]["step"] if rows else 0)
    settings = read_settings(folder)
    starts = settings.pop(STARTS, None)
    starts = [one for one in starts if isinstance(one, Mapping)] if isinstance(starts, list) else []
    return RunOutputs(label, folder, rows, answers, settings, starts)


def differing(runs: Sequence[RunOutputs]) -> list[str]:
    """List the settings that differ between the runs that have settings, by name."""
    known = [settings for run in runs if (settings := run.flat_settings)]
    names = sorted({name for settings in known for name in settings})
    return [name for name in names if len({settings.get(name) for settings in known}) > 1]
