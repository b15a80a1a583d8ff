"""Each constant of the package is defined in one file."""

import ast
from collections import defaultdict
from pathlib import Path

import mindrlhf

OWN = ("logging.getLogger", "TypeVar")  # calls that make a thing of one file
PACKAGE = Path(mindrlhf.__file__).parent


def assigned(tree: ast.Module):
    """(name, expression) of each constant at the top of a file; loggers and type variables are one for each file."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.value).startswith(OWN):
            continue
        names, values = node.targets, [node.value]
        if isinstance(names[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            names, values = names[0].elts, node.value.elts
        yield from ((name.id, value) for name, value in zip(names, values, strict=False) if isinstance(name, ast.Name))


def meaning(expression: ast.expr) -> str:
    """The value of plain arithmetic (2**30 is 1024**3), else the text."""
    text = ast.unparse(expression)
    if all(isinstance(node, ast.Constant | ast.BinOp | ast.operator) for node in ast.walk(expression)):
        return repr(eval(text, {"__builtins__": {}}))  # numbers and operators alone
    return text


def test_a_constant_of_one_name_and_value_stands_in_one_file():
    places = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name, value in assigned(ast.parse(path.read_text(encoding="utf-8"))):
            places[name.strip("_"), meaning(value)].add(str(path.relative_to(PACKAGE)))
    doubles = {name: sorted(files) for (name, _), files in places.items() if len(files) > 1}
    assert not doubles
    assert ("GIB", str(1024**3)) in places, "the test reads what files define"
