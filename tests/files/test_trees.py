"""Folders that a stranger has filled."""

import os

from mindrlhf.files.trees import exceeds, remove_tree


def test_the_size_of_a_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(bytes(100_000))
    os.symlink("/", tmp_path / "a" / "link")  # what it points to does not count
    assert not exceeds(str(tmp_path), 1 << 20, 4)
    assert exceeds(str(tmp_path), 1 << 20, 3)
    assert exceeds(str(tmp_path), 1 << 16, 4)
    assert not exceeds(str(tmp_path / "missing"), 0, 0)


def test_holes_of_files_take_no_room(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 30)
    assert not exceeds(str(tmp_path), 1 << 20, 1)


def test_a_deep_folder_without_rights_is_removed(tmp_path):
    """Deeper than the longest path, with rights to nothing, and with links to what has to stay."""
    stays = tmp_path / "stays"
    stays.mkdir()
    (stays / "file").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    name = "d" * 50
    for _ in range(100):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.symlink(stays, "link", dir_fd=here)
        os.link(stays / "file", "hard", dst_dir_fd=here)
        os.chmod(name, 0, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["stays"]
    assert (stays / "file").read_text() == "x"
