"""The settings file: what a run was started with, when, where and how."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path

from mindrlhf.files.settings_file import git_commit, provenance, read_settings, write_settings


def test_a_resumed_run_keeps_its_earlier_starts(tmp_path):
    write_settings(tmp_path, {"a": {"b": Path("c")}})
    write_settings(tmp_path, {"a": {"b": 2}}, resumed=True)
    found = read_settings(tmp_path)
    assert found["a"] == {"b": 2}
    assert len(found["starts"]) == 2
    write_settings(tmp_path, {})
    assert len(read_settings(tmp_path)["starts"]) == 1, "a new run in the same folder begins again"


def test_the_command_can_be_given_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mindrlhf", "train", "--mind_dataset_dir", "my data"])
    found = provenance()
    assert found["command"] == "mindrlhf train --mind_dataset_dir 'my data'"
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    monkeypatch.setattr(sys, "argv", ["examples/run.py", "seed=1"])
    assert provenance()["command"] == "python examples/run.py seed=1"


def test_the_commit_of_the_users_project(tmp_path, monkeypatch):
    project = tmp_path / "my_project"
    project.mkdir()
    assert git_commit(project) is None

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", project, *author, *arguments], capture_output=True, text=True, check=True
        ).stdout

    git("init")
    assert git_commit(project) is None, "no commit yet"
    (project / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    commit = f"my_project {git('rev-parse', 'HEAD')[:12]}"
    (project / "another").write_text("not of the project")
    assert git_commit(project) == commit
    (project / "file").write_text("2")
    assert git_commit(project) == commit + "+"
    monkeypatch.setenv("PATH", "")
    assert git_commit(project) is None, "no git is installed"
