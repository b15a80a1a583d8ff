"""Prompt templates: questions and conversations of rows to the ids of prompts.

A question becomes a user message, with the task's instruction below, which the model's own chat template writes. A
template for one question is sandboxed jinja2: it gets question, instruction and system prompt (the last two may be
empty), and ends where the model begins to write.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from mindrlhf.data.chat import family_chat, render_conversations, with_variables, write_prompts
from mindrlhf.data.messages import MessageReader
from mindrlhf.data.source import refuse_images
from mindrlhf.data.tasks.conversation import system_prompt, with_system_prompt
from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.text import read_text
from mindrlhf.models.families import CHATS, DEFAULT, Chat

VARIABLES = ("question", "instruction", "system")

PLAIN = (
    "{% if system %}{{ system }}\n\n{% endif %}{{ question }}{% if instruction %}{{ '\n' + instruction }}{% endif %}\n"
)
# The same for several turns, as a chat template of HF.
PLAIN_TURNS = (
    "{% for message in messages %}{{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}\n"
    "{{ '\n' if message.role == 'system' else '' }}{% endfor %}"
)
THINK_SYSTEM = (
    "First work the problem out between <think> and </think>, "
    "then give only the final answer between <answer> and </answer>."
)
OWN = "chat"  # the model's own format
THINK = "think"  # the same, with a system prompt of its own
QUESTIONS = {"plain": PLAIN}  # templates for one question
NAMES = (*CHATS, *QUESTIONS, THINK, OWN)

_log = logging.getLogger(__name__)


class Template:
    """Compiled template for one question."""

    def __init__(self, source: str, where: str):
        """Compile; UserError for bad syntax and variables outside `VARIABLES`."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        try:
            unknown = jinja2.meta.find_undeclared_variables(environment.parse(source)) - set(VARIABLES)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{where}, line {error.lineno}: not a jinja2 template ({error.message}).") from None
        if unknown:
            raise UserError(
                f"{where}: uses {', '.join(sorted(unknown))}, but a template is given {', '.join(VARIABLES)}."
            )
        self._where = where

    def render(self, question: str, instruction: str = "", system: str = "") -> str:
        """Render the prompt of a question."""
        try:
            return self._template.render(question=question, instruction=instruction, system=system)
        except Exception as error:  # the template is the user's program: whatever it raises, the user has to fix it
            raise UserError(f"{self._where}: rendering fails ({type(error).__name__}: {error}).") from None


def load_template(name: str) -> Template:
    """Load a template for one question, by its name or a file's path.

    A file's last newline is left out.
    """
    if name in QUESTIONS:
        return Template(QUESTIONS[name], f"template {name}")
    if not Path(name).exists():
        raise UserError(f"--template {name}: neither one of {', '.join(NAMES)} nor a file.")
    return Template(read_text(name, "a jinja2 template").removesuffix("\n"), name)


def default_system_prompt(chat_template: str, chat: Chat = DEFAULT.chat) -> str:
    """Find the system prompt that a chat template adds to a lone question.

    chat: the markup that the template writes.
    """
    try:
        (text,) = render_conversations([([{"role": "user", "content": "?"}], "the question ?")], chat_template)
    except UserError:
        return chat.system
    before, after = (re.escape(part) for part in chat.turn("system", "\0").split("\0"))
    found = re.match(f"{re.escape(chat.opening)}{before}(.*?){after}", text, re.DOTALL)
    return found.group(1) if found else ""


