"""Names of what a run writes for each step."""

from pathlib import Path

import pytest

from mindrlhf.files.naming import step_files, step_of, step_path


@pytest.mark.parametrize("step", [0, 12, 999999, 1234567])
@pytest.mark.parametrize("suffix", ["", ".jsonl", ".npz"])
def test_a_name_gives_its_step_back(step, suffix):
    path = step_path(Path("out"), step, suffix)
    assert path.parent == Path("out")
    assert step_of(path, suffix) == step
    assert step_of(path, ".other") is None


@pytest.mark.parametrize("name", ["step_12", "step_", "step_000012x", "xstep_000012", "step_-00012", "latest"])
def test_other_names_are_no_steps(name):
    assert step_of(Path(name)) is None
    assert step_of(Path(f"{name}.npz"), ".npz") is None


def test_files_of_a_folder_in_order_of_their_steps(tmp_path):
    for step in (1000000, 3, 20):
        step_path(tmp_path, step, ".jsonl").touch()
    for name in ("step_000001.npz", "step_4.jsonl", ".step_000005.jsonl", "notes.jsonl"):
        (tmp_path / name).touch()
    assert list(step_files(tmp_path)) == [3, 20, 1000000]
    assert step_files(tmp_path)[20] == tmp_path / "step_000020.jsonl"
    assert step_files(tmp_path / "none") == {}
