"""Schemas of tools, from types and docstrings."""

from typing import Literal

from mindrlhf.environments.protocol import tool_schema


def search(word: str, count: int = 3, kind: Literal["all", "some"] = "all", among: list[float] | None = None) -> str:
    """Search for a word.

    It goes
    on.

    Args:
        word: What to look
            for: a word.
        count (int, optional): How many.

    Returns:
        str: What was found.
    """


async def now() -> str:
    """Tell the time."""


def test_types_and_descriptions():
    found = tool_schema(search)
    assert found["type"] == "function"
    assert found["function"]["name"] == "search"
    assert found["function"]["description"] == "Search for a word. It goes on."
    parameters = found["function"]["parameters"]
    assert list(parameters) == ["type", "properties", "required"]
    assert parameters["required"] == ["word"]
    assert parameters["properties"] == {
        "word": {"type": "string", "description": "What to look for: a word."},
        "count": {"type": "integer", "default": 3, "description": "How many."},
        "kind": {"type": "string", "enum": ["all", "some"], "default": "all"},
        "among": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}], "default": None},
    }


def test_no_arguments():
    assert tool_schema(now)["function"] == {
        "name": "now",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {}},
    }
