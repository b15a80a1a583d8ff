"""The package's structure: who imports whom, and sizes of files, tests included, and of functions, C++ included."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from cpp_functions import cpp_functions

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mindrlhf"
LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines

# Percent of a room's assignments that give a tuple of values to a tuple of names: unrelated values have a line each.
MOST_TUPLES = 3
SPLATTED = {"Table", "Progress"}  # of a library: they take any number of things


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of the whole package."""
    paths = PACKAGE.rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def imports() -> dict[str, set[str]]:
    """Module -> the package's modules that it imports anywhere, functions and type checking included."""
    return {name: set(_imported(path)) - {name} for name, path in modules().items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module


def room(module: str) -> str | None:
    """The top folder that a module is in; None for the few files beside the folders."""
    path = modules()[module].relative_to(PACKAGE)
    return path.parts[0] if len(path.parts) > 1 else None


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function and method."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def has_tuples(node: ast.AST) -> bool:
    """Whether an assignment gives a tuple of values to a tuple of names."""
    return isinstance(node, ast.Assign) and {type(node.targets[0]), type(node.value)} == {ast.Tuple}


def splats(path: Path) -> Iterator[str]:
    """The classes that a file calls with a splatted tuple among the arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and any(isinstance(argument, ast.Starred) for argument in node.args):
            name = ast.unparse(node.func).rpartition(".")[2].lstrip("_")
            if name[:1].isupper():
                yield name


def cpp_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".h", ".cpp")]


def test_no_two_files_import_each_other():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_few_rooms_import_each_other():
    arrows = {(room(a), room(b)) for a, others in imports().items() for b in others if room(a) and room(b)}
    mutual = sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)
    assert mutual == [("configs", "models")]


def test_files_are_short():
    tests = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("*.py")}
    paths = modules() | tests | {path.name: path for path in cpp_files()}
    found = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items()}
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FILE} == {}


def test_stand_ins_of_tests_have_a_class():
    """A test takes the package's own settings and objects, or a class that says what it stands for."""
    bag = "Simple" + "Namespace"
    tests = (ROOT / "tests").rglob("*.py")
    assert [str(path.relative_to(ROOT)) for path in tests if bag in path.read_text(encoding="utf-8")] == []


def test_functions_are_short():
    found: dict[str, int] = {}
    for module, path in modules().items():
        for name, lines in functions(path):
            found[f"{module}.{name}"] = max(lines, found.get(f"{module}.{name}", 0))
    for path in cpp_files():
        for name, lines in cpp_functions(path.read_text(encoding="utf-8")):
            found[f"{path.name}: {name}"] = max(lines, found.get(f"{path.name}: {name}", 0))
    assert {"decode.h: run", "attention_half.h: AttentionGradient", "optimizer.h: adamw"} <= found.keys()
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION} == {}


CPP = """
#define NAME(x) \\
  int x() { return 0; }
namespace {  // a comment with { and (
template <typename T, int N = f(1)>
struct Pair {
  Pair(int a) : both{a, {a}}, other(a) {
  }
  bool operator()(int a) const {
    if (a) { return "}"[0]; }
    return [&](int b) { return b; }(a);
  }
  int both[2], other;
};
}
ENTRY_POINT(linear) {

}
"""


def test_functions_of_cpp_are_found_with_their_lines():
    assert list(cpp_functions(CPP)) == [("Pair", 2), ("operator()", 4), ("linear", 3)]


def test_what_a_loop_over_numbers_calls_is_inlined():
    """Left to itself, a compiler called `gated`'s term once a second operator used it: 10% of a pass."""
    calls = re.compile(r"(?<!std::)\b(?:fill|sum_over)\(\s*[^;{]*?\](\(int64_t \w+\)\s*\w*)\s*\{")
    found = [call for path in cpp_files() for call in calls.findall(path.read_text(encoding="utf-8"))]
    assert len(found) >= 14
    assert [call for call in found if not call.endswith(" INLINE")] == []


def test_the_trainer_stays_small():
    assert len(list((PACKAGE / "trainer").glob("*.py"))) <= 11  # with the empty `__init__`
    assert len(imports()["mindrlhf.trainer.build"]) < 20
    (build,) = (lines for name, lines in functions(modules()["mindrlhf.trainer.build"]) if name == "build")
    assert build <= 40


def test_unrelated_values_have_a_line_each():
    counts: dict[str, list[bool]] = {}
    for module, path in modules().items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assigned = [
            node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value
        ]
        counts.setdefault(room(module) or "", []).extend(map(has_tuples, assigned))
    shares = {name: 100 * sum(found) / len(found) for name, found in counts.items() if found and name}
    assert {name for name, share in shares.items() if share > MOST_TUPLES} == set()


def test_constructors_take_no_splatted_tuple():
    found = {module: set(splats(path)) - SPLATTED for module, path in modules().items()}
    assert {module: names for module, names in found.items() if names} == {}
