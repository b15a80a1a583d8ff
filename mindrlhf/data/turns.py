"""Turns of conversations as token ids, found by rendering and slicing.

A conversation is one sequence of ids that only grows: the prompt, the drawn ids of the model's turns, and between turns
the ids of the chat template's text. Drawn ids are never decoded and encoded again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.data.chat import Renderer, RenderingError, family_chat, token_variables
from mindrlhf.data.tasks.conversation import check_messages
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import Hermes, ToolFormat, read_call
from mindrlhf.errors import UserError
from mindrlhf.models.families import Chat

Message = Mapping[str, Any]
ASSISTANT = "assistant"
ASKED, ANSWERED = {"role": "user", "content": "asked"}, {"role": ASSISTANT, "content": "ANSWERED"}
REASON = "considered"
REASONED = {"role": ASSISTANT, "content": f"<think>\n{REASON}\n</think>\n\nSo it is."}
# Conditions in Qwen3's chat template, on a turn's place, that strip the reasoning of earlier turns.
STRIPPING = ("loop.index0 > ns.last_query_index", "loop.last or (not loop.last and reasoning_content)")


@dataclass(frozen=True, eq=False)
class Turns:
    """Conversation to imitate.

    prompt_ids: int32[P], all before the first assistant turn. response_ids: int32[R], the rest, to the end of the last
    assistant turn. sampled: bool[R], the tokens that the assistant writes.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    sampled: np.ndarray

    def cut(self, length: int) -> "Turns":
        """Cut the response so that prompt and response have at most `length` tokens."""
        room = max(0, length - len(self.prompt_ids))
        return Turns(self.prompt_ids, self.response_ids[:room], self.sampled[:room])


