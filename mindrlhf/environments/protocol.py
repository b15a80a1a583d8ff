"""Environments and tools by name, and the schemas that describe tools to a model."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pydantic

from mindrlhf.errors import UserError
from mindrlhf.user_functions import hint, is_user_function, load_function

_PLACE = "mindrlhf.environments.ready"
READY = {
    "calculator": f"{_PLACE}.calculator:calculator",
    "python": f"{_PLACE}.code_interpreter:code_interpreter",
    "sqlite": f"{_PLACE}.sqlite:sqlite",
    "number_guessing": f"{_PLACE}.games:NumberGuessing",
    "wordle": f"{_PLACE}.games:Wordle",
    "maze": f"{_PLACE}.games:Maze",
    "game_2048": f"{_PLACE}.games:Game2048",
    "tic_tac_toe": f"{_PLACE}.games:TicTacToe",
}
NONE = "none"  # in place of tools: each call is answered by an error
RESERVED = ("reset", "reply", "get_reward", "get_turn_rewards")


@dataclass(frozen=True)
class Environment:
    """Class of an environment, or None for tools alone, with its tools.

    methods, functions: tools by name, which check their arguments; methods take the instance first. raw: it answers
    turns by `reply`. schemas: of all tools.
    """

    made: type | None
    methods: Mapping[str, Callable[..., Any]]
    functions: Mapping[str, Callable[..., Any]]
    raw: bool
    schemas: list[dict[str, Any]]


def load(what: str, name: str) -> Any:
    """Import the environment or tool called `name`; UserError if that fails."""
    target = READY.get(name, name)
    if not is_user_function(target):
        known = f"give one of {', '.join(READY)}, or path/file.py:name"
        raise UserError(f"{what} {name!r} is not known{hint(name, READY)}; {known}.")
    return load_function(what, target)


def load_tools(names: Sequence[str]) -> dict[str, Any]:
    """Import functions by the names that a model calls; no function for `none`."""
    if NONE in names and len(names) > 1:
        raise UserError(f"tools {', '.join(names)}: {NONE} stands alone; leave it out, or the others.")
    return {function.__name__: function for function in (load("tool", name) for name in names if name != NONE)}


def build(made: type | None, functions: Mapping[str, Callable[..., Any]]) -> Environment:
    """Join an environment's class and plain functions.

    UserError for a tool without types or docstring, two tools of one name, and a class that cannot answer.
    """
    if made is not None and not isinstance(made, type):
        raise UserError(f"environment {made!r} is no class; give file.py:Class, with tools or `reply` as methods.")
    raw = callable(getattr(made, "reply", None))
    methods = {} if raw else dict(_methods(made))
    named = f"environment {getattr(made, '__name__', '')!r}"
    tools = ", ".join((*methods, *functions))
    if raw and tools:
        raise UserError(f"{named} answers by `reply`, and there are tools ({tools}); leave one of the two.")
    if not (raw or tools or made is None):
        raise UserError(f"{named} answers nothing; it should have a method that is a tool, or `reply`.")
    if methods.keys() & functions.keys():
        raise UserError(f"{named} and plain functions have a tool of the same name ({tools}); rename one.")
    schemas = [tool_schema(MethodType(method, made)) for method in methods.values()]
    schemas += [tool_schema(function) for function in functions.values()]
    return Environment(made, _checked(methods), _checked(functions), raw, schemas)


def _checked(tools: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {name: pydantic.validate_call(tool) for name, tool in tools.items()}


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function, or bound method, as OpenAI's JSON schema of a tool.

    UserError for an argument without a type, or with a type that JSON lacks, and for a missing docstring.
    """
    name = function.__name__
    text = inspect.getdoc(function)
    if not text:
        raise UserError(f"tool {name!r} has no docstring; its first sentence should tell the model what it does.")
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
            raise UserError(f"tool {name!r}: argument {str(argument)!r} should be one with a name of its own.")
        if argument.annotation is argument.empty:
            raise UserError(f"tool {name!r}: argument {argument.name!r} has no type; write {argument.name}: str, say.")
    try:
        parameters = pydantic.TypeAdapter(function).json_schema()
    except (pydantic.PydanticUserError, NameError) as error:
        problem = str(error).partition("\n")[0]
        raise UserError(f"tool {name!r}: its arguments need types that JSON has, str or int say ({problem}).") from None
    purpose, *sections = re.split(r"^(\w+):\s*$", text, flags=re.MULTILINE)
    arguments = textwrap.dedent(dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "").strip("\n"))
    _, *described = re.split(r"^(\w+)[^:\n]*:", arguments, flags=re.MULTILINE)
    for argument, description in zip(described[::2], described[1::2], strict=True):
        if argument in parameters.get("properties", {}):
            parameters["properties"][argument]["description"] = _line(description)
    for schema in parameters.get("properties", {}).values():
        schema.pop("title", None)
    parameters = {"type": "object", "properties": {}} | parameters
    del parameters["additionalProperties"]
    return {"type": "function", "function": {"name": name, "description": _line(purpose), "parameters": parameters}}


def _line(text: str) -> str:
    return " ".join(text.split())


def _methods(made: type | None) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, member in inspect.getmembers(made, inspect.isfunction):
        if not name.startswith("_") and name not in RESERVED:
            yield name, member
