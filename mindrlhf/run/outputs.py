"""Output paths, checked before training so that a bad path fails at once."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.checkpoint.hf import check_replaceable
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import clean, make_folder, sync, sync_folder, writing
from mindrlhf.files.folder_lock import lock_folders
from mindrlhf.files.naming import ADAPTER_FOLDER, ROLLOUTS_FOLDER, TEXT, VALIDATION_FOLDER, step_files
from mindrlhf.metrics.writers import METRICS_FILE
from mindrlhf.model_roles import EXPORTED
from mindrlhf.records.writer import PART


def prepare_outputs(save_ckpt_dir: Path, output_dir: Path | None, save_data_file: Path | None = None) -> Path:
    """Make the folders of the three flags; returns the one for metrics."""
    output = output_dir or save_ckpt_dir.parent
    for folder in (output, save_ckpt_dir, save_data_file and save_data_file.parent):
        if folder:
            make_folder(folder)
    for name in (*(role.folder for role in EXPORTED), ADAPTER_FOLDER):
        check_replaceable(save_ckpt_dir / name)
    if save_data_file and save_data_file.is_dir():
        raise UserError(f"--save_data_file {save_data_file}: is a folder; give the name of a file.")
    return output


def lock_outputs(
    world: World, output: Path, save_ckpt_dir: Path, save_data_file: Path | None = None
) -> AbstractContextManager[None]:
    """Keep other runs out of the outputs; UserError if one is writing."""
    folders = {"--save_ckpt_dir": save_ckpt_dir, "--output_dir": output}
    if save_data_file:
        folders["--save_data_file"] = save_data_file.parent
    return lock_folders(folders) if world.rank == 0 else nullcontext()


def clean_outputs(collectives: Collectives, output: Path, save_ckpt_dir: Path, save_data_file: Path | None) -> None:
    """Remove half-written leftovers of killed runs on the first rank; all wait."""
    if collectives.is_first:
        folders = {output, output / ROLLOUTS_FOLDER, output / VALIDATION_FOLDER, save_ckpt_dir}
        for folder in folders | ({save_data_file.parent} if save_data_file else set()):
            clean(folder)
    collectives.barrier()


class Outputs:
    """Files of a run's steps, for checkpoints that imply them.

    output: folder of metrics and responses. parts: folder of the MindRecord's parts, or None.
    """

    def __init__(self, output: Path, parts: Path | None = None):
        self._metrics = output / METRICS_FILE
        texts = {output / name: TEXT for name in (ROLLOUTS_FOLDER, VALIDATION_FOLDER)}
        self._folders = {**texts, **({parts: PART} if parts else {})}
        self._synced = -1  # step

    def sync(self) -> None:
        """Wait until all files so far are on the disk."""
        newest = self._synced
        for folder, suffix in self._folders.items():
            new = {step: path for step, path in step_files(folder, suffix).items() if step > self._synced}
            for path in new.values():
                _sync(path)
            if new:
                sync_folder(folder)
            newest = max([newest, *new])
        if self._metrics.exists():
            _sync(self._metrics)
        self._synced = newest


def _sync(path: Path) -> None:
    with writing(path):
        sync(path)


def forget_after(output: Path, step: int) -> None:
    """Remove the JSONL files of steps that a resumed run does again."""
    for folder in (output / ROLLOUTS_FOLDER, output / VALIDATION_FOLDER):
        for number, path in step_files(folder).items():
            if number > step:
                path.unlink()
