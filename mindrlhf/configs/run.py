"""Settings of a run that are shared by all kinds of training."""

from typing import Literal

from pydantic import Field

from mindrlhf.backend.comm.patience import RANK_TIMEOUT_S
from mindrlhf.configs.tracking import TrackingSettings

HELD_OUT = ("val-", "val/")  # beginnings of metrics on held-out data


class RunSettings(TrackingSettings):
    """Length of a run, its measurements, checkpoints and outputs."""

    total_steps: int | None = Field(None, ge=1)
    """Steps of the run, or steps of the record to replay; null is epochs x (rows / rows per step) (verl
    trainer.total_training_steps, TRL max_steps)."""
    epochs: int = Field(1, ge=1)
    """Passes over the rows when total_steps is not given (verl trainer.total_epochs, TRL num_train_epochs)."""
    progress: bool = True
    """Show progress bars on a terminal."""
    save_freq: int | None = Field(None, ge=1)
    """Steps between checkpoints; the last step has one too; null writes none (verl trainer.save_freq, TRL save_steps,
    MindRLHF save_ckpt_interval)."""
    save_max_ckpt_num: int | None = Field(5, ge=1)
    """Number of newest checkpoints to keep; null keeps all (verl trainer.max_actor_ckpt_to_keep, TRL save_total_limit,
    MindRLHF save_max_ckpt_num)."""
    save_best_metric: str | None = None
    """Metric whose best step gets a checkpoint that is kept, val-core/gsm8k/acc/mean@1 for example (TRL
    metric_for_best_model)."""
    save_best_mode: Literal["max", "min"] = "max"
    """Better direction of save_best_metric: max for larger, min for smaller (TRL greater_is_better)."""
    early_stop_patience: int | None = Field(None, ge=1)
    """End the run after this many measurements of save_best_metric in a row without a new best; null never does (TRL
    early_stopping_patience)."""
    export_best: bool = False
    """Export the model of the best step of save_best_metric in place of the last one (TRL load_best_model_at_end)."""
    async_save: bool = False
    """Write checkpoints while training goes on; data not yet written when an update begins is copied in memory (verl
    checkpoint.async_save)."""
    resume_mode: Literal["disable", "auto", "resume_path"] = "disable"
    """auto continues from the newest whole checkpoint of --save_ckpt_dir, resume_path from resume_from_path;
    --resume_training sets both (verl trainer.resume_mode)."""
    resume_from_path: str | None = None
    """A step_N folder, or a folder of step_N folders (verl trainer.resume_from_path)."""
    test_freq: int | None = Field(None, ge=1)
    """Steps between measurements of held-out data, the last step included; null never measures (verl
    trainer.test_freq, TRL eval_steps)."""
    val_before_train: bool = True
    """Measure held-out data before the first step too (verl trainer.val_before_train, TRL
    eval_on_start)."""
    val_only: bool = False
    """Measure held-out data and stop (verl trainer.val_only)."""
    max_bad_updates: int = Field(5, ge=1)
    """Updates in a row that may be skipped because a loss or gradient is not finite; the run then saves its state and
    stops."""
    rank_timeout_s: float = Field(RANK_TIMEOUT_S, gt=0.0)
    """Seconds that a rank which does not answer at the start, or on CPU stands still later (stopped, swapping, its host
    frozen), is waited for; then all ranks end with a sentence that names it and its phase."""
    stop_signals: tuple[Literal["SIGUSR1", "SIGUSR2", "SIGXCPU"], ...] = ()
    """Further signals at which the run saves its state and stops, as at SIGTERM, SIGINT and SIGHUP: queues send one
    before a job's time is over (Slurm's option signal=USR1@300)."""
    max_host_memory_gb: float | None = Field(None, gt=0.0)
    """Memory of one process, in GiB, above which the run saves its state and stops; null is no limit (MindRLHF
    host_memory_protection)."""

    @property
    def best(self) -> tuple[str | None, Literal["max", "min"]]:
        """Metric whose best step is kept, and its better direction."""
        return self.save_best_metric, self.save_best_mode
