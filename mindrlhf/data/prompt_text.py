"""Prompt texts of problems: questions by prompt template, conversations by chat template."""

from collections.abc import Sequence

from mindrlhf.data.chat import family_chat, write_conversations
from mindrlhf.data.tasks.conversation import Messages, system_prompt, with_system_prompt
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
    texts, conversations = [], []
    for row, where in zip(rows, places, strict=True):
        messages = _as_message(row.question, instruction) if template == OWN and row.messages is None else row.messages
        if messages is None:
            texts.append(rendering.render(row.question, instruction, system))
        elif template in (*CHATS, OWN):  # the tokenizer's own chat template writes conversations
            own = system if system is not None else system_prompt(messages)
            if own is None and tokenizer.chat_template is None:
                own = rendering.default_system
            texts.append(None)
            conversations.append((messages if own is None else with_system_prompt(messages, own), where))
        else:
            own = _one_question(messages, where, template)
            texts.append(rendering.render(row.question, "", own if system is None else system))
    written = iter(write_conversations(conversations, tokenizer))
    return [next(written) if text is None else text for text in texts]


def _as_message(question: str, instruction: str) -> Messages:
    """Make a conversation of one question."""
    return [{"role": "user", "content": f"{question}\n{instruction}" if instruction else question}]


def _one_question(messages: Messages, where: str, template: str) -> str | None:
    """System prompt of a conversation with one question only."""
    system = system_prompt(messages)
    if len(messages) > (1 if system is None else 2):
        raise UserError(
            f"{where}: has {len(messages)} messages, and --template {template} writes one question; leave --template "
            "out, and the tokenizer's chat template writes them."
        )
    return system
