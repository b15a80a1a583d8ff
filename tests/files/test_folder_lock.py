"""One run at a time in a folder, whoever comes first, and however it ends."""

import errno
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys

import pytest

from mindrlhf.errors import UserError
from mindrlhf.files.folder_lock import LOCK_FILE, lock_folders

# Tries at a given moment; who gets the folder adds a line to a file there, bit by bit, and leaves when it is told to.
HOLDER = """
import os, sys, time
from pathlib import Path
from mindrlhf.files.folder_lock import lock_folders
from mindrlhf.errors import UserError
folder = Path(sys.argv[1])
print("here", flush=True)
time.sleep(float(sys.stdin.readline()))
try:
    with lock_folders({"--output_dir": folder}):
        print("locked", flush=True)
        with (folder / "rollouts").open("a") as file:
            for letter in f"{os.getpid()}\\n":
                file.write(letter)
                file.flush()
        sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""


def holder(folder) -> subprocess.Popen:
    """A process that is about to lock the folder, some seconds after it has read how many."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    return process


def tell(process: subprocess.Popen, line: object = "") -> None:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def refusal(folder, process) -> str:
    return (
        f"{folder}: another run is writing there (process {process.pid} on {socket.gethostname()}); wait for its end, "
        "or give --output_dir another folder."
    )


def test_the_second_is_refused_and_told_who_is_there(tmp_path):
    first = holder(tmp_path)
    tell(first, 0)
    assert first.stdout.readline() == "locked\n"
    with pytest.raises(UserError) as caught, lock_folders({"--output_dir": tmp_path}):
        pass
    assert str(caught.value) == refusal(tmp_path, first)
    tell(first)
    assert first.wait(20) == 0
    with lock_folders({"--output_dir": tmp_path}):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()} {socket.gethostname()}"
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_holder_that_is_killed_keeps_nobody_out(tmp_path):
    first = holder(tmp_path)
    tell(first, 0)
    assert first.stdout.readline() == "locked\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with lock_folders({"--output_dir": tmp_path}):
        pass


def test_flags_that_name_the_same_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with lock_folders({"--save_ckpt_dir": tmp_path, "--output_dir": tmp_path / "link"}):
        pass


def test_of_several_folders_all_or_none(tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    both = {"--save_ckpt_dir": mine, "--output_dir": theirs}
    with lock_folders({"--output_dir": theirs}):
        with pytest.raises(UserError, match=f"{theirs}.*give --output_dir another"), lock_folders(both):
            pass
        assert list(mine.iterdir()) == []


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def unknown(file, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with lock_folders({"--output_dir": tmp_path}):
        pass
    assert "has no locks" in caplog.text


def test_a_folder_that_cannot_be_written_to(tmp_path):
    message = "cannot be locked .*give --output_dir a folder"
    with pytest.raises(UserError, match=message), lock_folders({"--output_dir": tmp_path / "none"}):
        pass


def together(folder, rng: random.Random) -> None:
    """Two processes lock a folder at about the same moment: one writes there, and the other hears who that is."""
    pair = [holder(folder), holder(folder)]
    for process in pair:
        tell(process, rng.uniform(0, 0.002))
    said = [process.stdout.readline().strip() for process in pair]
    assert said.count("locked") == 1, said
    winner = pair[said.index("locked")]
    assert said[1 - said.index("locked")] == refusal(folder, winner)
    tell(winner)
    assert [process.wait(20) for process in pair] == [0, 0]
    assert (folder / "rollouts").read_text() == f"{winner.pid}\n"


def test_two_at_the_same_moment(tmp_path):
    together(tmp_path, random.Random(0))


@pytest.mark.slow
def test_fifty_pairs_at_the_same_moment(tmp_path):
    """Every third folder has the lock of a run that was killed there."""
    rng = random.Random(1)
    for pair in range(50):
        folder = tmp_path / f"{pair}"
        folder.mkdir()
        if pair % 3 == 0:
            (folder / LOCK_FILE).write_text("1 elsewhere")
        together(folder, rng)


@pytest.mark.parametrize("kind", ["link", "hard link", "link to nowhere", "long file", "pipe", "folder"])
def test_what_stands_in_the_place_of_the_lock_stays(tmp_path, kind):
    """Others may have put it there; nothing is written through it."""
    theirs, lock = tmp_path / "thesis.tex", tmp_path / "out" / LOCK_FILE
    theirs.write_text("a year of work" * 100)
    lock.parent.mkdir()
    {
        "link": lambda: lock.symlink_to(theirs),
        "hard link": lambda: lock.hardlink_to(theirs),
        "link to nowhere": lambda: lock.symlink_to(tmp_path / "none"),
        "long file": lambda: lock.write_text(theirs.read_text()),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    with pytest.raises(UserError, match=str(lock.parent)), lock_folders({"--output_dir": lock.parent}):
        pass
    assert theirs.read_text() == "a year of work" * 100
    assert not (tmp_path / "none").exists()


def test_a_lock_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UserError, match="No space left on device"), lock_folders({"--output_dir": tmp_path}):
        pass
