"""Conversations as prompts, by a chat template or a family's markup."""

import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from mindrlhf.data import chat_process
from mindrlhf.data.messages import MessageReader
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tokenizer_config import token_text
from mindrlhf.data.tool_formats import Hermes, with_calls_as_text
from mindrlhf.errors import UserError
from mindrlhf.models.families import CHATS, DEFAULT, Chat

CPU_SECONDS = 20  # CPU time of the rendering process for one request
PER_REQUEST = 1000  # conversations
# Runs a file with neither its folder nor the current one to import from: modules there could hide libraries.
PROGRAM = "import sys; del sys.path[0]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
CHOICE = "chat_template"  # variable that chooses a template, as the argument of HF's method does

Conversation = tuple[Any, str]
"""Messages [{"role": ..., "content": ...}, ...], and their place, for error messages."""

_log = logging.getLogger(__name__)


def render_conversations(
    conversations: Sequence[Conversation],
    chat_template: str | None,
    chat: Chat = DEFAULT.chat,
    reader: MessageReader | None = None,
    **variables: Any,
) -> list[str]:
    """Render each conversation up to the start of the model's answer.

    chat_template: jinja2 in HF's dialect, run in a process with limits on time and memory; None is the markup of
    `chat`, with calls of tools as Hermes writes them. reader: of the messages. variables: additional ones of a
    template, such as `eos_token`. UserError for malformed messages, and for a template that fails or does not end.
    """
    reader = reader or MessageReader()
    read = []
    for messages, where in conversations:
        try:
            turns = reader(messages)
            read.append(turns if chat_template else [with_calls_as_text(turn, Hermes()) for turn in turns])
        except ValueError as error:
            raise UserError(f"{where}: {error}.") from None
    if not read:
        return []
    with closing(Renderer(chat_template or chat.chat_template, variables, trusted=chat_template is None)) as render:
        texts = []
        for start in range(0, len(read), PER_REQUEST):
            part = read[start : start + PER_REQUEST]
            try:
                texts += render([{"messages": messages, "add_generation_prompt": True} for messages in part])
            except RenderingError as error:
                raise UserError(f"{conversations[start + error.conversation][1]}: {error}.") from None
    return texts


def write_prompts(
    prompts: Sequence[Conversation],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    reader: MessageReader | None = None,
    markup: Chat | None = None,
) -> list[list[int]]:
    """Write conversations in the format of a tokenizer's model, as ids.

    A text is taken as it is, and gets the begin token that the tokenizer puts in front of texts. tools: JSON schemas of
    tools; variables: additional variables; both for the tokenizer's own chat template. reader: a reader that has read
    other parts of the prompts. markup: of a family, in place of the tokenizer's own. UserError also for an empty
    prompt, and for a tokenizer that has neither a chat template nor a family's chat tokens.
    """
    reader = reader or MessageReader(tokenizer)
    tokenizer, variables = with_variables(tokenizer, variables)
    talks = [each for each in prompts if not isinstance(each[0], str)]
    texts = [text for text, _ in prompts if isinstance(text, str)]
    if talks:
        own = None if markup else tokenizer.chat_template_for(bool(tools))
        chat = markup or (None if own else family_chat(tokenizer))
        if own is None and chat is None:
            raise UserError(f"{talks[0][1]}: {NO_FORMAT}; give the prompt as text.")
        if tools:
            variables["tools"] = list(tools)
        written = render_conversations(talks, own, chat or DEFAULT.chat, reader, **variables)
        talks_ids = iter(tokenizer.encode_batch(written))
    texts_ids = iter(tokenizer.encode_prompts(texts))
    ids = [next(texts_ids) if isinstance(prompt, str) else next(talks_ids) for prompt, _ in prompts]
    report_kept(reader.kept, prompts[0][1] if prompts else "")
    for each, (_, where) in zip(ids, prompts, strict=True):
        if not each:
            raise UserError(f"{where}: the prompt is empty; give it a text, or mend the template.")
    return ids


