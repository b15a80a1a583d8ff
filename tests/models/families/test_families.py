"""A model family is one file: nothing else in the package names one, and the files need no MindSpore."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mindrlhf
from mindrlhf.data.chat import render_conversations
from mindrlhf.data.templates import NAMES
from mindrlhf.models.families import CHATS, FAMILIES

PACKAGE = Path(mindrlhf.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "families"]


def texts(path: Path) -> set[str]:
    """The strings of a module, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    shown = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in shown)
    return {node.value for node in constants if isinstance(node.value, str)}


def test_no_other_file_names_a_family_or_its_tokens():
    names = {*FAMILIES, *CHATS, *(family.mindformers for family in FAMILIES.values())}
    tokens = {token for family in FAMILIES.values() for token in (*family.end_tokens, family.end_of_text)}
    tokens |= {chat.before for chat in CHATS.values()}
    found = {}
    for path in FILES:
        known = [text for text in texts(path) if text in names or any(token in text for token in tokens)]
        if known:
            found[str(path.relative_to(PACKAGE))] = known
    assert found == {}


def test_a_family_s_name_is_its_file_s():
    folder = PACKAGE / "models" / "families"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "family"} == set(FAMILIES)
    assert all(family.name == name for name, family in FAMILIES.items())


def test_families_and_settings_import_no_mindspore():
    code = (
        "import sys, mindrlhf.models.families, mindrlhf.configs.model, mindrlhf.configs.model_yaml, "
        "mindrlhf.data.templates; sys.exit('mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", CHATS)
def test_the_markup_writes_turns_and_the_beginning_of_an_answer(name):
    chat = CHATS[name]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": " {{ Q }}\n"}]
    (text,) = render_conversations([(messages, "row 1")], None, chat)
    begun, _ = chat.turn("assistant", "\0").split("\0")
    assert text == chat.opening + chat.turn("system", "S") + chat.turn("user", " {{ Q }}\n") + begun
    assert name in NAMES
