"""Weights & Biases and SwanLab, for those who have installed them; neither is a dependency.

A resumed job appears there as a run of its own, beginning with the step it resumed from.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder

TRACKERS = ("wandb", "swanlab")


class TrackerWriter:
    """Writes to a run of wandb or SwanLab that has begun; both log and finish in the same words."""

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def wandb_writer(
    folder: Path,
    project: str,
    run_name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    offline: bool = False,
) -> TrackerWriter:
    """Begin a Weights & Biases run that keeps its files in `folder/wandb`.

    settings: shown as the run's config. offline: `folder` only, for `wandb sync` later; otherwise WANDB_MODE decides,
    as everywhere. Raises UserError where the package is absent or the run cannot begin.
    """
    init = _package("wandb").init
    arguments = {"project": project, "name": run_name, "dir": str(folder), "config": dict(settings or {})}
    return _begin("wandb", init, Path(folder), arguments, offline)


def swanlab_writer(
    folder: Path,
    project: str,
    run_name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    offline: bool = False,
) -> TrackerWriter:
    """Begin a SwanLab run that keeps its files in `folder`; arguments and errors as with `wandb_writer`.

    offline: for `swanlab sync` later; otherwise SWANLAB_MODE decides.
    """
    init = _package("swanlab").init
    arguments = {"project": project, "experiment_name": run_name, "logdir": str(folder), "config": dict(settings or {})}
    return _begin("swanlab", init, Path(folder), arguments, offline)


def check_installed(loggers: Sequence[str]) -> None:
    """Raises UserError for a tracker among the loggers whose package cannot be imported."""
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


def _begin(
    name: str, init: Callable[..., Any], folder: Path, arguments: Mapping[str, Any], offline: bool
) -> TrackerWriter:
    """Begin a run. What keeps it from beginning (no account, no network) has many types and becomes one sentence."""
    make_folder(folder)
    try:
        return TrackerWriter(init(**arguments, mode="offline" if offline else None))
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(f"{name} cannot start a run ({reason}): log in to {name}, or use its offline mode") from error
