"""Writers of metrics to wandb, SwanLab, MLflow and trackio."""

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder


class TrackedRun(Protocol):
    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step."""

    def finish(self) -> None:
        """End the run."""


class TrackerWriter:
    """Writer to a tracker, with its files in `folder`; trackio's are in TRACKIO_DIR.

    settings: shown as the run's config. Offline runs stay on this machine (`wandb sync`, `swanlab sync`); otherwise
    the package's own variables decide: WANDB_MODE, SWANLAB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID. UserError if
    the run cannot begin.
    """

    def __init__(self, name: str, folder: Path, tracking: TrackingSettings, settings: Mapping[str, Any] | None = None):
        package = _package(name)
        make_folder(folder)
        try:
            self._run = TRACKERS[name](package, folder, tracking, dict(settings or {}))
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            advice = f"log in to {name}, or use its offline mode"
            raise UserError(f"{name} cannot start a run ({reason}): {advice}") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_installed(loggers: Sequence[str]) -> None:
    """Raise UserError for a logger whose package cannot be imported."""
    for name in TRACKERS.keys() & set(loggers):
        _package(name)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = f"trainer.loggers has {name!r}, which is not installed"
        raise UserError(f"{found}; run `pip install {name}`, or take it out.") from error


def _named(folder_key: str, name_key: str) -> "Start":
    """Start runs of a package with these keys for folder and run name."""

    def start(package: ModuleType, folder: Path, tracking: TrackingSettings, config: dict[str, Any]) -> TrackedRun:
        own = {folder_key: str(folder), name_key: tracking.experiment_name}
        mode = "offline" if tracking.trackers_offline else None
        return package.init(project=tracking.project_name, config=config, mode=mode, **own)

    return start


def _trackio(package: ModuleType, folder: Path, tracking: TrackingSettings, config: dict[str, Any]) -> TrackedRun:
    if tracking.trackers_offline:
        for place in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(place, None)
    return package.init(project=tracking.project_name, name=tracking.experiment_name, config=config)


class _MlflowRun:
    """MLflow's current run, in a database in `folder` unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, package: ModuleType, folder: Path, tracking: TrackingSettings, config: dict[str, Any]):
        self._package = package
        if tracking.trackers_offline or "MLFLOW_TRACKING_URI" not in os.environ:
            package.set_tracking_uri(f"sqlite:///{folder.absolute()}/mlflow.db")
        package.set_experiment(tracking.project_name)
        package.start_run(run_name=tracking.experiment_name)
        package.log_params(config)

    def log(self, values: dict[str, float], step: int) -> None:
        """Record one step; MLflow's names have letters, digits and few signs."""
        named = {re.sub(r"[^\w./ :-]", "_", name.replace("@", "_at_")): value for name, value in values.items()}
        self._package.log_metrics(named, step=step)

    def finish(self) -> None:
        self._package.end_run()


Start = Callable[[ModuleType, Path, TrackingSettings, dict[str, Any]], TrackedRun]

TRACKERS: dict[str, Start] = {
    "wandb": _named("dir", "name"),
    "swanlab": _named("logdir", "experiment_name"),
    "mlflow": _MlflowRun,
    "trackio": _trackio,
}
