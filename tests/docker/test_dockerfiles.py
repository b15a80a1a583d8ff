"""Dockerfiles against the project's files, the device flags of a container, and the steps of the CPU's image."""

import os
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker"
PLACE = "/opt/mindrlhf"  # of the project in an image
NAMES = ("cpu", "ascend")


def steps(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (FOLDER / f"Dockerfile.{name}").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path of the project out of the image."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    return any(fnmatch(path, pattern.removeprefix("**/")) for pattern in patterns)


@pytest.mark.parametrize("name", NAMES)
def test_paths_of_an_image_are_those_of_the_project(name):
    found = steps(name)
    assert ("COPY", f". {PLACE}") in found
    for instruction, rest in found:
        for path in re.findall(rf"{PLACE}/([\w./-]+)", rest):
            if not path.startswith(".venv"):
                assert (ROOT / path).is_file(), (instruction, path)
                assert not ignored(path)
    assert dict(found)["ENV"] == f"PATH={PLACE}/.venv/bin:$PATH"
    assert not any(ignored(str(path.relative_to(ROOT))) for path in (ROOT / "mindrlhf").glob("*.py"))
    assert ignored(".venv")
    assert ignored(".git")


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_installed_as_the_tutorial_says(name):
    commands = [rest for instruction, rest in steps(name) if instruction == "RUN"]
    assert "bash scripts/setup.sh" in (ROOT / "docs" / "tutorial.md").read_text().splitlines()
    assert sum(f"bash {PLACE}/scripts/setup.sh" in command for command in commands) == 1
    assert any(" g++ iproute2 " in command for command in commands), "operators are compiled, and msrun asks ip"
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_pythons_version_is_one_that_the_project_takes():
    version = re.search(r"python:(\d+)\.(\d+)", dict(steps("cpu"))["FROM"])
    least, most = re.search(r'python_requires=">=3\.(\d+),<3\.(\d+)"', (ROOT / "setup.py").read_text()).groups()
    assert version[1] == "3"
    assert int(least) <= int(version[2]) < int(most)


def shown(folder: Path, *words: str, **variables: str) -> list[str]:
    """The words of the command that run_ascend.sh would start in a folder."""
    command = ["bash", str(FOLDER / "run_ascend.sh"), "--dry-run", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, check=True, capture_output=True, text=True)
    return shlex.split(done.stdout)


def test_a_container_has_the_devices_and_the_driver(tmp_path):
    for path in ("usr/local/Ascend/driver", "etc"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "etc" / "hccn.conf").write_text("")
    words = shown(tmp_path, "mindrlhf", "eval", "a b", DEVICES="0,3", DATA=".", HOST_ROOT=str(tmp_path), IMAGE="x:1")
    assert words[:2] == ["docker", "run"]
    assert words[-4:] == ["x:1", "mindrlhf", "eval", "a b"]
    devices = {word.partition("=")[2] for word in words if word.startswith("--device=")}
    managers = {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
    assert devices == {"/dev/davinci0", "/dev/davinci3"} | managers
    volumes = {word.partition("=")[2] for word in words if word.startswith("--volume=")}
    driver = {f"{path}:{path}:ro" for path in ("/usr/local/Ascend/driver", "/etc/hccn.conf")}
    assert volumes == driver | {f"{tmp_path}:/work", f"{tmp_path}:{tmp_path}"}


def test_a_command_in_an_image_has_the_variables_of_cann(tmp_path):
    command = ["bash", str(FOLDER / "with_cann.sh"), "printenv", "TOOLKIT", "LD_LIBRARY_PATH"]
    environment = os.environ | {"ASCEND_ROOT": str(tmp_path)}
    lost = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert lost.returncode == 2
    assert f"{tmp_path} has no ascend-toolkit/set_env.sh or cann/set_env.sh" in lost.stderr
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann" / "set_env.sh").write_text("export TOOLKIT=found\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"found\n{tmp_path}/driver/lib64/driver:")


@pytest.mark.slow
def test_the_steps_of_the_cpus_image_run_in_a_fresh_folder(tmp_path):
    """All but apt-get's, with another place for the project; it takes minutes and 3 GB."""
    place = tmp_path / "opt" / "mindrlhf"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if not ignored(name):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for instruction, rest in steps("cpu"):
        rest = rest.replace(PLACE, str(place)).replace("/root/", f"{tmp_path}/")
        if instruction == "RUN" and "apt-get" not in rest:
            subprocess.run(["bash", "-c", rest], cwd="/", env=environment, check=True, timeout=500)
        elif instruction == "ENV":
            name, _, value = rest.partition("=")
            environment[name] = value.replace(f"${name}", environment[name])
    done = subprocess.run(
        ["mindrlhf", "--version"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("mindrlhf ")
    code = "import mindrlhf, mindspore; print(mindrlhf.__file__, mindspore.__version__)"
    found = subprocess.run(
        ["python", "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert found[0].startswith(str(place))
