"""Token ids of conversations in the format of a reward model or judge."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mindrlhf.data.chat import CHOICE, DEFAULT, NO_FORMAT, Renderer, RenderingError, family_chat, with_variables
from mindrlhf.data.messages import MessageReader
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.judging.questions import Messages


class Encoded(NamedTuple):
    """Conversation as token ids.

    head: the ids that it shares with its prompt alone, int32[P], P > 0; rest: the others, int32[R].
    """

    head: np.ndarray
    rest: np.ndarray

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.head) + len(self.rest)

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Value that equal conversations share."""
        return self.head.tobytes(), self.rest.tobytes()


class Encoder:
    """Encoder of conversations by a model's own chat template, or its family's markup.

    chat_template: in place of the tokenizer's own. pad_token_id: trailing pads are left out: a classifier reads the
    last other token. replies: whether the model's turn follows. Raises UserError for a tokenizer without a format.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        where: str,
        chat_template: str | None = None,
        pad_token_id: int | None = None,
        replies: bool = False,
    ):
        chosen, variables = with_variables(tokenizer, {CHOICE: chat_template} if chat_template else None)
        own = chosen.chat_template
        chat = None if own else family_chat(chosen)
        if own is None and chat is None:
            raise UserError(f"{where}: {NO_FORMAT}; give one as chat_template.")
        self._tokenizer = chosen
        self._reader = MessageReader(chosen)
        self._renderer = Renderer(own or (chat or DEFAULT.chat).chat_template, variables, trusted=own is None)
        self._pad = pad_token_id
        self._replies = replies
        self.close = self._renderer.close

    def __call__(self, conversations: Sequence[tuple[Messages, Messages] | str]) -> list[Encoded | str]:
        """Encode each (prompt, whole conversation); the reason of a failure stays a text."""
        prompts = self._render([each if isinstance(each, str) else each[0] for each in conversations], True)
        wholes = self._render([each if isinstance(each, str) else each[1] for each in conversations], self._replies)
        failed = [next((one[0] for one in pair if one[0]), "") for pair in zip(prompts, wholes, strict=True)]
        ids = [self._tokenizer.encode_batch([text for _, text in texts]) for texts in (prompts, wholes)]
        return [reason or self._cut(*pair) for reason, *pair in zip(failed, *ids, strict=True)]

    def _cut(self, prompt: Sequence[int], whole: Sequence[int]) -> Encoded | str:
        """Cut a conversation behind the tokens that it shares with its prompt."""
        end = len(whole)
        while self._pad is not None and end > 0 and whole[end - 1] == self._pad:
            end -= 1
        if not end:
            return "its text in the model's format has no token"
        same = next((i for i, (a, b) in enumerate(zip(prompt, whole[:end], strict=False)) if a != b), None)
        head = max(1, min(len(prompt), end) if same is None else same)
        ids = np.array(whole[:end], np.int32)
        return Encoded(ids[:head], ids[head:])

    def _render(self, conversations: Sequence[Messages | str], replies: bool) -> list[tuple[str, str]]:
        """Render each conversation as (reason of a failure or "", text)."""
        try:
            readable = [self._readable(each) for each in conversations]
            texts = self._renderer([_request(each, replies) for each in readable if not isinstance(each, str)])
        except RenderingError as error:
            if len(conversations) == 1:
                return [(str(error), "")]
            return [self._render([each], replies)[0] for each in conversations]
        rendered = iter(texts)
        return [(each, "") if isinstance(each, str) else ("", next(rendered)) for each in readable]

    def _readable(self, messages: Messages | str) -> Messages | str:
        """Read messages for the template; the reason if they are malformed."""
        try:
            return messages if isinstance(messages, str) else self._reader(messages)
        except ValueError as error:
            return str(error)


def _request(messages: Messages, replies: bool) -> dict[str, Any]:
    return {"messages": messages, "add_generation_prompt": replies}
