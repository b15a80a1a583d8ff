"""Conversations as prompt text, by a chat template or a family's markup."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.data import chat_process
from mindrlhf.data.tasks.conversation import check_messages
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tokenizer_config import TOKEN_KEYS, token_text
from mindrlhf.errors import UserError
from mindrlhf.models.families import CHATS, DEFAULT, Chat

CPU_SECONDS = 20  # of a process that renders
PER_PROCESS = 1000  # conversations

Conversation = tuple[Any, str]
"""Messages [{"role": ..., "content": ...}, ...], and where they are from, for messages of error."""


def render_conversations(
    conversations: Sequence[Conversation], chat_template: str | None, chat: Chat = DEFAULT.chat, **tokens: str
) -> list[str]:
    """Render each conversation up to where the model answers its last message.

    chat_template: jinja2 in HF's dialect, run in a process with limits on time and memory; None is the markup of
    `chat`. tokens: further variables of a template, such as `eos_token`. UserError for malformed messages, and when the
    template fails or does not end.
    """
    for messages, where in conversations:
        try:
            check_messages(messages)
        except ValueError as error:
            raise UserError(f"{where}: {error}.") from None
    if chat_template is None:
        return [chat.conversation((turn["role"], turn["content"]) for turn in each) for each, _ in conversations]
    parts = (conversations[start : start + PER_PROCESS] for start in range(0, len(conversations), PER_PROCESS))
    return [text for part in parts for text in _rendered(part, chat_template, tokens)]


def write_prompts(prompts: Sequence[Conversation], tokenizer: Tokenizer) -> list[str]:
    """Render conversations as a tokenizer's model knows them; a text stays as it is.

    UserError, too, for a tokenizer that has neither a chat template nor a family's chat tokens.
    """
    conversations = [each for each in prompts if not isinstance(each[0], str)]
    chat = family_chat(tokenizer)
    if conversations and tokenizer.chat_template is None and chat is None:
        raise UserError(
            f"{conversations[0][1]}: the tokenizer has no chat template and no {DEFAULT.chat.before} to write messages "
            "with; give the prompt as text."
        )
    tokens = {key: token for key in TOKEN_KEYS if (token := token_text(tokenizer.config.get(key))) is not None}
    tokens["eos_token"] = tokenizer.id_to_token(tokenizer.eos_token_id)
    written = iter(render_conversations(conversations, tokenizer.chat_template, chat or DEFAULT.chat, **tokens))
    return [prompt if isinstance(prompt, str) else next(written) for prompt, _ in prompts]


def family_chat(tokenizer: Tokenizer) -> Chat | None:
    """Find the family whose markup a tokenizer's chat template, or else its vocabulary, has."""
    own = tokenizer.chat_template
    for chat in CHATS.values():
        if tokenizer.token_to_id(chat.before) is not None if own is None else chat.before in own:
            return chat
    return None


def _rendered(conversations: Sequence[Conversation], template: str, tokens: Mapping[str, str]) -> list[str]:
    messages = [messages for messages, _ in conversations]
    request = {"template": template, "tokens": tokens, "conversations": messages, "cpu_seconds": CPU_SECONDS}
    command = [sys.executable, "-P", chat_process.__file__]  # -P: modules of its folder are none of the library's
    ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if ended.returncode:
        raise UserError(
            f"{conversations[0][1]}: the tokenizer's chat template is not done within {CPU_SECONDS} s and "
            f"{chat_process.MEMORY_BYTES >> 30} GiB; use the template that was published with the model."
        )
    answer = json.loads(ended.stdout)
    if "error" in answer:
        where = conversations[min(answer["conversation"], len(conversations) - 1)][1]
        raise UserError(f"{where}: the tokenizer's chat template fails ({answer['error']}).")
    return answer["texts"]
