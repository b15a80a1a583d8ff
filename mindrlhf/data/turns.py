"""Turns of conversations as token ids, found by rendering and slicing.

A conversation is one sequence of ids that only grows: the prompt, the drawn ids of the model's turns, and between turns
the ids of the chat template's text. Drawn ids are never decoded and encoded again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.data.chat import NO_FORMAT, Renderer, RenderingError, family_chat, with_variables
from mindrlhf.data.messages import MessageReader
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import Hermes, ToolCall, ToolFormat, with_calls_as_text
from mindrlhf.errors import UserError

Message = Mapping[str, Any]
ASSISTANT = "assistant"
ASKED = {"role": "user", "content": "asked"}
ANSWERED = {"role": ASSISTANT, "content": "ANSWERED"}
REASON = "considered"
REASONED = {"role": ASSISTANT, "content": f"<think>\n{REASON}\n</think>\n\nSo it is."}
THOUGHT = "<think>"  # at the end of a prompt whose template begins the model's reasoning
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
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

    end_id: the token that ends an assistant turn. plain_text: the tokenizer's method. reader: of messages, which keeps
    control tokens in them as text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        schemas: Sequence[Mapping[str, Any]] | None = None,
        tool_format: ToolFormat | None = None,
        variables: Mapping[str, Any] | None = None,
        for_tools: bool = False,
    ):
        """Open a template and check that its text only grows with the conversation.

        template: jinja2 in HF's dialect; None is the tokenizer's own, or the markup of its model family, which lists no
        tools. schemas: JSON schemas of the tools, as OpenAI's functions. tool_format: form of calls in messages and of
        answers; None is Hermes. variables: additional ones of the template, such as `enable_thinking`. for_tools: take
        the tokenizer's template for conversations with tools, if it has one. UserError for a template that would
        rewrite earlier turns.
        """
        tokenizer, named = with_variables(tokenizer, variables)
        self._tokenizer = tokenizer
        self._schemas = schemas
        self.plain_text = tokenizer.plain_text
        self.reader = MessageReader(tokenizer)
        self.tool_format = tool_format or Hermes()
        template = template or tokenizer.chat_template_for(for_tools or bool(schemas))
        chat = family_chat(tokenizer)
        if template is None and chat is None:
            raise UserError(f"{NO_FORMAT}, and conversations need a format; give a tokenizer with a chat template.")
        source = template or chat.chat_template
        if all(condition in source for condition in STRIPPING):
            for condition in STRIPPING:
                source = source.replace(condition, "true")
        self._renderer = Renderer(source, named, trusted=template is None)
        self._check_growth()
        (self._opening,) = self._render([ASKED])
        self._thought = THOUGHT if self._opening.rstrip().endswith(THOUGHT) else ""
        (dummy,) = self._render([ASKED, ANSWERED], prompt=False)
        at = dummy.rindex(ANSWERED["content"]) + len(ANSWERED["content"])
        self._dummy = dummy[:at]
        self._after = dummy[at:]
        ids = tokenizer.encode(self._after)
        self._end = (tokenizer.id_to_token(ids[0]) if ids else None) or ""
        if not self._end or not self._after.startswith(self._end):
            raise UserError("the chat template ends an answer without an end token; give one with it.")
        self.end_id = ids[0]

    def calls(self, text: str) -> list[ToolCall]:
        """Find the calls of a drawn turn, with a thought that the prompt begins."""
        return self.tool_format.parse(self._thought + text)

    def prompt(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] | None = None) -> np.ndarray:
        """Encode messages up to the start of the model's answer, as int32[P].

        schemas: JSON schemas of the tools, instead of the template's. UserError for malformed messages.
        """
        return self._encode(*self._render(self._written(messages, self.reader), schemas=schemas))

    def answers(self, messages: Sequence[Message], turn: Sequence[int] | None = None) -> np.ndarray:
        """Encode tool and user messages after a drawn turn, as int32[n].

        The ids end where the model's next turn begins. Control tokens in the messages count as such; `plain_text` and
        `reader` break them up. turn: the drawn ids; the template's end of a turn is added if
        they lack it, unless the tool format answers within the turn. None: they have it.
        """
        return self.answers_to([(messages, turn)])[0]

    def answers_to(self, turns: Sequence[tuple[Sequence[Message], Sequence[int] | None]]) -> list[np.ndarray]:
        """Encode the answers to several turns with one rendering.

        turns: (messages, turn) of each, as `answers` takes them.
        """
        texts = {}
        rendered = {}
        for number, (messages, turn) in enumerate(turns):
            ended = turn is None or (len(turn) > 0 and turn[-1] == self.end_id)
            if self.tool_format.inline and not ended and all(message["role"] == "tool" for message in messages):
                texts[number] = "".join(self.tool_format.answer(message["content"]) for message in messages)
            else:
                start = self._dummy + (self._end if ended else "")
                said = self._written(messages, MessageReader()) if messages else ()
                rendered[number] = start, [ASKED, ANSWERED, *said]
        whole = self._render(*(conversation for _, conversation in rendered.values())) if rendered else ()
        for (number, (start, _)), text in zip(rendered.items(), whole, strict=True):
            texts[number] = _behind(start, text)
        return [self._encode(texts[number]) for number in range(len(turns))]

    def extended(self, prompt: np.ndarray, texts: Sequence[str]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Append texts to the user message that ends a prompt, int32[P].

        Returns the prompt to the end of that message, and for each text the ids that follow, up to the start of the
        model's answer. A prompt that ends otherwise stays unchanged, and the texts follow as messages.
        """
        ending, *more = self.endings(("", *texts))
        for at in range(len(prompt) - len(ending), 0, -1):
            if np.array_equal(prompt[at : at + len(ending)], ending):
                return prompt[:at], [np.concatenate((ids, prompt[at + len(ending) :])) for ids in more]
        nothing = np.zeros(0, np.int32)
        return prompt, [self.user_message(text) if text else nothing for text in texts]

    def endings(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts as ends of user messages, with the start of answers."""
        rendered = self._render(*([ASKED | {"content": ASKED["content"] + text}] for text in texts))
        asked = self._opening[: self._opening.rindex(ASKED["content"]) + len(ASKED["content"])]
        return [self._encode(_behind(asked, text)) for text in rendered]

    def user_message(self, text: str) -> np.ndarray:
        """Encode a user message behind an unended turn, with an answer's start."""
        return self.answers([{"role": "user", "content": text}], ())

    def conversation(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] | None = None) -> Turns:
        """Encode a whole conversation as if it had been drawn.

        schemas: JSON schemas of tools that the template lists. An assistant's message with the weight 0 is context, as
        in OpenAI's files. UserError for malformed messages, and if none is the assistant's.
        """
        written = self._written(messages, self.reader)
        try:
            drawn_by = [_weight(message) for message in written]
        except ValueError as error:
            raise UserError(f"{error}.") from None
        turns = [number for number, message in enumerate(written) if message["role"] == ASSISTANT]
        if not turns or turns[0] == 0:
            raise UserError("messages should have a user message and behind it one of the assistant.")
        prompt = self._encode(*self._render(written[: turns[0]], schemas=schemas))
        parts: list[tuple[np.ndarray, bool]] = []
        for number, following in zip(turns, [*turns[1:], None], strict=True):
            parts += [(ids, drawn and bool(drawn_by[number])) for ids, drawn in self._turn(written[number])]
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

    def _written(self, messages: Sequence[Message], read: MessageReader) -> list[dict[str, Any]]:
        """Read messages, and write calls and answers as text in the tool format.

        The template may write calls in another form than the one that is parsed.
        """
        written: list[dict[str, Any]] = []
        before = ""  # role of the message before
        try:
            for message in read(messages):
                message = with_calls_as_text(message, self.tool_format)
                role = message["role"]
                answer = self.tool_format.answer(message["content"]) if role == "tool" else None
                if answer is not None:
                    message |= {"role": "user", "content": answer}
                inline = self.tool_format.inline and written and written[-1]["role"] == ASSISTANT
                if inline and (answer is not None or (role, before) == (ASSISTANT, "tool")):
                    if role == ASSISTANT and _weight(message) != _weight(written[-1]):
                        raise ValueError("messages of the assistant that are one turn have different weights")
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
            earlier = text
            (text,) = self._render(messages[:count], prompt=following == ASSISTANT)
            if not text.startswith(earlier):
                lost = text.count(REASON) < earlier.count(REASON)
                anew = "drops earlier reasoning" if lost else "writes earlier turns anew"
                raise UserError(
                    f"the chat template {anew} once a message with the role {message['role']} follows, and a "
                    "conversation is trained as it was drawn; give a template that does not."
                )


