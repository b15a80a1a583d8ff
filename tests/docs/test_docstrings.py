"""Docstrings of the package: no sentence is broken off in the middle of a line."""

import ast

import jobs

FULL = 96  # columns; a line may end earlier where the next word would not fit into these


def test_lines_go_on_to_their_end():
    broken = [
        f"{path.relative_to(jobs.ROOT)}:{number}: {line.strip()} | {following.strip()}"
        for path in sorted((jobs.ROOT / "mindrlhf").rglob("*.py"))
        for number, line, following in docstring_lines(path.read_text(encoding="utf-8"))
        if ends_too_early(line, following)
    ]
    assert not broken, "\n".join(broken)


def docstring_lines(source: str):
    """(number, line, the line after it) of every docstring."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node):
            for number in range(node.body[0].lineno, node.body[0].end_lineno):
                yield number, lines[number - 1], lines[number]


def ends_too_early(line: str, following: str) -> bool:
    """Whether a line of a sentence leaves room for the next word; tables, code and other indents are left alone."""
    text, word = line.rstrip(), following.strip(' "').split(maxsplit=1)[:1]
    table = any("  " in part.strip() for part in (line, following)) or line[:8].isspace() != following[:8].isspace()
    if not text or not word or table or word[0] in ("-", "from") or "=" in text + following:
        return False
    if text[-1] in '.:;!?"`' and len(text.split()) > 1:
        return False
    return len(text) + 1 + len(word[0]) <= FULL
