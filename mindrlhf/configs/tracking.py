"""Settings of length and metrics outputs, shared by all kinds of runs."""

from typing import Any, Literal

from pydantic import Field, field_validator

from mindrlhf.configs.base import Settings

Logger = Literal["console", "jsonl", "tensorboard", "wandb", "swanlab"]


class TrackingSettings(Settings):
    """Writers of each step's metrics."""

    loggers: tuple[Logger, ...] = ("console", "jsonl", "tensorboard")
    """What writes the metrics: console, jsonl (which `mindrlhf report` reads), tensorboard, wandb, swanlab (verl
    trainer.logger, TRL report_to)."""
    project_name: str = "mindrlhf"
    """Project of wandb and swanlab (verl trainer.project_name)."""
    experiment_name: str | None = None
    """Name of the run in wandb and swanlab; null is their choice (verl trainer.experiment_name)."""
    trackers_offline: bool = False
    """wandb and swanlab write below the output folder only, to be synchronised later."""

    @field_validator("loggers", mode="before")
    @classmethod
    def _no_csv(cls, loggers: Any) -> Any:
        if isinstance(loggers, list | tuple) and "csv" in loggers:
            raise ValueError(
                "csv is not written during a run; take jsonl, and make a table of it with "
                "pandas.read_json('metrics.jsonl', lines=True).to_csv('metrics.csv')"
            )
        return tuple(loggers) if isinstance(loggers, list) else loggers


class RunSettings(TrackingSettings):
    """Length of a run, and its outputs."""

    total_steps: int | None = Field(None, ge=1)
    """Steps of the run, or of its record that are replayed; null is epochs x (rows / rows per step) (verl
    trainer.total_training_steps, TRL max_steps)."""
    epochs: int = Field(1, ge=1)
    """Passes over the rows when total_steps is not given (verl trainer.total_epochs, TRL num_train_epochs)."""
    progress: bool = True
    """Show progress bars on a terminal."""
