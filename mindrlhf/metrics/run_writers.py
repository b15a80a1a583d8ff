"""Writers of a run, by name, and their places in its output folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.metrics.console import REWARD, ConsoleWriter
from mindrlhf.metrics.trackers import open_tracker
from mindrlhf.metrics.writers import JsonlWriter, TensorBoardWriter, Writer, Writers, read_metrics

METRICS_FILE = "metrics.jsonl"


def open_writers(
    folder: Path,
    tracking: TrackingSettings,
    total_steps: int,
    start_step: int = 0,
    verbose: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Writers:
    """Open the writers that are set, in `folder`.

    They write `metrics.jsonl`, `tensorboard/`, `wandb/`, `swanlab/`.
    start_step: the first step this process will write. Later content of the files is cut off; 0 begins a new file.
    verbose: print every metric in verl's form as well.
    settings: of the run, which wandb and SwanLab show with it.

    Raises UserError for a package that is not installed, or a folder that cannot be written; files of an earlier run
    are then as they were.
    """
    folder = Path(folder)
    metrics = folder / METRICS_FILE
    earlier = read_metrics(metrics) if start_step and metrics.exists() else []
    rewards = [row[REWARD] for row in earlier if row["step"] < start_step and REWARD in row]
    makers = {
        "wandb": lambda: open_tracker("wandb", folder, tracking, settings),
        "swanlab": lambda: open_tracker("swanlab", folder / "swanlab", tracking, settings),
        "console": lambda: ConsoleWriter(total_steps, rewards, verbose),
        "tensorboard": lambda: TensorBoardWriter(folder / "tensorboard", start_step),
        "jsonl": lambda: JsonlWriter(metrics, start_step),
    }
    opened: list[Writer] = []
    try:
        # In this order: what may be missing or refuse comes first, what cuts an earlier run's file comes last.
        for name, make in makers.items():
            if name in tracking.loggers:
                opened.append(make())
    except BaseException:
        Writers(opened).close()
        raise
    return Writers(opened)


def run_folder(path: Path) -> Path:
    """Find the output folder of a run from the folder or its metrics file."""
    return path.parent if path.name == METRICS_FILE else path


def run_labels(paths: Sequence[Path], labels: Sequence[str] | None = None) -> list[str]:
    """Name each run by its label or its folder, and number equal names."""
    names = list(labels or (run_folder(path).resolve().name for path in paths))
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
