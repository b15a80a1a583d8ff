"""A folder that another run is writing to is refused before anything in it is touched."""

import os
import socket

import jobs
import pytest

from mindrlhf.files.folder_lock import lock_folders


@pytest.mark.parametrize(
    ("command", "flag", "held"),
    [
        ("train", "--save_ckpt_dir", "run/ckpt"),
        ("train", "--output_dir", "run"),
        ("train", "--save_data_file", "data"),
        ("sft", "--save_ckpt_dir", "run/ckpt"),
        ("sft", "--output_dir", "run"),
    ],
)
def test_a_folder_in_use(task, tmp_path, capsys, command, flag, held):
    folder = tmp_path / held
    folder.mkdir(parents=True)
    (folder / ".metrics.01234567.tmp").write_text("half of a file")
    flags = {"save_data_file": tmp_path / "data" / "rollouts.mindrecord"} if command == "train" else {}
    argv = getattr(task, command)(tmp_path / "run", **flags)
    with lock_folders({"--output_dir": folder}):
        before = jobs.files(tmp_path)
        assert jobs.call(argv) == 2
        assert jobs.files(tmp_path) == before
    told = capsys.readouterr().err
    assert told == (
        f"mindrlhf {command}: {folder}: another run is writing there (process {os.getpid()} on "
        f"{socket.gethostname()}); wait for its end, or give {flag} another folder.\n"
    )
