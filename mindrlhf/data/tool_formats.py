"""Formats of tool calls in a model's turns, and of their answers."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.json import parse_json
from mindrlhf.user_functions import hint, is_user_function, load_function

CODE_TOOL = "code_interpreter"  # of the formats that write code
CODE = "code"  # its argument
OTHERS = ("parameters", "args", "kwargs", "input")  # names of arguments in other formats, Llama's and Anthropic's


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool.

    error: text that the model gets instead of an answer if its call does not parse; nothing is called then.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


class ToolFormat:
    """Format of calls in a turn's text; a user's own is derived from it.

    stop_strings: texts that end a turn, in addition to its end token.
    inline: if a stop string ended a turn, its answers are text within the same turn of the chat template.
    """

    stop_strings: tuple[str, ...] = ()
    inline: bool = False

    def parse(self, text: str) -> list[ToolCall]:
        """Find the calls of a turn in order; a broken one has an `error`."""
        raise NotImplementedError

    def render(self, call: ToolCall) -> str:
        """Write a call as `parse` reads it; ValueError for another kind."""
        raise NotImplementedError

    def _readable(self, call: ToolCall, text: str) -> str:
        """Return a written call; ValueError if `parse` reads another one.

        Code may have the format's own signs in it.
        """
        if [found.arguments for found in self.parse(text)] != [{CODE: _code(call)}]:
            raise ValueError(f"the code of {call.name!r} has signs that end a call, and cannot be written as one")
        return text

    def answer(self, text: str) -> str | None:
        """Write a tool's answer; None leaves that to the chat template's tool messages."""
        return None

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut a demonstrated turn into (text, whether the model writes it)."""
        return [(text, True)]


class Hermes(ToolFormat):
    """JSON objects between `<tool_call>` and `</tool_call>`, as Hermes and Qwen write them.

    Reasoning before a `</think>` calls nothing, nor does reasoning that is not closed.
    """

    def parse(self, text: str) -> list[ToolCall]:
        calls = []
        for piece in _hermes_calls(text):
            content, closing, _ = piece.rpartition("</tool_call>")
            try:
                if not closing:
                    raise ValueError("there is no </tool_call>")
                calls.append(read_call(parse_json(content)))
            except ValueError as error:
                calls.append(ToolCall("", {}, f"Error: the tool call cannot be read: {error}"))
        return calls

    def render(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        name = json.dumps(call.name, ensure_ascii=False)
        written = f'{{"name": {name}, "arguments": {arguments}}}'.replace("</think>", "<\\/think>")
        return f"<tool_call>\n{written}\n</tool_call>"


class PythonBlock(ToolFormat):
    """Fenced blocks of Python outside of reasoning, answered by a user turn."""

    def parse(self, text: str) -> list[ToolCall]:
        blocks = re.findall(r"^```(?:python|py)[ \t]*\n(.*?)(^```|\Z)", _spoken(text), re.DOTALL | re.MULTILINE)
        return [_code_call(code, "" if closing else "the code block has no closing ```") for code, closing in blocks]

    def render(self, call: ToolCall) -> str:
        return self._readable(call, f"```python\n{_code(call)}\n```")

    def answer(self, text: str) -> str:
        return f"```output\n{text}\n```"


class ReTool(ToolFormat):
    """Code between `<code>` and `</code>`, answered within the turn by `<interpreter>`.

    ReTool, arXiv 2504.11536. The code may be fenced. Code in reasoning counts too; reasoning goes on after it.
    """

    stop_strings = ("</code>",)
    inline = True

    def parse(self, text: str) -> list[ToolCall]:
        blocks = re.findall(r"<code>(.*?)(</code>|\Z)", text, re.DOTALL)
        fence = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
        return [
            _code_call(fenced[1] if (fenced := fence.fullmatch(code)) else code, "" if end else "there is no </code>")
            for code, end in blocks
        ]

    def render(self, call: ToolCall) -> str:
        return self._readable(call, f"<code>\n```python\n{_code(call)}\n```\n</code>")

    def answer(self, text: str) -> str:
        return f"\n<interpreter>\n{text}\n</interpreter>\n"

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        cut = re.split(r"(\n*<interpreter>.*?</interpreter>\n*)", text, flags=re.DOTALL)
        return [(piece, number % 2 == 0) for number, piece in enumerate(cut) if piece]


FORMATS = {"hermes": Hermes, "retool": ReTool, "python_block": PythonBlock}


def load_tool_format(name: str) -> ToolFormat:
    """Make a format by name, or by `file.py:Class`; UserError for an unknown one."""
    if name in FORMATS:
        return FORMATS[name]()
    if not is_user_function(name):
        known = f"{', '.join(FORMATS)}, or file.py:Class"
        raise UserError(f"tool format {name!r} is not known{hint(name, FORMATS)}; give one of {known}.")
    made = load_function("tool format", name)
    if not (isinstance(made, type) and issubclass(made, ToolFormat)):
        raise UserError(f"tool format {name!r}: should be a class derived from {__name__}.ToolFormat.")
    return made()


def read_call(value: Any) -> ToolCall:
    """Read a call as JSON: `{"name", "arguments"}`, or OpenAI's form with both in `function`.

    The arguments may be JSON text. Raises ValueError for anything else.
    """
    value = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError('a call should be an object with a "name"')
    arguments = {} if value.get("arguments") is None else value["arguments"]
    if "arguments" not in value and (others := [key for key in OTHERS if value.get(key)]):
        raise ValueError(f'a call of {value["name"]} should have "arguments", and has {others[0]!r}')
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise ValueError(f'the "arguments" of {value["name"]} are text, and not JSON ({error})') from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f'the "arguments" of {value["name"]} should be an object')
    return ToolCall(value["name"], arguments)