NO_FORMAT = f"the tokenizer has no chat template and no {DEFAULT.chat.before} to write messages with"


def report_kept(count: int, where: str) -> None:
    """Warn of rows that spell control tokens; where: the first row's place."""
    if count:
        _log.warning(
            "%s and following: %d rows spell control tokens of the tokenizer, which stay text; give a rendered prompt "
            "as text, with the key prompt",
            where,
            count,
        )


def with_variables(tokenizer: Tokenizer, variables: Mapping[str, Any] | None) -> tuple[Tokenizer, dict[str, Any]]:
    """Join a tokenizer's special tokens and a setting's variables of the chat template.

    A variable `chat_template` chooses the template, by its name or as jinja2: it comes back as the tokenizer's own.
    """
    given = dict(variables or {})
    if isinstance(chosen := given.pop(CHOICE, None), str):
        tokenizer = tokenizer.with_chat_template(chosen)
    return tokenizer, token_variables(tokenizer) | given


def family_chat(tokenizer: Tokenizer) -> Chat | None:
    """Find the family whose markup is in a tokenizer's chat template or vocabulary."""
    own = tokenizer.chat_template
    for chat in CHATS.values():
        if tokenizer.token_to_id(chat.before) is not None if own is None else chat.before in own:
            return chat
    return None


def token_variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """Collect the special tokens that a chat template is given."""
    named = {key: token_text(value) for key, value in tokenizer.config.items() if key.endswith("_token")}
    tokens: dict[str, Any] = {key: token for key, token in named.items() if isinstance(token, str)}
    if isinstance(more := tokenizer.config.get("additional_special_tokens"), list):
        tokens["additional_special_tokens"] = list(map(token_text, more))
    return tokens | {"eos_token": tokenizer.id_to_token(tokenizer.eos_token_id)}


class RenderingError(ValueError):
    """Failure of a chat template at the `conversation` with this index."""

    def __init__(self, reason: str, conversation: int):
        super().__init__(f"the tokenizer's chat template {reason}")
        self.conversation = conversation


class Renderer:
    """Renderer of conversations by a chat template.

    It has a process of its own until it is closed. template: jinja2 in HF's dialect. variables: passed to each
    rendering, such as `eos_token`. trusted: whether the template may run in this process.
    """

    def __init__(self, template: str, variables: Mapping[str, Any], trusted: bool = False):
        self._settings = {"template": template, "variables": variables, "cpu_seconds": CPU_SECONDS}
        self._process = None if trusted else _started()
        self.close = weakref.finalize(self, _end, self._process)
        self._head = json.dumps(self._settings, default=str) + "\n"

    def __call__(self, conversations: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render conversations, each a mapping of template variables. Raises RenderingError."""
        return self._texts(conversations, marked=False)

    def pieces(self, conversation: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Render a conversation in (text, whether a `{% generation %}` block writes it)."""
        (pieces,) = self._texts([conversation], marked=True)
        return [(text, generated) for text, generated in pieces]

    def _texts(self, conversations: Sequence[Mapping[str, Any]], marked: bool) -> list[Any]:
        request = {"conversations": conversations, "marked": marked}
        answer = chat_process.answer(self._settings, request) if self._process is None else self._asked(request)
        if "error" in answer:
            index = min(answer["conversation"], len(conversations) - 1)
            raise RenderingError(f"fails ({answer['error']})", index)
        return answer["texts"]

    def _asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the process; returns its answer."""
        lines = f"{self._head}{json.dumps(request, default=str)}\n"
        self._head = ""
        try:
            self._process.stdin.write(lines)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            limits = f"{CPU_SECONDS} s and {chat_process.MEMORY_BYTES >> 30} GiB"
            raise RenderingError(f"is not done within {limits}; use the one that was published with the model", 0)
        return json.loads(line)


def _started() -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, chat_process.__file__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _end(process: subprocess.Popen | None) -> None:
    """End a process that may have ended by itself."""
    if process is None:
        return
    process.kill()
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()
