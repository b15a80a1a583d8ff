"""Settings of metrics outputs, shared by all kinds of runs."""

from typing import Any, Literal

from pydantic import Field, field_validator

from mindrlhf.configs.base import Settings

Logger = Literal["console", "jsonl", "tensorboard", "wandb", "swanlab", "mlflow", "trackio"]


class TrackingSettings(Settings):
    """Writers of each step's metrics."""

    loggers: tuple[Logger, ...] = ("console", "jsonl", "tensorboard")
    """Writers of the metrics: console, jsonl (which `mindrlhf report` reads), tensorboard, wandb, swanlab, mlflow,
    trackio (verl trainer.logger, TRL report_to)."""
    log_every: int = Field(1, ge=1)
    """Steps between two lines of the console; all other writers get every step (TRL logging_steps)."""
    project_name: str = "mindrlhf"
    """Project name in trackers: wandb, swanlab, mlflow, trackio (verl trainer.project_name, TRL project)."""
    experiment_name: str | None = None
    """Name of the run in trackers; null lets the tracker choose (verl trainer.experiment_name, TRL run_name)."""
    trackers_offline: bool = False
    """Trackers write to this machine only; runs of wandb and swanlab can be synchronised later."""

    @field_validator("loggers", mode="before")
    @classmethod
    def _no_csv(cls, loggers: Any) -> Any:
        if isinstance(loggers, list | tuple) and "csv" in loggers:
            raise ValueError(
                "csv is not written during a run; take jsonl, and make a table of it with "
                "pandas.read_json('metrics.jsonl', lines=True).to_csv('metrics.csv')"
            )
        return tuple(loggers) if isinstance(loggers, list) else loggers
