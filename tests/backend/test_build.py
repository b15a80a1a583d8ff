"""Where the C++ operators come from: a wheel, this user's cache, or a compiler."""

import os
import platform
import subprocess
import sys
import zipfile

import pytest

from mindrlhf.backend import native
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.native import build
from mindrlhf.backend.native.operators import open_operators
from mindrlhf.backend.operators import COMPOSED

USABLE = 'extern "C" int usable() { return 0; }'
MULTIPLIES = 'extern "C" int multiplies_bfloat16() { return 1; }'
# As /proc/cpuinfo names instructions -> as g++'s macros do, where that is not the same in capitals.
MACROS = {"abm": "LZCNT", "bmi1": "BMI", "avx512_bf16": "AVX512BF16", "avx512_vnni": "AVX512VNNI"}


@pytest.fixture
def built_anew(monkeypatch, tmp_path):
    """As on a machine where nothing is built yet, with sources that are built in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FOLDER", tmp_path / "sources")
    monkeypatch.setattr(native, "SHIPPED", tmp_path / "shipped")
    build.FOLDER.mkdir()
    (build.FOLDER / "kernels.cpp").write_text(USABLE)
    (build.FOLDER / "decoding.cpp").write_text(MULTIPLIES)
    native.library.cache_clear()
    open_operators.cache_clear()
    yield tmp_path
    native.library.cache_clear()
    open_operators.cache_clear()


@pytest.fixture
def shipped(built_anew, fused, monkeypatch):
    """As installed from a wheel, for two levels that this processor has or lacks as the test says."""
    levels = tuple(build.Level(name, (), frozenset([name])) for name in ("good", "better"))
    monkeypatch.setitem(build.LEVELS, platform.machine(), levels[::-1])
    native.SHIPPED.mkdir()
    for level in levels:
        path = native.SHIPPED / build.shipped_name(build.FOLDER, level)
        assert build.compile_library("g++", level.flags, build.FOLDER, path) is None
    return lambda *known: monkeypatch.setattr(build, "instructions", lambda: frozenset(known))


def test_without_a_compiler_the_compositions_are_used(built_anew, monkeypatch):
    monkeypatch.setenv("PATH", str(built_anew))
    assert native.library() == native.Library(None, "g++ is not installed")
    assert CPU.operators() == COMPOSED
    assert "g++ is not installed" in CPU.describe_operators()


def test_outside_of_linux_the_compositions_are_used(built_anew, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert native.library() == native.Library(None, "they are built on Linux alone")
    assert CPU.operators() == COMPOSED


@pytest.mark.parametrize("name", ["kernels", "decoding"])
def test_a_source_that_does_not_compile_says_why(built_anew, fused, name):
    (build.FOLDER / f"{name}.cpp").write_text("int usable() { return missing; }")
    assert native.library().path is None
    assert "missing" in native.library().problem
    assert [path.name for path in (built_anew / "mindrlhf").iterdir()] == []


def test_sources_that_do_not_fit_together_say_why(built_anew, fused):
    (build.FOLDER / "decoding.cpp").write_text(USABLE)
    assert "usable" in native.library().problem


def test_what_is_built_is_kept(built_anew, fused):
    path = native.library().path
    made = path.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library().path == path
    assert path.stat().st_mtime_ns == made
    (build.FOLDER / "another.h").write_text("")
    native.library.cache_clear()
    assert native.library().path not in (path, None)


def test_where_the_cache_cannot_be_written(built_anew, monkeypatch, fused):
    (built_anew / "file").write_text("")
    (built_anew / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(built_anew / "file"))
    (built_anew / "tmp").chmod(0o1777)
    monkeypatch.setattr(build.tempfile, "tempdir", str(built_anew / "tmp"))
    assert native.library().path.parent == built_anew / "tmp" / f"mindrlhf-{os.getuid()}"


@pytest.mark.parametrize(("known", "name"), [(("good",), "good"), (("better", "good"), "better")])
def test_a_wheel_s_best_library_needs_no_compiler(shipped, built_anew, monkeypatch, known, name):
    shipped(*known)
    monkeypatch.setenv("PATH", str(built_anew))
    found = native.library()
    assert found.path.parent == native.SHIPPED
    assert f"-{name}-" in found.path.name
    assert found.bfloat16
    assert not (built_anew / "mindrlhf").exists()


def test_a_processor_that_a_wheel_does_not_know_has_its_own_build(shipped, built_anew):
    shipped("other")
    assert native.library().path.parent == built_anew / "mindrlhf"


def test_a_wheel_s_library_of_other_sources_is_not_used(shipped, built_anew):
    shipped("good")
    (build.FOLDER / "another.h").write_text("")
    assert native.library().path.parent == built_anew / "mindrlhf"


@pytest.mark.parametrize("level", build.LEVELS["x86_64"], ids=lambda level: level.name)
def test_a_level_needs_what_the_compiler_uses(fused, level):
    if platform.machine() != "x86_64":
        pytest.skip(f"the compiler is for {platform.machine()}")
    command = ["g++", *level.flags, "-dM", "-E", "-x", "c++", os.devnull]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    plain = subprocess.run(["g++", *command[-5:]], capture_output=True, text=True, check=True).stdout.split()
    used = {
        word.strip("_") for word in set(defined) - set(plain) if word.strip("_").startswith(("AVX", "BMI", "LZCNT"))
    }
    needed = {MACROS.get(name, name.upper()) for name in level.needed}
    assert used - {"AVX", "LZCNT"} <= needed
    assert {f"__{name}__" for name in needed} <= set(defined)


def test_this_machine_s_instructions_are_read():
    levels = [level.name for level in build.fitting_levels()]
    known = build.instructions()
    assert ("x86-64-v3" in levels) == ("avx2" in known)
    assert ("x86-64-v4" in levels) == ("avx512f" in known)


@pytest.mark.slow
def test_a_wheel_computes_without_a_compiler(fused, root, tmp_path):
    """Each level's library passes the acceptance checks of operators, and nothing is built."""
    subprocess.run(["bash", "scripts/wheel.sh", str(tmp_path)], cwd=root, check=True, timeout=900)
    (wheel,) = tmp_path.glob(f"mindrlhf-*-py3-none-linux_{platform.machine()}.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    folder = tmp_path / "installed" / "mindrlhf" / "backend" / "native" / "built"
    assert len(list(folder.iterdir())) == len(build.LEVELS[platform.machine()])
    cache = tmp_path / "cache"
    environment = os.environ | {
        "PATH": str(tmp_path),
        "PYTHONPATH": str(tmp_path / "installed"),
        "XDG_CACHE_HOME": str(cache),
    }
    for level in build.fitting_levels():
        program = (
            "from mindrlhf.backend import native; print(native.library().path); import sys; from mindrlhf import cli; "
            "sys.argv[1:] = ['acceptance', '--device', 'CPU', '--level', 'operators', '--output', 'out']; cli.run()"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        path = folder / build.shipped_name(build.FOLDER, level)
        assert done.stdout.startswith(f"{path}\n")
        assert not list(cache.rglob("*.so"))
        path.unlink()  # the next one is the best then
