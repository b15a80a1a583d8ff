"""scripts/emulated_aarch64.sh refuses what it cannot do before it makes a folder; CONTRIBUTING.md names it."""

import re
import shlex
import shutil
import subprocess
import sys

from shell_scripts import run_script

NAME = "emulated_aarch64.sh"


def test_a_folder_without_a_command_is_refused(tmp_path):
    done = run_script(NAME, tmp_path, "system")
    assert (done.returncode, done.stderr) == (2, f"{NAME}: give a folder and a command\n")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program_is_named_with_its_package(root, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mmdebstrap", "qemu-aarch64-static", "update-binfmts"):
        (programs / name).symlink_to(sys.executable)
    command = [shutil.which("bash"), str(root / "scripts" / NAME), "system", "true"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": str(programs)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{NAME}: arch-test is missing; install it with apt install mmdebstrap arch-test ")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_the_command_of_the_page_names_tests_that_there_are(root):
    line = re.search(rf"^bash scripts/{NAME} .*$", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE)[0]
    assert (root / shlex.split(line)[-1]).is_file()
