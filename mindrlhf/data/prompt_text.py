"""Prompt texts of problems: questions by prompt template, conversations by chat template."""

from collections.abc import Sequence

from mindrlhf.data.chat import write_conversations
from mindrlhf.data.tasks.conversation import Messages, system_prompt, with_system_prompt
from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import load_template
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.models.families import CHATS


def prompt_texts(
    rows: Sequence[TaskRow],
    places: Sequence[str],
    instruction: str,
    template: str,
    system: str | None,
    tokenizer: Tokenizer,
) -> list[str]:
    """Render the prompt of each row.

    places: where each row stands, for messages. instruction: the task's, below a question; a conversation has its own.
    template: its name or file. system: replaces the rows' system prompts; "" is none, None keeps them.
    Raises UserError for a conversation of several turns with a template of one question, and as the templates do.
    """
    rendering = load_template(template, tokenizer.chat_template)
    texts, conversations = [], []
    for row, where in zip(rows, places, strict=True):
        if row.messages is None:
            texts.append(rendering.render(row.question, instruction, system))
        elif template in CHATS:  # the tokenizer's own chat template writes conversations
            own = system if system is not None else system_prompt(row.messages)
            if own is None and tokenizer.chat_template is None:
                own = rendering.default_system
            messages = row.messages if own is None else with_system_prompt(row.messages, own)
            texts.append(None)
            conversations.append((messages, where))
        else:
            own = _one_question(row.messages, where, template)
            texts.append(rendering.render(row.question, "", own if system is None else system))
    written = iter(write_conversations(conversations, tokenizer))
    return [next(written) if text is None else text for text in texts]


def _one_question(messages: Messages, where: str, template: str) -> str | None:
    """System prompt of a conversation with one question only."""
    system = system_prompt(messages)
    if len(messages) > (1 if system is None else 2):
        raise UserError(
            f"{where}: has {len(messages)} messages, and --template {template} writes one question; leave --template "
            "out, and the tokenizer's chat template writes them."
        )
    return system
