"""setup.py says what the package imports, and the package imports nothing that it must do without."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mindrlhf.files.shipped import shipped_yamls

NEVER = {"torch", "transformers", "mindformers", "safetensors"}


@pytest.fixture(scope="module")
def lists(root) -> dict[str, list[Requirement]]:
    """The requirements in setup.py by the list's name: REQUIRES, DOCS, TESTS, ORACLE."""
    found = {}
    for node in ast.parse((root / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            texts = [entry for entry in node.value.elts if isinstance(entry, ast.Constant)]
            found[node.targets[0].id] = [Requirement(text.value) for text in texts]
    assert {"REQUIRES", "DOCS", "TESTS", "ORACLE"} <= set(found)
    return found


@pytest.fixture(scope="module")
def required(lists) -> set[str]:
    """Names of the distributions in REQUIRES, as PyPI normalises them."""
    return {normal(requirement.name) for requirement in lists["REQUIRES"]}


def test_what_is_required_leaves_a_choice(lists):
    """An exact version would keep the package out of environments that hold another one."""
    assert [str(entry) for entry in lists["REQUIRES"] if re.search("[=~]=", str(entry.specifier))] == []


def test_constraints_are_the_versions_of_the_tests(root, lists):
    """Each requirement has an exact version that its range allows, and the tests run with it."""
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {normal(pin.name): pin for pin in map(Requirement, lines)}
    ranges = {normal(entry.name): entry.specifier for entries in lists.values() for entry in entries}
    assert set(ranges) - set(pins) == set()
    chosen = Path(sys.prefix, "mindspore")  # by `scripts/setup.sh --mindspore`, and then MindFormers is left out
    if chosen.is_file() and chosen.read_text().strip():
        pins = {name: pin for name, pin in pins.items() if name not in ("mindspore", "mindformers")}
    for name, pin in pins.items():
        if pin.marker and not pin.marker.evaluate():
            continue
        version = metadata.version(name)
        assert pin.specifier.contains(version), name
        assert name not in ranges or ranges[name].contains(version), name
        assert name == "protobuf" or str(pin.specifier) == f"=={version}"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(root) -> dict[str, str]:
    """Top-level modules from elsewhere that the package imports -> one file that does."""
    found = {}
    for file in (root / "mindrlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: str(file.relative_to(root)) for name in names}
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names | {"mindrlhf"}}


def test_every_import_is_required(root, required):
    modules = imported(root)
    distributions = metadata.packages_distributions()
    assert "mindspore" in modules
    missing = {
        name: file
        for name, file in modules.items()
        if not {normal(distribution) for distribution in distributions.get(name, ())} & required
    }
    assert missing == {}


def test_nothing_unwanted_is_imported(root):
    assert {name: file for name, file in imported(root).items() if name in NEVER} == {}


def test_all_cpp_sources_are_packaged(root):
    """What the sources include, file by file, matches the patterns of setup.py."""
    folder = root / "mindrlhf" / "backend" / "native"
    patterns = re.search(r'"mindrlhf.backend.native": (\[.*\])', (root / "setup.py").read_text())[1]
    packaged = {file.name for pattern in ast.literal_eval(patterns) for file in folder.glob(pattern)}
    found, left = set(), ["kernels.cpp", "decoding.cpp"]
    while left:
        found.add(left[-1])
        included = re.findall(r'#include "(.+)"', (folder / left.pop()).read_text())
        left += set(included) - found
    assert "team.h" in found
    assert found <= packaged


def test_all_data_files_are_packaged(root):
    calls = [node for node in ast.walk(ast.parse((root / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    (patterns,) = (ast.literal_eval(node.value) for node in calls if node.arg == "package_data")
    folders = {root / name.replace(".", "/"): globs for name, globs in patterns.items()}
    packaged = {path for folder, globs in folders.items() for pattern in globs for path in folder.glob(pattern)}
    files = {path for path in (root / "mindrlhf").rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert root / "mindrlhf/metrics/hints.yaml" in files
    assert files <= packaged


def test_what_is_installed_holds_examples_and_model_yamls(root, tmp_path):
    """As `pip install` copies the package; its files are found by name from any folder."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run([*command, "egg_info", "--egg-base", str(tmp_path)], cwd=root, check=True, timeout=60)
    package = tmp_path / "mindrlhf"
    assert (package / "migration" / "verl" / "keys.yaml").is_file()
    for folder in ("examples", "model_configs"):
        files = {file.relative_to(root) for file in (root / folder).rglob("*.*") if file.parent.name != "__pycache__"}
        assert len(files) > 5
        assert files == {file.relative_to(package) for file in (package / folder).rglob("*.*")}
    code = "from mindrlhf.files.shipped import *; print(HOME, *sorted(shipped_yamls()))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env={}, check=True, timeout=60, capture_output=True, text=True)
    assert found.stdout.split() == [str(package), *sorted(shipped_yamls())]
