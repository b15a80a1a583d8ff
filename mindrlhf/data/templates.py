"""Prompt templates: question, instruction and system prompt to text, in sandboxed jinja2.

A template gets these three texts (the last two may be empty), and ends where the model begins to write.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from mindrlhf.data.chat import family_chat, render_conversations, write_prompts
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
# name -> (template, the system prompt when the user gives none)
BUILT_IN = {
    **{name: (chat.template, chat.system) for name, chat in CHATS.items()},
    "plain": (PLAIN, ""),
    "think": (DEFAULT.chat.template, THINK_SYSTEM),
}
OWN = "chat"  # the tokenizer's own chat template
NAMES = (*BUILT_IN, OWN)


class Template:
    """Compiled prompt template; `default_system` replaces an absent system prompt."""

    def __init__(self, source: str, where: str, default_system: str = ""):
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
        self._where, self.default_system = where, default_system

    def render(self, question: str, instruction: str = "", system: str | None = None) -> str:
        """Render the prompt; system: None is the template's default, "" none at all."""
        system = self.default_system if system is None else system
        try:
            return self._template.render(question=question, instruction=instruction, system=system)
        except Exception as error:  # the template is the user's program: whatever it raises, the user has to fix it
            raise UserError(f"{self._where}: rendering fails ({type(error).__name__}: {error}).") from None


def load_template(name: str, chat_template: str | None = None, chat: Chat = DEFAULT.chat) -> Template:
    """Load a built-in template by name, or a jinja2 file by path.

    A file's last newline is left out. chat_template: the tokenizer's own; a family's chat then uses its system prompt
    (Qwen2.5's base and instruct models differ, Qwen3 has none). chat: the markup for `think`.
    """
    if name in BUILT_IN:
        source, system = (chat.template, THINK_SYSTEM) if name == "think" else BUILT_IN[name]
        if name in CHATS and chat_template is not None:
            system = default_system_prompt(chat_template, CHATS[name])
        return Template(source, f"template {name}", system)
    if not Path(name).exists():
        raise UserError(f"--template {name}: neither one of {', '.join(NAMES)} nor a file.")
    return Template(read_text(name, "a jinja2 template").removesuffix("\n"), name)


def default_system_prompt(chat_template: str, chat: Chat = DEFAULT.chat) -> str:
    """Find the system prompt that a chat template adds to a lone question."""
    try:
        (text,) = render_conversations([([{"role": "user", "content": "?"}], "the question ?")], chat_template)
    except UserError:
        return chat.system
    before, after = (re.escape(part) for part in chat.turn("system", "\0").split("\0"))
    found = re.match(f"{re.escape(chat.opening)}{before}(.*?){after}", text, re.DOTALL)
    return found.group(1) if found else ""


def prompt_texts(
    rows: Sequence[TaskRow],
    places: Sequence[str],
    instruction: str,
    template: str | None,
    system: str | None,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[str]:
    """Render the prompt of each row.

    places: the rows' places, for messages. instruction: the task's, below a question. template: its name or file; None
    is the chat of the tokenizer's model family, or its own chat template. system: replaces the rows' system prompts; ""
    removes them, None keeps them. tools: JSON schemas of tools, which the tokenizer's own chat template lists.
    variables: additional ones of that template. UserError as `Template`, and for a conversation of several turns with a
    template for one question.
    """
    chat = family_chat(tokenizer)
    markup = chat or DEFAULT.chat
    if tools:
        if tokenizer.chat_template is None or template not in (None, OWN):
            raise UserError("the tokenizer's chat template lists tools; give a tokenizer with one, and no --template.")
        template = OWN
    if template is None:
        template = OWN if chat is None and tokenizer.chat_template else markup.name
    rendering = load_template(markup.name if template == OWN else template, tokenizer.chat_template, markup)
    prompts = []
    for row, where in zip(rows, places, strict=True):
        if row.prompt is not None:
            prompts.append((row.prompt, where))
            continue
        messages = row.messages
        if messages is None and template == OWN:
            text = f"{row.question}\n{instruction}" if instruction else row.question
            messages = [{"role": "user", "content": text}]
        own = None if messages is None else system_prompt(messages)
        given = own if system is None else system
        if messages is None:
            prompts.append((rendering.render(row.question, instruction, system), where))
        elif template in (*CHATS, OWN):  # the tokenizer's own chat template writes conversations
            if given is None and tokenizer.chat_template is None:
                given = rendering.default_system
            prompts.append((messages if given is None else with_system_prompt(messages, given), where))
        elif len(messages) > (1 if own is None else 2):
            raise UserError(
                f"{where}: has {len(messages)} messages, and --template {template} writes one question; leave "
                "--template out, and the tokenizer's chat template writes them."
            )
        else:
            prompts.append((rendering.render(row.question, "", given), where))
    return write_prompts(prompts, tokenizer, tools, variables)
