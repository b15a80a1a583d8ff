"""Where a run writes: looked at before any work, so that hours of training do not end at a bad path."""

from pathlib import Path

from mindrlhf.checkpoint.hf import check_replaceable
from mindrlhf.errors import UserError
from mindrlhf.metrics.files import make_folder

MODEL_FOLDER = "hf"  # of --save_ckpt_dir: the trained model
CRITIC_FOLDER = "critic"  # of --save_ckpt_dir: PPO's trained critic


def prepare_outputs(save_ckpt_dir: Path, output_dir: Path | None, save_data_file: Path | None = None) -> Path:
    """Makes the folders of the three flags and returns the one for metrics: `output_dir`, or that of `save_ckpt_dir`.

    Raises UserError when one cannot be made, or when what is to be written would take the place of something else.
    """
    output = output_dir or save_ckpt_dir.parent
    for folder in (output, save_ckpt_dir, save_data_file and save_data_file.parent):
        if folder:
            make_folder(folder)
    for name in (MODEL_FOLDER, CRITIC_FOLDER):
        check_replaceable(save_ckpt_dir / name)
    if save_data_file and save_data_file.is_dir():
        raise UserError(f"--save_data_file {save_data_file}: is a folder; give the name of a file.")
    return output