class TurnTemplate:
    """Chat template that gives ids of prompts and of answers between turns.

    end_id: the token that ends an assistant turn. plain_text: the tokenizer's method.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        schemas: Sequence[Mapping[str, Any]] | None = None,
        tool_format: ToolFormat | None = None,
    ):
        """Open a template and check that its text only grows with the conversation.

        template: jinja2 in HF's dialect; None is the tokenizer's own, or the markup of its model family, which lists no
        tools. schemas: JSON schemas of the tools, as OpenAI's functions. tool_format: form of calls in messages and of
        answers; None is Hermes. UserError for a template that would rewrite earlier turns.
        """
        self._tokenizer, self._schemas = tokenizer, schemas
        self.plain_text = tokenizer.plain_text
        self.tool_format = tool_format or Hermes()
        template = template or tokenizer.chat_template or _of_family(family_chat(tokenizer))
        if all(condition in template for condition in STRIPPING):
            for condition in STRIPPING:
                template = template.replace(condition, "true")
        self._renderer = Renderer(template, token_variables(tokenizer))
        self._check_growth()
        (self._opening,) = self._render([ASKED])
        (dummy,) = self._render([ASKED, ANSWERED], prompt=False)
        at = dummy.rindex(ANSWERED["content"]) + len(ANSWERED["content"])
        self._dummy, self._after = dummy[:at], dummy[at:]
        ids = tokenizer.encode(self._after)
        self._end = (tokenizer.id_to_token(ids[0]) if ids else None) or ""
        if not self._end or not self._after.startswith(self._end):
            raise UserError("the chat template ends an answer without an end token; give one with it.")
        self.end_id = ids[0]

    def prompt(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] | None = None) -> np.ndarray:
        """Encode messages up to the start of the model's answer, as int32[P].

        schemas: JSON schemas of the tools, instead of the template's. UserError for malformed messages.
        """
        return self._encode(*self._render(self._written(messages), schemas=schemas))

    def answers(self, messages: Sequence[Message], turn: Sequence[int] | None = None) -> np.ndarray:
        """Encode tool and user messages after a drawn turn, as int32[n].

        The ids end where the model's next turn begins. turn: the drawn ids; the template's end of a turn is added if
        they lack it, unless the tool format answers within the turn. None: they have it.
        """
        return self.answers_to([(messages, turn)])[0]

    def answers_to(self, turns: Sequence[tuple[Sequence[Message], Sequence[int] | None]]) -> list[np.ndarray]:
        """Encode the answers to several turns with one rendering.

        turns: (messages, turn) of each, as `answers` takes them.
        """
        texts, rendered = {}, {}
        for number, (messages, turn) in enumerate(turns):
            ended = turn is None or (len(turn) > 0 and turn[-1] == self.end_id)
            if self.tool_format.inline and not ended and all(message["role"] == "tool" for message in messages):
                texts[number] = "".join(self.tool_format.answer(message["content"]) for message in messages)
            else:
                start = self._dummy + (self._end if ended else "")
                rendered[number] = start, [ASKED, ANSWERED, *(self._written(messages) if messages else ())]
        whole = self._render(*(conversation for _, conversation in rendered.values())) if rendered else ()
        for (number, (start, _)), text in zip(rendered.items(), whole, strict=True):
            texts[number] = _behind(start, text)
        return [self._encode(texts[number]) for number in range(len(turns))]

    def extended(self, prompt: np.ndarray, texts: Sequence[str]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Append texts to the user message that ends a prompt, int32[P].

        Returns the prompt to the end of that message, and for each text the ids that follow, up to the start of the
        model's answer. A prompt that ends otherwise stays unchanged, and the texts follow as messages.
        """
        rendered = self._render(*([ASKED | {"content": ASKED["content"] + text}] for text in ("", *texts)))
        asked = self._opening[: self._opening.rindex(ASKED["content"]) + len(ASKED["content"])]
        ending, *more = (self._encode(_behind(asked, text)) for text in rendered)
        for at in range(len(prompt) - len(ending), 0, -1):
            if np.array_equal(prompt[at : at + len(ending)], ending):
                return prompt[:at], [np.concatenate((ids, prompt[at + len(ending) :])) for ids in more]
        nothing = np.zeros(0, np.int32)
        return prompt, [self.answers([{"role": "user", "content": text}], ()) if text else nothing for text in texts]

    def conversation(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] | None = None) -> Turns:
        """Encode a whole conversation as if it had been drawn.

        schemas: as in `prompt`. UserError for malformed messages, and if none is the assistant's.
        """
        written = self._written(messages)
        turns = [number for number, message in enumerate(written) if message["role"] == ASSISTANT]
        if not turns or turns[0] == 0:
            raise UserError("messages should have a user message and behind it one of the assistant.")
        prompt = self._encode(*self._render(written[: turns[0]], schemas=schemas))
        parts: list[tuple[np.ndarray, bool]] = []
        for number, following in zip(turns, [*turns[1:], None], strict=True):
            parts += self._turn(written[number])
            if following:
                parts.append((self.answers(written[number + 1 : following]), False))
        sampled = np.concatenate([np.full(len(ids), drawn) for ids, drawn in parts])
        return Turns(prompt, np.concatenate([ids for ids, _ in parts]), sampled)

    def _turn(self, message: Message) -> list[tuple[np.ndarray, bool]]:
        """Encode an assistant turn with its end as (ids, whether they are drawn)."""
        (text,) = self._render([ASKED, message], prompt=False)
        if not (text.startswith(self._opening) and text.endswith(self._after)):
            raise UserError(
                "the chat template begins an answer otherwise than it ends a prompt, so the answer is lost."
            )
        pieces = self.tool_format.pieces(text[len(self._opening) : -len(self._after)])
        end = np.array([self.end_id], np.int32)
        return [*((self._encode(piece), drawn) for piece, drawn in pieces), (end, True)]

    def _written(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Write calls and answers as text in the tool format.

        The template may write calls in another form than the one that is parsed.
        """
        written: list[dict[str, Any]] = []
        before = ""  # role of the message before
        try:
            filled = list(map(_with_content, messages)) if isinstance(messages, list) else messages
            check_messages(filled)
            for message in filled:
                calls = [self.tool_format.render(read_call(call)) for call in message.pop("tool_calls", None) or ()]
                message["content"] = "\n".join(filter(None, [message["content"], *calls]))
                role = message["role"]
                answer = self.tool_format.answer(message["content"]) if role == "tool" else None
                if answer is not None:
                    message |= {"role": "user", "content": answer}
                inline = self.tool_format.inline and written and written[-1]["role"] == ASSISTANT
                if inline and (answer is not None or (role, before) == (ASSISTANT, "tool")):
                    written[-1]["content"] += message["content"]
                elif answer is not None and before == "tool":
                    written[-1]["content"] += f"\n{answer}"
                else:
                    written.append(message)
                before = role
        except ValueError as error:
            raise UserError(f"{error}.") from None
        return written

    def _render(
        self, *conversations: Sequence[Message], prompt: bool = True, schemas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[str]:
        """Render conversations; prompt: up to the start of the model's answer."""
        tools = schemas or self._schemas
        same = {"add_generation_prompt": prompt, "tools": list(tools) if tools else None}
        try:
            return self._renderer([{"messages": messages, **same} for messages in conversations])
        except RenderingError as error:
            raise UserError(f"{error}.") from None

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text), np.int32)

    def _check_growth(self) -> None:
        """Refuse a template whose text changes when a conversation grows."""
        tool = [] if self.tool_format.answer("") is not None else [{"role": "tool", "content": "42"}]
        messages = [ASKED, REASONED, *([*tool, REASONED] if tool else ()), ASKED, ANSWERED, ASKED, REASONED]
        text = ""
        for count, message in enumerate(messages, 1):
            following = [*messages, ASKED][count]["role"]
            earlier, (text,) = text, self._render(messages[:count], prompt=following == ASSISTANT)
            if not text.startswith(earlier):
                lost = text.count(REASON) < earlier.count(REASON)
                anew = "drops earlier reasoning" if lost else "writes earlier turns anew"
                raise UserError(
                    f"the chat template {anew} once a message with the role {message['role']} follows, and a "
                    "conversation is trained as it was drawn; give a template that does not."
                )


def _behind(start: str, text: str) -> str:
    """Cut off the beginning of a rendered text."""
    if not text.startswith(start):
        raise UserError("the chat template writes a message anew once more follows it; give one that does not.")
    return text[len(start) :]


def _with_content(message: Any) -> Any:
    """Copy a message; a message with only calls gets an empty content."""
    if not isinstance(message, Mapping):
        return message
    return {**message, "content": message.get("content") or ""} if message.get("tool_calls") else dict(message)


def _of_family(chat: Chat | None) -> str:
    """Write a family's markup as a chat template."""
    if chat is None:
        raise UserError("the tokenizer has no chat template; several turns need one.")
    turn, answer = chat.turn("{{ message.role }}", "{{ message.content }}"), chat.conversation(())
    return (
        f"{chat.opening}{{% for message in messages %}}{turn}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{answer.removeprefix(chat.opening)}{{% endif %}}"
    )
