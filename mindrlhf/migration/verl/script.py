"""Shell scripts that call verl: the words of the command, without a shell.

Assignments, arrays, `${NAME:-default}` and `$((1 + 2))` are expanded as bash does. Nothing is executed, and branches
and loops are not followed: what they set keeps its earlier value, and is named.
"""

import ast
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.files.text import read_text

SUFFIXES = (".sh", ".bash")
TRAINER = re.compile(r"\bmain_(ppo|dapo)\b|\bmain_\w*ppo\b")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+)|([@*#]))|\$\{(\w+)(\[@\]|\[\*\])?(?:(:?[-=])(.*))?\}", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
JOINS = ["&&"], ["||"]
OPENING = ("if", "case", "for", "while", "until", "select")
CLOSING = ("fi", "esac", "done")
TESTS = ("[", "[[", "test")
SEPARATOR = "\0"  # between the words that one word expands to
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Command:
    """Words of a command.

    unfollowed: variables in them that branches of the script set as well.
    """

    words: list[str]
    unfollowed: tuple[str, ...] = ()


def read_script(path: str | Path) -> Command:
    """Read the command in a script that starts verl's trainer.

    Raises UserError unless there is exactly one.
    """
    return script_command(read_text(path, "a shell script"), str(path))


def names_trainer(text: str) -> bool:
    """Tell whether a text holds a command that starts verl's trainer."""
    return bool(TRAINER.search(text))


def script_command(text: str, where: str) -> Command:
    """Read the one command that starts verl's trainer.

    where: name of the text in messages.
    """
    shell = _Shell()
    commands = []
    depth = 0
    before = []
    branched: dict[str, None] = {}  # names that branches set
    try:
        for words in _statements(text):
            depth += words[0] in OPENING
            depth -= words[0] in CLOSING
            joined = words[0] == "||" or (words[0] == "&&" and before[0] in TESTS)
            words = words[1:] if words[:1] in JOINS else words
            if any(map(TRAINER.search, words)):
                commands.append(shell.command(words))
            elif depth == 0 and not joined:
                shell.assign(words)
            else:
                looped = words[1:2] if words[0] in ("for", "select") else []
                found = [match[1] for match in map(ASSIGNED.fullmatch, words) if match]
                branched |= dict.fromkeys([*looped, *found])
            before = words
    except (IndexError, ValueError):
        raise UserError(f"--from-verl: {where} cannot be read as a shell script; give the command alone.") from None
    if len(commands) != 1:
        found = f"--from-verl: {where} has {len(commands)} commands that start verl's main_ppo"
        raise UserError(f"{found}; give {'its arguments as a text' if commands else 'a script that starts one'}.")
    return Command(commands[0], tuple(name for name in branched if name in shell.read))


@dataclass
class _Shell:
    """Variables of a script, those of the environment beneath.

    origins: variable -> the variables that its value was made of, itself included. read: variables that the last
    assignment or command was made of.
    """

    values: dict[str, list[str]] = field(default_factory=dict)
    origins: dict[str, set[str]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def assign(self, words: list[str]) -> None:
        """Follow a statement of assignments; other statements change nothing."""
        for match in map(ASSIGNED.fullmatch, words[1:] if words[0] in DECLARING else words):
            if match is None:
                break
            name, adds, raw = match.groups()
            self.read = {name} | (self.origins.get(name, set()) if adds else set())
            if raw[:1] == "(":
                value = [one for word in _words(raw[1:-1]) for one in self.expand(word)]
            else:
                value = [" ".join(self.expand(raw))]
            self.values[name] = [*self.values.get(name, ()), *value] if adds and raw[:1] == "(" else value
            self.origins[name] = self.read

    def command(self, words: list[str]) -> list[str]:
        self.read = set()
        return [one for word in words for one in self.expand(word)]

    def expand(self, raw: str) -> list[str]:
        """Expand a raw word, quotes and all, into words."""
        quoted = raw[:1] in ("'", '"') and not raw.startswith(('"$@', '"${'))
        return [word for word in self._expanded(raw).split(SEPARATOR) if word or quoted]

    def _expanded(self, raw: str, inside: bool = False) -> str:
        """Expand text; inside: of double quotes, where values are not split into words."""
        parts = []
        at = 0
        while at < len(raw):
            end = _end(raw, at, inside)
            sign = raw[at]
            piece = raw[at:end]
            if sign == "\\" and len(piece) == 2:
                parts.append("" if piece[1] == "\n" else piece[1] if not inside or piece[1] in '"\\$`' else piece)
            elif sign == "'" and not inside:
                parts.append(piece[1:-1])
            elif sign == '"':
                parts.append(self._expanded(piece[1:-1], inside=True))
            elif sign == "$":
                end = at + len(piece := _variable(raw, at) or piece)
                parts.append(self._variable(piece, inside))
            else:
                parts.append(piece)
            at = end
        return "".join(parts)

    def _variable(self, piece: str, inside: bool) -> str:
        """Find the value of a variable or an arithmetic expression.

        Anything else is returned as it is.
        """
        if piece.startswith("$(("):
            named = re.sub(r"(?<![\w${])[A-Za-z_]\w*", r"${\g<0>}", piece[3:-2])
            return _computed(self._expanded(named, inside=True)) or piece
        if piece == "$(pwd)":
            return os.getcwd()
        match = VARIABLE.fullmatch(piece)
        if match is None:
            return piece
        plain, special, name, every, sign, default = match.groups()
        if special:
            return ""
        known = self.values.get(plain or name)
        self.read |= self.origins.get(plain or name, {plain or name})
        if known is None and (plain or name) in os.environ:
            known = [os.environ[plain or name]]
        if known is None or (sign and sign[0] == ":" and not "".join(known)):
            return piece if default is None and not every else self._expanded(default or "", inside)
        if every:
            return SEPARATOR.join(known)
        return known[0] if inside else SEPARATOR.join(known[:1][0].split()) if known else ""


def _computed(text: str) -> str:
    """Compute integers with + - * / % and parentheses; empty for anything else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _statements(text: str) -> Iterator[list[str]]:
    """Split a script into statements of raw words.

    One after `&&` or `||` begins with that sign.
    """
    words = []
    at = 0
    start = 0
    text = f"{text}\n"
    while at < len(text):
        sign = text[at]
        if sign == "#" and at == start:
            at = start = text.index("\n", at)
        elif sign.isspace() or sign in ";&|":
            if start < at:
                words.append(text[start:at])
            if sign not in " \t\r" and words and words not in JOINS:
                yield words
                words = []
            sign = text[at : at + 2]
            words += [sign] * ([sign] in JOINS)
            at = start = at + (2 if [sign] in JOINS else 1)
        elif text.startswith("\\\n", at) and start == at:
            at = start = at + 2
        elif sign == "(" and not text[start:at].endswith("="):
            at += 1
        else:
            at = _end(text, at)


def _words(text: str) -> list[str]:
    return [word for words in _statements(text) for word in words]


def _variable(text: str, at: int) -> str:
    match = re.match(r"\$\w+|\$[@*#]", text[at:])
    return match[0] if match else ""


def _end(text: str, at: int, inside: bool = False) -> int:
    """Find the end of the sign, quotation or bracket that begins at a place.

    Raises IndexError or ValueError for one that does not end.
    """
    sign = text[at]
    if sign == "\\":
        return min(at + 2, len(text))
    if sign == "'" and not inside:
        return text.index("'", at + 1) + 1
    opened = text[at : at + 2] if text[at : at + 2] in ("$(", "${") else sign
    closing = {"$(": ")", "${": "}", "(": ")", '"': '"', "`": "`"}.get(opened)
    if closing is None or (inside and opened in ("(", '"')):
        return at + 1
    at += len(opened)
    while text[at] != closing:
        comment = opened == "(" and text[at] == "#" and text[at - 1].isspace()
        at = text.index("\n", at) if comment else _end(text, at, inside=closing == '"')
    return at + 1
