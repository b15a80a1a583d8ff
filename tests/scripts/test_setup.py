"""The script that makes the environment."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
