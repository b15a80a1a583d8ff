"""Shared fixtures: where reference data lies, slow tests off unless asked for."""

import gc
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

# Set before MindSpore is imported anywhere: its C++ log stays quiet, and two threads beat its own choice on two cores,
# or one where pytest runs tests side by side.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else str(min(2, os.cpu_count() or 1))
)
# As MindSpore sets it: a test that loads TensorBoard's messages first would take it away from the ones behind it.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
# No test asks a hub for a model or dataset; those that do have a server of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
from browser import Browser, find_browser
from copying_memory import copying_threads
from emulated_operators import use_emulated_operators

from mindrlhf.files.user_cache import user_cache

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")

ROOT = Path(__file__).resolve().parents[1]

# Rooms whose tests compile graphs, train, or run whole commands; tests of others are marked `fast`.
COMPILING = {
    *("backend", "models", "parallel", "rollout", "training", "trainer", "memory", "commands", "docs", "examples"),
    *("benchmarks", "scripts", "hostile", "judging", "acceptance"),
}

# Files of other rooms that train, download, or wait for processes: 7 s of a processor or more, or a second a test.
LONG = {
    *("hub/test_download.py", "data/test_chat.py", "data/test_turn_ids.py", "rewards/test_reward_runner.py"),
    *("api/test_grpo_trainer.py", "api/test_sft_trainer.py", "api/test_program_tools.py", "api/test_after_training.py"),
    *("algorithms/test_advantages.py", "algorithms/test_policy_losses.py", "configs/test_choices.py"),
    *("checkpoint/test_resume.py", "checkpoint/test_store.py", "roles/test_adapted_parts.py", "test_phases.py"),
    *("environments/test_environment_pool.py", "environments/test_hurting_tools.py", "run/test_stop_signals.py"),
}


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--emulate", metavar="MARCH", help="build the fused operators for such an aarch64, and emulate it")


def pytest_configure(config):
    """Write byte code, even in a container that tells Python not to.

    Each of the many processes here would compile MindSpore's modules from their text again, for seconds.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if instructions := config.getoption("--emulate"):
        use_emulated_operators(instructions)


def is_long(item) -> bool:
    """Whether the file of a test compiles, trains or waits."""
    file = item.path.relative_to(ROOT / "tests")
    return file.parts[0] in COMPILING or str(file) in LONG


def pytest_collection_modifyitems(config, items):
    for item in items:
        if not is_long(item) and not {"slow", "msrun"}.intersection(item.keywords):
            item.add_marker("fast")
    # Long files begin first: what is left at the end is short, and no process of tests waits long for another.
    items.sort(key=is_long, reverse=True)
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _known_objects_are_no_garbage():
    """MindSpore calls the garbage collector before each graph: let it pass over what was there before the file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", "copying"])
def memory(request):
    """The parameters' memory as on the CPU, and as on Ascend, where the host sees copies."""
    with copying_threads() if request.param == "copying" else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium; a test that asks for it is skipped where none is installed."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """A user's cache for this session: its runs share their graphs, and read no others; operators are built already."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache" / "mindrlhf"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for built in user_cache().glob("kernels-*.so"):
        with suppress(FileExistsError):
            (folder / built.name).symlink_to(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference data beside the project; a test that needs it is skipped where it is absent."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("reference data (../shared) is not here")
    return path


@pytest.fixture(scope="module")
def fused():
    """The fused CPU operators; skips where they cannot be built."""
    import mindspore

    from mindrlhf.backend import native
    from mindrlhf.backend.native.operators import open_operators

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    found = open_operators()
    if found is None:
        assert native.library().problem == "g++ is not installed"
        pytest.skip(f"the fused operators cannot be built here: {native.library().problem}")
    return found
