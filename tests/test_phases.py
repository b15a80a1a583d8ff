"""The phases of a step are listed once, and every timer is one of them."""

import ast
import functools
from pathlib import Path

import mindrlhf
from mindrlhf.metrics.timer import COMPILE, STEP

PACKAGE = Path(mindrlhf.__file__).parent


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def test_every_timer_is_a_phase():
    from mindrlhf.phases import PHASES

    timed = {
        node.args[0].value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("timers")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert {"gen", "update_actor", "reshard", "save_checkpoint"} <= timed <= set(PHASES)
    assert {STEP, COMPILE} <= set(PHASES)


def test_no_other_table_lists_phases():
    names = {"gen", "ref", "old_log_prob", "values", "update_actor", "update_critic", "save_checkpoint"}
    tables = set()
    for file, tree in trees().items():
        for node in ast.walk(tree):
            entries = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            found = {entry.value for entry in entries if isinstance(entry, ast.Constant)}
            if len(found & names) > 1:
                tables.add(file)
    assert tables == {"phases.py"}
