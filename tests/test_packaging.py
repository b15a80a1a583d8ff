"""setup.py says what the package imports, and the package imports nothing that it must do without."""

import ast
import re
import sys
from importlib import metadata

import pytest

NEVER = {"torch", "transformers", "mindformers", "safetensors"}


@pytest.fixture(scope="module")
def required(root) -> set[str]:
    """Names of the distributions in setup.py's REQUIRES, as PyPI normalises them."""
    for node in ast.parse((root / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "REQUIRES":
            return {normal(re.match(r"[\w.-]+", text)[0]) for text in ast.literal_eval(node.value)}
    raise AssertionError("setup.py has no REQUIRES")


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
    """What `kernels.cpp` includes, file by file, matches the patterns of setup.py."""
    folder = root / "mindrlhf" / "backend" / "native"
    patterns = re.search(r'"mindrlhf.backend.native": (\[.*\])', (root / "setup.py").read_text())[1]
    packaged = {file.name for pattern in ast.literal_eval(patterns) for file in folder.glob(pattern)}
    found, left = set(), ["kernels.cpp"]
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
