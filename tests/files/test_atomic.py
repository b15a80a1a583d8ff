"""Nothing half-written under a final name, earlier outputs untouched, nothing left behind."""

import errno
import os
import shutil
import stat
import subprocess
import sys

import pytest
from bad_places import file_size_limit, ordinary_user

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, atomic_files, atomic_folder, clean, remove_folder


def write_beyond_limit(path):
    with file_size_limit(1000):
        path.write_bytes(bytes(2000))


def write_half(manager, failure):
    """Write something into what a manager hands out, then fail."""
    with manager as temporary:
        (temporary / "b" if temporary.is_dir() else temporary).write_text("half")
        raise failure


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield path
    subprocess.run(["umount", path], check=True)


def test_file_appears_only_at_the_end(tmp_path):
    target = tmp_path / "new" / "folder" / "a.json"
    with atomic_file(target) as temporary:
        temporary.write_text("content")
        assert not target.exists()
        assert temporary.parent == target.parent
        assert temporary.suffix == ".json"
    assert target.read_text() == "content"
    assert os.listdir(target.parent) == ["a.json"]
    default = tmp_path / "by_open"
    default.write_text("")
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(default.stat().st_mode)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, UserError])
def test_failing_body_leaves_the_earlier_file(tmp_path, failure):
    target = tmp_path / "a.json"
    target.write_text("earlier")
    with pytest.raises(failure):
        write_half(atomic_file(target), failure("stop"))
    assert target.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_a_link_points_to_stays(tmp_path):
    """Others may have put the link there: a file, a folder, nothing."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "real.txt").write_text("earlier")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    for name, target in (("a", folder / "real.txt"), ("b", folder / "none"), ("c", folder), ("d", folder / "none")):
        (outputs / name).symlink_to(target)
    for name in ("a", "b"):
        with atomic_file(outputs / name) as temporary:
            temporary.write_text("new")
        assert not (outputs / name).is_symlink()
        assert (outputs / name).read_text() == "new"
    for name in ("c", "d"):
        with atomic_folder(outputs / name, replace=True) as temporary:
            (temporary / "x").write_text("new")
        assert not (outputs / name).is_symlink()
        assert os.listdir(outputs / name) == ["x"]
    assert contents(folder) == {"real.txt": "earlier"}
    assert sorted(os.listdir(outputs)) == ["a", "b", "c", "d"]


def test_a_folder_behind_a_link_is_written_to(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    with atomic_file(tmp_path / "out" / "a") as temporary:
        temporary.write_text("new")
    assert contents(tmp_path / "disk") == {"a": "new"}


def test_file_size_limit_is_a_user_error(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"earlier")
    with (
        pytest.raises(UserError, match=r"a\.bin: cannot be written \(File too large\)"),
        atomic_file(target) as temporary,
    ):
        write_beyond_limit(temporary)
    assert target.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_full_disk_is_a_user_error(small_disk):
    (small_disk / "model").mkdir()
    (small_disk / "model" / "a.bin").write_bytes(b"earlier")
    with (
        pytest.raises(UserError, match=r"model: cannot be written \(No space left on device\).*free some space"),
        atomic_folder(small_disk / "model", replace=True) as temporary,
    ):
        (temporary / "b.bin").write_bytes(bytes(300_000))
    with pytest.raises(UserError, match="No space left on device"), atomic_file(small_disk / "c.bin") as temporary:
        temporary.write_bytes(bytes(300_000))
    assert os.listdir(small_disk) == ["model"]
    assert (small_disk / "model" / "a.bin").read_bytes() == b"earlier"


def test_missing_permission_is_a_user_error(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    (tmp_path / "closed").chmod(0o500)
    for writer in (atomic_file, atomic_folder):
        with (
            pytest.raises(UserError, match=r"cannot be written \(Permission denied\).*may write to"),
            ordinary_user(),
            writer(tmp_path / "closed" / "a") as temporary,
        ):
            temporary.write_text("content")
    assert os.listdir(tmp_path / "closed") == []


def test_parent_that_is_a_file_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    for writer in (atomic_file, atomic_folder):
        with pytest.raises(UserError, match="cannot be written"), writer(tmp_path / "file" / "a"):
            pass


def test_error_about_another_file_is_passed_on(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a"):
        (tmp_path / "input").read_text()
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "b"):
        (tmp_path / "input").read_text()
    assert os.listdir(tmp_path) == []


def test_file_and_folder_are_not_confused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a folder"), atomic_file(tmp_path / "folder"):
        pass
    with pytest.raises(UserError, match="is a file"), atomic_folder(tmp_path / "file", replace=True):
        pass


def test_folder_appears_only_at_the_end(tmp_path):
    target = tmp_path / "new" / "model"
    with atomic_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("content")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "content"
    assert os.listdir(target.parent) == ["model"]


def test_folder_that_is_not_empty_is_refused_or_replaced_as_a_whole(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    with atomic_folder(target) as temporary:  # an empty one is taken
        (temporary / "a").write_text("first")
    with pytest.raises(UserError, match="not empty"), atomic_folder(target):
        raise AssertionError("must not get here")
    with pytest.raises(RuntimeError):
        write_half(atomic_folder(target, replace=True), RuntimeError())
    assert (target / "a").read_text() == "first"
    with atomic_folder(target, replace=True) as temporary:
        (temporary / "b").write_text("second")
    assert os.listdir(target) == ["b"]
    assert os.listdir(tmp_path) == ["model"]


def test_earlier_folder_returns_when_the_exchange_fails(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    (target / "a").write_text("first")
    rename = os.rename

    def fail_for_the_new_one(source, destination):
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail_for_the_new_one)
    with pytest.raises(UserError, match="Input/output error"), atomic_folder(target, replace=True) as temporary:
        (temporary / "b").write_text("second")
    assert os.listdir(target) == ["a"]
    assert os.listdir(tmp_path) == ["model"]


def test_current_folder_is_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "work").write_text("mine")
    monkeypatch.chdir(tmp_path / "inner")
    for path in (".", ".."):
        with pytest.raises(UserError, match="current folder"), atomic_folder(path, replace=True):
            raise AssertionError("must not get here")
    assert (tmp_path / "inner" / "work").exists()


# --- several files together ---


def contents(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


def write_files(folder, names, error=None):
    """Write "new" to each name in an `atomic_files` block, which then raises `error`."""
    with atomic_files(folder) as temporary:
        for name in names:
            (temporary / name).write_text("new")
        if error is not None:
            raise error


def test_files_appear_together(tmp_path):
    (tmp_path / "a").write_text("earlier")
    with atomic_files(tmp_path) as temporary:
        (temporary / "a").write_text("new")
        (temporary / "b").write_text("new")
        assert (tmp_path / "a").read_text() == "earlier"
    assert contents(tmp_path) == {"a": "new", "b": "new"}
    write_files(tmp_path / "x" / "y", ["a"])
    assert contents(tmp_path / "x" / "y") == {"a": "new"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bug")])
def test_failing_body_leaves_the_earlier_files(tmp_path, error):
    (tmp_path / "a").write_text("earlier")
    with pytest.raises(type(error)):
        write_files(tmp_path, ["a", "b"], error)
    assert contents(tmp_path) == {"a": "earlier"}


def test_files_that_cannot_be_written(tmp_path, small_disk):
    (tmp_path / "a").write_text("earlier")
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="b: is a folder"):
        write_files(tmp_path, ["a", "b"])
    assert (tmp_path / "a").read_text() == "earlier"
    with pytest.raises(UserError, match="a: cannot be written"):
        write_files(tmp_path / "a", ["c"])
    with pytest.raises(UserError, match=r"disk: cannot be written \(No space"), atomic_files(small_disk) as temporary:
        (temporary / "a").write_bytes(bytes(300_000))
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "disk"]
    assert os.listdir(small_disk) == []


# --- what a killed process leaves ---


def test_clean_removes_what_a_killed_process_left(tmp_path):
    """A process is killed inside each of the three; its temporaries are all that `clean` takes."""
    for name in (".keep", ".a.tmp", "b.0123abcd.tmp", ".c.0123abcd.tmp.x.y"):
        (tmp_path / name).write_text("somebody's")
    script = (
        "import os, sys; from pathlib import Path; from mindrlhf.files import atomic\n"
        "at = Path(sys.argv[1])\n"
        "with atomic.atomic_file(at / 'a.json') as a, atomic.atomic_files(at) as b, \\\n"
        "        atomic.atomic_folder(at / 'c') as c:\n"
        "    a.write_text('half'); (b / 'x').write_text('half'); (c / 'x').write_text('half'); os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 9
    assert len(os.listdir(tmp_path)) == 7
    clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".a.tmp", ".c.0123abcd.tmp.x.y", ".keep", "b.0123abcd.tmp"]
    clean(tmp_path / "none")


def test_clean_finishes_an_exchange(tmp_path):
    """Killed between the two renames the earlier folder comes back; killed after them it goes."""
    (tmp_path / ".model.0123abcd.old").mkdir()
    (tmp_path / ".model.0123abcd.old" / "a").write_text("earlier")
    clean(tmp_path)
    assert os.listdir(tmp_path) == ["model"]
    (tmp_path / ".model.0123abcd.old").mkdir()
    clean(tmp_path)
    assert os.listdir(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a").read_text() == "earlier"


def test_remove_folder_is_one_step(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("")
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append((path.name, os.listdir(tmp_path))))
    remove_folder(tmp_path / "model")
    ((doomed, left),) = seen
    assert left == [doomed]
    assert doomed.startswith(".model.")
    remove_folder(tmp_path / "none")
