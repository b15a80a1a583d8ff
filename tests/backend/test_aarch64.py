"""The fused operators built for aarch64: the tests of operators pass with them under emulation."""

import os
import re
import subprocess
import sys

import pytest
from emulated_operators import missing_programs, use_emulated_operators

FILES = (
    *("backend/test_native.py", "backend/test_native_decoding.py", "backend/test_native_experts.py"),
    *("backend/test_native_drafts.py", "backend/test_weight_rows.py", "backend/test_operators.py"),
    *("models/test_halves.py", "models/test_layer.py", "models/test_head.py", "training/test_optimizer.py"),
)
# They compare with another build, or with another process, which has this machine's build.
OTHER_BUILDS = (
    "backend/test_weight_rows.py::test_products_are_the_same_with_fewer_of_the_processor_s_instructions",
    "models/test_halves.py::test_results_do_not_depend_on_the_number_of_threads",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("instructions", "files"), [("armv8-a", FILES), ("armv8.2-a+sve+dotprod+bf16", FILES[4:7])])
def test_the_tests_of_operators_pass(root, fused, instructions, files):
    if missing := missing_programs():
        pytest.skip(f"not installed: {missing}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--emulate", instructions]
    command += [f"--deselect=tests/{name}" for name in OTHER_BUILDS] + [f"tests/{name}" for name in files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 15 * len(files), done.stdout[-4000:]


def test_without_an_emulator_the_programs_to_install_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.UsageError, match="--emulate needs aarch64-linux-gnu-g"):
        use_emulated_operators("armv8-a")
