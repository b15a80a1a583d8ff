"""Functions of a C++ file with their lines, for the house's limits; a reader of braces, and no parser."""

import re
from collections.abc import Iterator

# What may be neither a brace nor a name: comments, texts, and lines of the preprocessor with those that they go on in.
_QUIET = r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:\\\n|[^\n])*"""
QUIET = re.compile(_QUIET, re.DOTALL | re.MULTILINE)
MEMBERS = re.compile(r"^[^(]*$|\b(namespace|struct|class|union)\b[^()]*$")  # what stands before a scope's members
BODY = re.compile(r"(\)|\}|\bconst|\bnoexcept|\boverride)\s*$")  # what stands before a function's body


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function and method that is outside of another."""
    text = QUIET.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    start = at = 0  # start: of the declaration that `at` is in
    while at < len(text):
        if text[at] in ";}":
            start = at + 1
        elif text[at] == "{":
            head = text[start:at]
            if MEMBERS.search(head):
                start = at + 1
            elif BODY.search(head):
                end = _closing(text, at)
                first = start + len(head) - len(head.lstrip())
                yield _name(head), text.count("\n", first, end) + 1
                start, at = end + 1, end
            else:
                at = _closing(text, at)  # of a member in a constructor's list
        at += 1


def _closing(text: str, at: int) -> int:
    """The place of the brace that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place
    raise ValueError("a brace is not closed")


def _name(head: str) -> str:
    head = re.sub(r"^\s*template\s*<[^{;]*?>\s*(?=\w)", "", head)
    if macro := re.match(r"\s*ENTRY_POINT\((\w+)\)", head):
        return macro[1]
    return re.search(r"(operator[^\w\s]+?|[\w~:]+)\s*\(", head)[1]
