"""Weights & Biases and SwanLab, both optional.

A resumed job appears there as a run of its own, beginning with the step it resumed from.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder

TRACKERS = {"wandb": ("dir", "name"), "swanlab": ("logdir", "experiment_name")}  # keys of `init`: folder, run name


class TrackerWriter:
    """Writer to a started run of wandb or SwanLab, whose calls are equal."""

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(
    name: str, folder: Path, tracking: TrackingSettings, settings: Mapping[str, Any] | None = None
) -> TrackerWriter:
    """Begin a run of a tracker that keeps its files in `folder`.

    settings: shown as the run's config. Offline runs are in `folder` only, for `wandb sync` or `swanlab sync` later;
    otherwise WANDB_MODE or SWANLAB_MODE decides, as everywhere. Raises UserError where the run cannot begin.
    """
    init, (folder_key, name_key) = _package(name).init, TRACKERS[name]
    make_folder(folder)
    shown = {"project": tracking.project_name, name_key: tracking.experiment_name, "config": dict(settings or {})}
    try:
        run = init(**shown, **{folder_key: str(folder)}, mode="offline" if tracking.trackers_offline else None)
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(f"{name} cannot start a run ({reason}): log in to {name}, or use its offline mode") from error
    return TrackerWriter(run)


def check_installed(loggers: Sequence[str]) -> None:
    """Raise UserError for a logger whose package cannot be imported."""
    for name in loggers:
        if name in TRACKERS:
            _package(name)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"trainer.loggers has {name!r}, which is not installed; run `pip install {name}`, or take it out."
        ) from error
