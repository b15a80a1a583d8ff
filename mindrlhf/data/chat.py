"""Conversations as prompt text, by a chat template or a family's markup."""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from mindrlhf.data import chat_process
from mindrlhf.data.tasks.conversation import check_messages
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tokenizer_config import TOKEN_KEYS, token_text
from mindrlhf.errors import UserError
from mindrlhf.models.families import CHATS, DEFAULT, Chat

CPU_SECONDS = 20  # CPU time of the rendering process for one request
PER_REQUEST = 1000  # conversations
# Runs a file with neither its folder nor the current one to import from: modules there could hide libraries.
PROGRAM = "import sys; del sys.path[0]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"

Conversation = tuple[Any, str]
"""Messages [{"role": ..., "content": ...}, ...], and their place, for error messages."""


def render_conversations(
    conversations: Sequence[Conversation], chat_template: str | None, chat: Chat = DEFAULT.chat, **tokens: Any
) -> list[str]:
    """Render each conversation up to the start of the model's answer.

    chat_template: jinja2 in HF's dialect, run in a process with limits on time and memory; None is the markup of
    `chat`. tokens: additional variables of a template, such as `eos_token`. UserError for malformed messages, and for a
    template that fails or does not end.
    """
    for messages, where in conversations:
        try:
            check_messages(messages)
        except ValueError as error:
            raise UserError(f"{where}: {error}.") from None
    if chat_template is None or not conversations:
        return [chat.conversation((turn["role"], turn["content"]) for turn in each) for each, _ in conversations]
    with closing(Renderer(chat_template, tokens)) as render:
        texts = []
        for start in range(0, len(conversations), PER_REQUEST):
            part = conversations[start : start + PER_REQUEST]
            try:
                texts += render([{"messages": messages, "add_generation_prompt": True} for messages, _ in part])
            except RenderingError as error:
                raise UserError(f"{part[error.conversation][1]}: {error}.") from None
    return texts


def write_prompts(
    prompts: Sequence[Conversation],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[str]:
    """Render conversations in the format of a tokenizer's model; texts stay unchanged.

    tools: JSON schemas of tools; variables: additional variables; both for the tokenizer's own chat template. UserError
    also for a tokenizer that has neither a chat template nor a family's chat tokens.
    """
    conversations = [each for each in prompts if not isinstance(each[0], str)]
    chat = family_chat(tokenizer)
    if conversations and tokenizer.chat_template is None and chat is None:
        raise UserError(
            f"{conversations[0][1]}: the tokenizer has no chat template and no {DEFAULT.chat.before} to write messages "
            "with; give the prompt as text."
        )
    tokens: dict[str, Any] = token_variables(tokenizer) | dict(variables or {})
    if tools:
        tokens["tools"] = list(tools)
    written = iter(render_conversations(conversations, tokenizer.chat_template, chat or DEFAULT.chat, **tokens))
    return [prompt if isinstance(prompt, str) else next(written) for prompt, _ in prompts]


def family_chat(tokenizer: Tokenizer) -> Chat | None:
    """Find the family whose markup is in a tokenizer's chat template or vocabulary."""
    own = tokenizer.chat_template
    for chat in CHATS.values():
        if tokenizer.token_to_id(chat.before) is not None if own is None else chat.before in own:
            return chat
    return None


def token_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """Collect the special tokens that a chat template is given."""
    tokens = {key: token for key in TOKEN_KEYS if (token := token_text(tokenizer.config.get(key))) is not None}
    return tokens | {"eos_token": tokenizer.id_to_token(tokenizer.eos_token_id)}


class RenderingError(ValueError):
    """Failure of a chat template at the `conversation` with this index."""

    def __init__(self, reason: str, conversation: int):
        super().__init__(f"the tokenizer's chat template {reason}")
        self.conversation = conversation


class Renderer:
    """Process that renders conversations by a chat template until it is closed.

    template: jinja2 in HF's dialect. variables: passed to each rendering, such as `eos_token`.
    """

    def __init__(self, template: str, variables: Mapping[str, Any]):
        command = [sys.executable, "-c", PROGRAM, chat_process.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.close = weakref.finalize(self, _end, self._process)
        self._head = json.dumps({"template": template, "variables": variables, "cpu_seconds": CPU_SECONDS}) + "\n"

    def __call__(self, conversations: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render conversations, each a mapping of template variables. Raises RenderingError."""
        request, self._head = f"{self._head}{json.dumps(conversations)}\n", ""
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            limits = f"{CPU_SECONDS} s and {chat_process.MEMORY_BYTES >> 30} GiB"
            raise RenderingError(f"is not done within {limits}; use the one that was published with the model", 0)
        answer = json.loads(line)
        if "error" in answer:
            index = min(answer["conversation"], len(conversations) - 1)
            raise RenderingError(f"fails ({answer['error']})", index)
        return answer["texts"]


def _end(process: subprocess.Popen) -> None:
    """End a process that may have ended by itself."""
    process.kill()
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()