def with_calls_as_text(message: Mapping[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    """Write a message's calls into its content. Raises ValueError for calls of another kind."""
    calls = [tool_format.render(read_call(call)) for call in message.get("tool_calls") or ()]
    said = message.get("content") or ""  # a text, or parts without calls
    content = "\n".join(filter(None, [said, *calls])) if calls else said
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _hermes_calls(text: str) -> list[str]:
    """Cut text at each `<tool_call>` outside of reasoning and of calls' JSON."""
    calls: list[str] = []
    tag = _HERMES_TAG.search(text)
    while tag:
        end = tag.end()
        if tag[0] == "<think>":
            closing = text.find("</think>", end)
            end = len(text) if closing < 0 else closing + len("</think>")
        elif tag[0] == "</think>":  # all before it was reasoning
            calls.clear()
        else:
            end = _end_of_json(text, end)
        following = _HERMES_TAG.search(text, end)
        if tag[0] == "<tool_call>":
            calls.append(text[tag.end() : following.start() if following else None])
        tag = following
    return calls


_HERMES_TAG = re.compile(r"<tool_call>|</?think>")
_SPACE = re.compile(r"\s*")


def _end_of_json(text: str, start: int) -> int:
    """Find the end of a JSON value that stands at `start`, or return `start`."""
    try:
        return json.JSONDecoder().raw_decode(text, _SPACE.match(text, start).end())[1]
    except (ValueError, RecursionError):
        return start


def _spoken(text: str) -> str:
    """Text after the reasoning, up to the beginning of an unfinished one."""
    after = text.rpartition("</think>")[2]
    before, opening, _ = after.partition("<think>")
    return before if opening and "```" not in before else after


def _code_call(code: str, error: str) -> ToolCall:
    if error:
        return ToolCall("", {}, f"Error: the code cannot be read: {error}")
    return ToolCall(CODE_TOOL, {CODE: code.strip("\n")})


def _code(call: ToolCall) -> str:
    if not isinstance(call.arguments.get(CODE), str):
        raise ValueError(f"a call of {call.name!r} without {CODE!r} cannot be written as code")
    return call.arguments[CODE].strip("\n")
