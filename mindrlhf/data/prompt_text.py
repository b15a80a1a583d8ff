"""Prompt texts of problems: questions by prompt template, conversations by chat template."""

from collections.abc import Sequence

from mindrlhf.data.chat import family_chat, write_prompts
from mindrlhf.data.tasks.conversation import system_prompt, with_system_prompt
from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import OWN, load_template
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.models.families import CHATS, DEFAULT


def prompt_texts(
    rows: Sequence[TaskRow],
    places: Sequence[str],
    instruction: str,
    template: str | None,
    system: str | None,
    tokenizer: Tokenizer,
) -> list[str]:
    """Render the prompt of each row.

    places: where each row stands, for messages. instruction: the task's, below a question; a conversation has its own.
    template: its name or file; None is the chat of the tokenizer's model family, or the tokenizer's own chat template.
    system: replaces the rows' system prompts; "" is none, None keeps them.
    Raises UserError for a conversation of several turns with a template of one question, and as the templates do.
    """
    chat = family_chat(tokenizer)
    markup = chat or DEFAULT.chat
    if template is None:
        template = OWN if chat is None and tokenizer.chat_template else markup.name
    rendering = load_template(markup.name if template == OWN else template, tokenizer.chat_template, markup)
    prompts = []
    for row, where in zip(rows, places, strict=True):
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
    return write_prompts(prompts, tokenizer)