class MarkedTemplate:
    """Chat template whose `{% generation %}` blocks are what the model writes.

    It renders a demonstration as a whole, calls of tools included, as TRL does for its assistant_only_loss; earlier
    turns may be written anew. reader: of messages, which keeps control tokens in them as text.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None, for_tools: bool = False):
        """Open the tokenizer's own template.

        variables: additional ones of it. for_tools: take the one for conversations with tools, if there is one.
        """
        self._tokenizer, named = with_variables(tokenizer, variables)
        self._renderer = Renderer(self._tokenizer.chat_template_for(for_tools), named)
        self.reader = MessageReader(self._tokenizer)

    def conversation(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] | None = None) -> Turns:
        """Encode a whole conversation; UserError for malformed messages, and if none is the assistant's."""
        try:
            read = self.reader(messages)
            weights = [_weight(message) for message in read if message["role"] == ASSISTANT]
            pieces = self._renderer.pieces({"messages": read, "add_generation_prompt": False, "tools": schemas})
        except ValueError as error:
            raise UserError(f"{error}.") from None
        *parts, _ = pieces  # context and turns by turns, without the text behind the last turn
        turns = len(parts) // 2
        if not (weights and turns and parts[0][0]):
            raise UserError("messages should have a user message and behind it one of the assistant.")
        if len(weights) != turns:
            if 0 in weights:
                raise UserError("the chat template marks several messages as one turn, so none can have the weight 0.")
            weights = [1] * turns
        ids = [np.array(self._tokenizer.encode(text), np.int32) for text, _ in parts]
        trained = [number % 2 == 1 and weights[number // 2] == 1 for number in range(len(parts))]
        sampled = [np.full(len(part), drawn) for part, drawn in zip(ids, trained, strict=True)]
        return Turns(ids[0], np.concatenate(ids[1:]), np.concatenate(sampled[1:]))


class DemonstrationTemplates:
    """Templates of a tokenizer that write demonstrations, opened when a row needs one.

    Arguments as `TurnTemplate` takes them. One with `{% generation %}` blocks is a `MarkedTemplate`.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat, variables: Mapping[str, Any] | None):
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._variables = variables
        self._opened: dict[str | None, TurnTemplate | MarkedTemplate] = {}

    def opened(self, for_tools: bool) -> TurnTemplate | MarkedTemplate:
        """Open the template of conversations, with tools or without."""
        source = with_variables(self._tokenizer, self._variables)[0].chat_template_for(for_tools)
        if source not in self._opened:
            options = {"variables": self._variables, "for_tools": for_tools}
            self._opened[source] = (
                MarkedTemplate(self._tokenizer, **options)
                if source is not None and GENERATION.search(source)
                else TurnTemplate(self._tokenizer, tool_format=self._tool_format, **options)
            )
        return self._opened[source]

    @property
    def kept(self) -> int:
        """Number of conversations that spell control tokens."""
        return sum(template.reader.kept for template in self._opened.values())


def _behind(start: str, text: str) -> str:
    """Cut off the beginning of a rendered text."""
    if not text.startswith(start):
        raise UserError("the chat template writes a message anew once more follows it; give one that does not.")
    return text[len(start) :]


def _weight(message: Message) -> int:
    """Read a message's weight in training, 0 or 1 (OpenAI's); ValueError for another one.

    Truth values under `loss` (ms-swift) and `train` (Axolotl) say the same.
    """
    named = (message[key] for key in ("loss", "train") if isinstance(message.get(key), bool))
    weight = message.get("weight", next(named, 1))
    if weight not in (0, 1):
        raise ValueError(f"the weight of a message should be 0 or 1, and is {weight!r:.40}")
    return int(weight)
