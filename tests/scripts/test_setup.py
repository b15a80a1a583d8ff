"""The script that makes the environment."""

import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = """
import sys
constraints = sys.argv[sys.argv.index("--constraint") + 1]
print(*(line for line in open(constraints).read().splitlines() if line.startswith("mind")), sep="\\n")
print("extra", sys.argv[-1])
"""


def test_an_environment_behind_a_link_is_not_emptied(tmp_path):
    project, other = tmp_path / "project", tmp_path / "other"
    (project / "scripts").mkdir(parents=True)
    other.mkdir()
    for name in ("setup.py", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, project / name)
    (other / "kept").write_text("work")
    (project / ".venv").symlink_to(other)
    run = subprocess.run(["bash", project / "scripts/setup.sh"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "is a link to another environment" in run.stderr
    assert (other / "kept").read_text() == "work"


@pytest.mark.parametrize("arguments", [["--mindspore"], ["--mindspore", "new"], ["--dev", "--fast"]])
def test_what_is_not_understood_is_refused(tmp_path, arguments):
    command = ["bash", ROOT / "scripts" / "setup.sh", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert run.returncode == 2
    assert "is not understood; give --dev or --mindspore VERSION" in run.stderr


def test_another_mindspore_is_kept_and_comes_without_mindformers(tmp_path):
    """The environment is real, and its pip prints what it gets."""
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "mindrlhf" / "trainer").mkdir(parents=True)
    for name in ("setup.py", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, project / name)
    for name in ("mindrlhf/cli.py", "mindrlhf/trainer/build.py"):
        (project / name).touch()
    venv.create(project / ".venv", symlinks=True)
    pip = next((project / ".venv" / "lib").iterdir()) / "site-packages" / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(PIP)
    setup = ("bash", project / "scripts" / "setup.sh")

    def run(*arguments):
        done = subprocess.run([*setup, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith(("mind", "extra"))]

    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("mind")]
    assert run("--dev") == [*pinned, "extra .[dev]"]
    assert run() == []
    other = ["mindspore==2.10.0", "extra .[tests]"]
    assert run("--dev", "--mindspore", "2.10.0") == other
    assert run() == run("--dev") == []
    assert run("--mindspore", "2.9.1", "--dev") == ["mindspore==2.9.1", "extra .[tests]"]
