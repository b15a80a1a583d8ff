"""What is loaded as code lies where only this user can put it."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from mindrlhf.backend.compile.graph_cache import GraphCache
from mindrlhf.files import user_cache as module
from mindrlhf.files.user_cache import Unsafe, private_folder, user_cache


@pytest.fixture
def place(monkeypatch, tmp_path) -> Path:
    """`cache` and `tmp` in place of the user's cache folder and of /tmp."""
    for name, mode in (("cache", 0o755), ("tmp", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    module._of_this_process.cache_clear()
    yield tmp_path
    module._of_this_process.cache_clear()


def fallback(place) -> Path:
    return place / "tmp" / f"mindrlhf-{os.getuid()}"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def assert_alone(place, folder) -> None:
    """A folder of this process that nobody could foresee."""
    assert folder.parent == place / "tmp"
    assert folder != fallback(place)
    assert mode_of(folder) == 0o700
    assert user_cache() == folder


def test_a_new_folder_is_private_whatever_the_umask(place):
    before = os.umask(0)
    try:
        assert user_cache() == place / "cache" / "mindrlhf"
        assert mode_of(user_cache()) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_may_write(place, mode, caplog):
    (place / "cache" / "mindrlhf").mkdir()
    (place / "cache" / "mindrlhf").chmod(mode)
    assert user_cache() == fallback(place)
    assert f"cache/mindrlhf can be written by other users (mode {mode:o}); remove it" in caplog.text
    fallback(place).chmod(mode)
    assert_alone(place, user_cache())


def test_a_folder_of_another_user(place, monkeypatch, caplog):
    own = user_cache()
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    fallback(place).mkdir(mode=0o700)
    assert_alone(place, user_cache())
    assert f"{own} belongs to another user" in caplog.text
    assert f"{fallback(place)} belongs to another user" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_a_folder_that_was_given_away(place):
    os.chown(user_cache(), 12345, 12345)
    assert user_cache() == fallback(place)


def test_a_link_in_place_of_a_folder(place):
    theirs = place / "theirs"
    theirs.mkdir(mode=0o700)
    (place / "cache" / "mindrlhf").symlink_to(theirs)
    fallback(place).symlink_to(theirs)
    assert_alone(place, user_cache())
    fallback(place).unlink()
    fallback(place).symlink_to(place / "nothing")
    assert_alone(place, user_cache())
    assert list(theirs.iterdir()) == []


def test_a_folder_that_others_may_exchange(place):
    (place / "cache").chmod(0o777)
    assert user_cache() == fallback(place)


def test_where_nothing_can_be_written(place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    (place / "file").write_text("")
    assert user_cache() == fallback(place)


def test_graphs_are_not_taken_from_a_folder_that_others_may_write(tmp_path):
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs").chmod(0o777)
    with pytest.raises(Unsafe, match=r"graphs can be written by other users \(mode 777\)"):
        GraphCache(tmp_path / "graphs", 0)
    assert mode_of(private_folder(tmp_path / "new")) == 0o700