def prompt_ids(
    rows: Sequence[TaskRow],
    places: Sequence[str],
    instruction: str,
    template: str | None,
    system: str | None,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    reader: MessageReader | None = None,
) -> list[list[int]]:
    """Write the prompt of each row as ids.

    places: the rows' places, for messages. instruction: the task's, below a question. template: its name or file; None
    is the tokenizer's own chat template, or the chat of its model family. system: replaces the rows' system prompts; ""
    removes them, None keeps them. tools: JSON schemas of tools, which the tokenizer's own chat template lists.
    variables: additional ones of that template. reader: of messages, instead of the tokenizer's. UserError as
    `Template` and `write_prompts`, for a conversation of several turns with a template for one question, and for a row
    with images, which are taken out for a model that sees.
    """
    for row, where in zip(rows, places, strict=True):
        refuse_images(row.extra, where)
    question = None if template in (None, OWN, THINK, *CHATS) else load_template(template)
    tokenizer, variables = with_variables(tokenizer, variables)
    if tools:
        _check_tools(tokenizer, template, tools, variables)
    reader = reader or MessageReader(tokenizer)
    if question is not None:
        rendered = [
            _question(row, where, instruction, system, question, reader)
            for row, where in zip(rows, places, strict=True)
        ]
        return write_prompts(list(zip(rendered, places, strict=True)), tokenizer, reader=reader)
    markup = None if tools else _markup(tokenizer, template, system)
    default = THINK_SYSTEM if template == THINK else None
    if default is None and system is None and (markup or tokenizer.chat_template is None):
        default = (markup or family_chat(tokenizer) or DEFAULT.chat).system
    talks = [_conversation(row, instruction, system, default) for row in rows]
    return write_prompts(list(zip(talks, places, strict=True)), tokenizer, tools, variables, reader, markup)


def _check_tools(
    tokenizer: Tokenizer, template: str | None, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> None:
    """Refuse tools that no template would list in the prompts."""
    if template not in (None, OWN):
        raise UserError(
            f"--template {template}: lists no tools, and the run has some; leave it out, and the tokenizer's own chat "
            "template writes the prompts."
        )
    own = tokenizer.chat_template_for(True)
    if own is None:
        raise UserError(
            "the tokenizer has no chat template, which would list the tools in prompts; give a tokenizer with one, or "
            "the prompts as text or as a MindRecord of `mindrlhf data`, which list what they have to."
        )
    asked = [([{"role": "user", "content": "?"}], "a question")]
    plain, listed = (render_conversations(asked, own, **more, **variables) for more in ({}, {"tools": list(tools)}))
    if plain == listed:
        _log.warning("the tokenizer's chat template lists no tools: the prompts have to say what the run's tools are")


def _markup(tokenizer: Tokenizer, template: str | None, system: str | None) -> Chat | None:
    """Choose a family's markup in place of the tokenizer's own chat template, or None.

    Without a system prompt (""), it replaces a template that would add one of its own.
    """
    chat = family_chat(tokenizer)
    own = tokenizer.chat_template
    if template in CHATS and (own is None or chat != CHATS[template]):
        return CHATS[template]
    return chat if system == "" and own and chat and default_system_prompt(own, chat) else None


def _conversation(row: TaskRow, instruction: str, system: str | None, default: str | None) -> Any:
    """Make a row's messages, or return its whole prompt.

    default: replaces an absent system prompt.
    """
    if row.prompt is not None:
        return row.prompt
    asked = f"{row.question}\n{instruction}" if instruction else row.question
    messages = row.messages or [{"role": "user", "content": asked}]
    given = default if system is None and system_prompt(messages) is None else system
    return messages if given is None else with_system_prompt(messages, given)


def _question(
    row: TaskRow, where: str, instruction: str, system: str | None, template: Template, reader: MessageReader
) -> str:
    """Render a row by a template for one question."""
    if row.prompt is not None:
        return row.prompt
    own = None if row.messages is None else system_prompt(row.messages)
    if row.messages is not None and len(row.messages) > (1 if own is None else 2):
        raise UserError(
            f"{where}: has {len(row.messages)} messages, and the template writes one question; leave --template out, "
            "and the tokenizer's chat template writes them."
        )
    texts = row.question, "" if row.messages else instruction, (own or "") if system is None else system
    return template.render(*map(reader.text, texts))
