"""Conversations -> prompt text, with a tokenizer's own chat template or ChatML. Nothing here runs tools or images."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from mindrlhf.errors import UserError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def render_messages(messages: Any, where: str, chat_template: str | None, **tokens: str) -> str:
    """The text after which the model answers the last message.

    messages: [{"role": ..., "content": ...}, ...]. where: names them in messages of error. chat_template: jinja2 in
    HF's dialect; None is ChatML. tokens: what a template may want beside the messages, `eos_token` for example.
    Raises UserError for anything else than such messages, and when the template refuses them.
    """
    _check(messages, where)
    if chat_template is None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(keep_trailing_newline=True)
    else:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
    environment.globals["raise_exception"] = _refuse
    try:
        template = environment.from_string(chat_template or CHATML)
        return template.render(messages=messages, add_generation_prompt=True, **tokens)
    except Exception as error:  # the template is another's program: whatever it raises is for the user to mend
        raise UserError(f"{where}: the tokenizer's chat template fails ({type(error).__name__}: {error}).") from None


def _check(messages: Any, where: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f'{where}: messages should be a list of {{"role": ..., "content": ...}} with at least one.')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise UserError(f"{where}: message {number} should be an object with the texts role and content.")


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)
