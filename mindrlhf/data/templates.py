"""Prompt templates: question, instruction and system prompt to text, in sandboxed jinja2.

A template sees `question` (text), `instruction` (text, may be empty) and `system` (text, or empty for none). It
ends where the model begins to write. It renders no answers, so warm-start answers are the task's own text whatever
the template asks for.
"""

import re
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.sandbox

from mindrlhf.data.chat import render_conversations
from mindrlhf.errors import UserError
from mindrlhf.files.text import read_text
from mindrlhf.models.families import CHATS, DEFAULT, Chat

VARIABLES = ("question", "instruction", "system")

PLAIN = (
    "{% if system %}{{ system }}\n\n{% endif %}{{ question }}{% if instruction %}{{ '\n' + instruction }}{% endif %}\n"
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
        """Compile; raises UserError for bad syntax and variables outside `VARIABLES`."""
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
        except Exception as error:  # the template is the user's program: whatever it raises is for the user to mend
            raise UserError(f"{self._where}: rendering fails ({type(error).__name__}: {error}).") from None


def load_template(name: str, chat_template: str | None = None, chat: Chat = DEFAULT.chat) -> Template:
    """Load a built-in template by name, or a jinja2 file by path.

    A last newline of a file is an editor's and is left out. `chat_template` is the tokenizer's own, if it has one:
    a family's chat then uses the system prompt that this model was trained with (Qwen2.5's base and instruct models
    differ, Qwen3 has none). chat: the markup for `think`.
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
