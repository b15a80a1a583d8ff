"""Conversations of the policy with environments and tools: the partner of the generation engine."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from mindrlhf.data.tool_formats import ToolCall
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.environments.contents import Content, ContentWriter
from mindrlhf.environments.pool import EnvironmentPool, Key, Outcome
from mindrlhf.environments.processes import CallResult
from mindrlhf.environments.results import OFF
from mindrlhf.errors import UserError
from mindrlhf.rollout.partner import Begun, EnvironmentRewards, Opened, Opening, Reply
from mindrlhf.types import Prompt, Rollout, TokenValues

NO_IDS = np.zeros(0, np.int32)
ENVIRONMENT = "environment"  # field of a row that names its environment, if there are several
DIFFERS = (
    "a conversation was played again to go on with it, and its environment answered otherwise than before, so that it "
    "is unscored (conversation/lost); answers should depend on `seed`, the row and the turns alone"
)


@dataclass
class ConversationCounts:
    """Counts of the conversations of a `generate` call.

    turns: drawn turns that ended by themselves. calls: tool calls, unreadable ones included, or moves in an environment
    without tools. failures: failed calls. lost: environments that ended with their process, or failed to give their
    rewards. seconds: sum over calls, which may run at the same time. images: that they showed; None where none are
    taken. tokens: by role: `assistant` (in these turns), `tool` and `user`.
    """

    conversations: int = 0
    turns: int = 0
    calls: int = 0
    failures: int = 0
    lost: int = 0
    seconds: float = 0.0
    images: int | None = None
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("assistant", "tool", "user"), 0))


class Conversations:
    """Partner of the engine with the environments and tools of a pool.

    Every conversation has its own environment; rows with the same prompt begin alike if the environment draws from the
    `seed` that it gets. A conversation is over after a turn without a tool call, after `max_turns` turns, and when its
    environment ends it or is lost.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        template: TurnTemplate,
        decode: Callable[[Sequence[int]], str],
        seed: int,
        max_turns: int,
        writer: ContentWriter | None = None,
    ):
        """Join a pool and a template, whose tool format reads the calls.

        decode: ids -> text without control tokens. writer: of answers, also of those with pictures.
        """
        self._pool = pool
        self._writer = writer or ContentWriter(template)
        self._template = template
        self._decode = decode
        self._seed = seed
        self._max_turns = max_turns
        self._conversations: dict[Key, _Conversation] = {}  # in the order of rows
        self._ready: deque[Reply] = deque()
        self.stop_strings = template.tool_format.stop_strings
        self.shows = self._writer.sees
        self.statistics = ConversationCounts()
        self.tokens: list[TokenValues] = []
        self._said: set[str] = set()  # what happens and was printed

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        """Begin the environments; their first texts are appended to the prompts' last messages."""
        new = [
            Begun(prompt, Rollout.empty(prompt.id, sample, self._seed), step)
            for prompt in prompts
            for sample in range(num_generations)
        ]
        opened = self._open(new)
        replies = [self._reply(row, ids, [self._rows[row][1].opening]) for row, (_, ids) in enumerate(opened)]
        return [prompt for prompt, _ in opened[::num_generations]], replies

    def resume(self, begun: Sequence[Begun]) -> list[Opened]:
        """Go on with conversations; those with an environment are played again.

        An environment is made anew, gets the turns of the transcript, and has to answer as it did: one that does not is
        lost. Statistics count further turns alone.
        """
        opened = self._open(begun)
        turns = [one.turns if self._stateful(row) else [] for row, one in enumerate(begun)]
        counts = self.statistics
        self.statistics = ConversationCounts()
        for turn in range(max(map(len, turns), default=0)):
            due = [row for row, own in enumerate(turns) if turn < len(own)]
            for row in due:
                first, end = turns[row][turn]
                self.submit(row, begun[row].answer.response_ids[first:end].tolist(), end)
            replies = 0
            while replies < len(due):
                for reply in self.collect(wait=True):
                    replies += 1
                    if not _begins_with(reply.token_ids, begun[reply.row].reply_to(turn)):
                        self._lose(reply.row, counts)
        self.statistics = counts
        return opened

    def recall(self, begun: Sequence[Begun]) -> EnvironmentRewards:
        """Return the environments' rewards of conversations that have ended, as `rewards`.

        Statistics count environments that are lost now, and nothing else.
        """
        self.resume(begun)
        self.statistics = ConversationCounts(lost=self.statistics.lost)
        return self.rewards()

    def _open(self, begun: Sequence[Begun]) -> list[Opened]:
        """Begin environments.

        The first texts of those without a transcript are appended to the prompts.
        """
        self._end()
        self._ready.clear()
        for row, one in enumerate(begun):
            prompt = one.prompt
            name = self._environment(prompt)
            key = (self._seed, one.step, prompt.id, prompt.occurrence, one.answer.sample_index)
            stateful = name in self._pool.stateful
            answered = [] if stateful else [end - 1 for _, end in one.turns]
            self._conversations[key] = _Conversation(row, self._pool.raw[name], ends=answered, stateful=stateful)
            self._pool.reset(key, name, {"seed": str(prompt.id), **prompt.fields}, answered=len(answered))
        self._rows = list(self._conversations.items())
        self.statistics = ConversationCounts(conversations=len(begun), images=0 if self._writer.sees else None)
        texts = [self._first_text(outcome) for outcome in self._answered()]
        opened: list[Opened] = []
        for _, rows in groupby(range(len(begun)), lambda row: (id(begun[row].prompt), begun[row].begun)):
            own = list(rows)
            first = begun[own[0]]
            if first.begun:
                self._check_first_texts([(row, begun[row].opening, texts[row]) for row in own])
                opened += [(first.prompt, NO_IDS)] * len(own)
            else:
                prompt, contexts = self._opening(first.prompt, [texts[row] for row in own])
                opened += [(prompt, ids) for ids in contexts]
        self.statistics.tokens["user"] += sum(len(ids) for _, ids in opened)
        return opened

    def _stateful(self, row: int) -> bool:
        return self._rows[row][1].stateful

    def _check_first_texts(self, known: Sequence[tuple[int, np.ndarray, str]]) -> None:
        """Lose environments that begin otherwise than in their transcripts: row, context there, text now."""
        said = [one for one in known if one[2] or len(one[1])]
        endings = self._template.endings([text for *_, text in said]) if said else ()
        for (row, context, text), ending in zip(said, endings, strict=True):
            same = _begins_with(context, ending) or _begins_with(ending, context)
            if not (same or _begins_with(self._template.user_message(text), context)):
                self._lose(row, self.statistics)

    def _lose(self, row: int, counts: ConversationCounts) -> None:
        """Lose an environment that answers otherwise than it did; said once."""
        talk = self._rows[row][1]
        if not talk.differs:
            self._say(DIFFERS)
        counts.lost += not talk.differs
        talk.differs = talk.lost = True

    def _say(self, sentence: str) -> None:
        """Print a sentence once."""
        if sentence not in self._said:
            self._said.add(sentence)
            print(sentence, flush=True)

    def submit(self, row: int, turn: Sequence[int], length: int) -> None:
        """Take a turn: the move in an environment, or calls of tools."""
        key, talk = self._rows[row]
        talk.turn = turn
        talk.ends.append(length - 1)
        self.statistics.tokens["assistant"] += len(turn)
        self._count(turns=1)
        text = self._decode(turn)
        talk.calls = [] if talk.raw else self._template.calls(text)
        talk.made.append(1 if talk.raw else sum(not call.error for call in talk.calls))
        if talk.lost or not (talk.raw or talk.calls):
            self._ready.append(Reply(row, NO_IDS, over=True))
        elif talk.raw:
            self._pool.reply(key, text)
        else:
            self._pool.call(key, [(call.name, call.arguments) for call in talk.calls if not call.error])

    def collect(self, wait: bool) -> list[Reply]:
        """Return the replies that are ready; wait: block until there is one."""
        replies = list(self._ready)
        self._ready.clear()
        outcomes = self._pool.collect(wait and not replies)
        return replies + self._replies([self._answer(outcome) for outcome in outcomes])

    def rewards(self) -> EnvironmentRewards:
        """Get the environments' rewards, and end them.

        Sets `tokens` to the rewards of turns, which the rewards include. An environment that fails here counts as lost.
        """
        for key, talk in self._conversations.items():
            self._pool.reward(key, talk.made)
        rewards: list[float | None] = []
        self.tokens = []
        for outcome in self._answered():
            talk = self._conversations[outcome.key]
            answer = outcome.answers[0] if outcome.answers else CallResult()
            value, *turns = answer.value if isinstance(answer.value, list) else [answer.value]
            fails = talk.differs or answer.failure or (isinstance(answer.value, list) and len(turns) != len(talk.ends))
            self._count(lost=bool(fails) and not talk.lost)
            rewards.append(np.nan if fails else None if value is None else math.fsum([value, *turns]))
            at_ends = {} if fails else dict(zip(talk.ends, turns, strict=False))
            self.tokens.append({"turn_rewards": at_ends} if at_ends else {})
        self._end()
        return rewards

    def _end(self) -> None:
        for key in self._conversations:
            self._pool.end(key)
        self._conversations.clear()

    def _answered(self) -> list[Outcome]:
        """Wait until the requests of all conversations are answered; returns outcomes by row."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(self._conversations):
            outcomes += self._pool.collect(wait_for_one=True)
        return sorted(outcomes, key=lambda outcome: self._conversations[outcome.key].row)

    def _environment(self, prompt: Prompt) -> str:
        names = list(self._pool.raw)
        name = prompt.fields.get(ENVIRONMENT, "") if len(names) > 1 else names[0]
        if name not in names:
            raise UserError(f"row {prompt.id}: its {ENVIRONMENT} is {name!r}, and should be {', '.join(names)}.")
        return name

    def _first_text(self, outcome: Outcome) -> str:
        talk = self._conversations[outcome.key]
        talk.lost = any(answer.failure for answer in outcome.answers)
        self._note(outcome, talk, 0)
        talk.opening = "" if talk.lost else _content(outcome.answers) or ""
        return self._writer.text(talk.opening)

    def _opening(self, prompt: Prompt, texts: Sequence[str]) -> tuple[Prompt, Sequence[np.ndarray]]:
        """Append the first texts of a prompt's conversations to it."""
        if not any(texts):
            return prompt, [NO_IDS] * len(texts)
        ids, contexts = self._template.extended(prompt.token_ids, texts)
        return prompt.ended(len(ids)), contexts

    def _answer(self, outcome: Outcome) -> "_Messages":
        talk = self._conversations[outcome.key]
        talk.lost = outcome.lost
        self._note(outcome, talk, 1 if talk.raw else len(talk.calls))
        over = talk.lost or len(talk.ends) >= self._max_turns
        if talk.raw:
            text = _content(outcome.answers)
            over = over or text is None or outcome.answers[0].failure is not None
            return _Messages(talk.row, "user", [] if over else [text], talk.turn, over)
        self._count(failures=sum(bool(call.error) for call in talk.calls))
        answers = iter(outcome.answers)
        texts = [call.error or _said(next(answers)) for call in talk.calls]
        return _Messages(talk.row, "tool", [] if over else texts, talk.turn, over)

    def _replies(self, several: Sequence["_Messages"]) -> list[Reply]:
        """Encode all messages of tools and users with one rendering of the chat template."""
        speaking = [words for words in several if words.texts]
        turns = [(self._messages(words), words.turn) for words in speaking]
        ids = dict(zip((words.row for words in speaking), self._template.answers_to(turns), strict=True))
        for words in speaking:
            self.statistics.tokens[words.role] += len(ids[words.row])
        return [self._reply(words.row, ids.get(words.row, NO_IDS), words.texts, words.over) for words in several]

    def _reply(self, row: int, ids: np.ndarray, contents: Sequence[Content], over: bool = False) -> Reply:
        """Make a reply of the ids that the template gives for contents."""
        wide, pictures = self._writer.wide(ids, contents)
        if pictures:
            self._count(images=len(pictures))
        return Reply(row, wide, over, pictures)

    def _messages(self, words: "_Messages") -> list[dict[str, str]]:
        return [{"role": words.role, "content": self._writer.text(content)} for content in words.texts]

    def _note(self, outcome: Outcome, talk: "_Conversation", calls: int) -> None:
        failures = sum(answer.failure is not None for answer in outcome.answers)
        for answer in outcome.answers:
            if answer.failure and OFF.format("") in answer.failure:
                self._say(f"an image was refused: {answer.failure}")
        seconds = sum(answer.seconds for answer in outcome.answers)
        self._count(calls=calls, failures=failures, lost=talk.lost, seconds=seconds)

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            setattr(self.statistics, name, getattr(self.statistics, name) + value)


@dataclass(eq=False)
class _Conversation:
    """Conversation.

    ends, made: for each turn, the index of its last token in the response, and its number of readable calls. turn,
    calls: the last turn, and its calls. opening: what the environment said first. differs: it was played again, and its
    environment answered otherwise.
    """

    row: int
    raw: bool
    stateful: bool = False
    ends: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    turn: Sequence[int] = ()
    calls: Sequence[ToolCall] = ()
    opening: Content = ""
    lost: bool = False
    differs: bool = False


@dataclass(frozen=True, eq=False)
class _Messages:
    """Messages of one role to a conversation.

    texts: empty if nothing is said. turn: the drawn ids before them.
    """

    row: int
    role: str
    texts: Sequence[Content]
    turn: Sequence[int] = ()
    over: bool = False


def _begins_with(ids: np.ndarray, first: np.ndarray) -> bool:
    return np.array_equal(ids[: len(first)], first)


def _content(answers: Sequence[CallResult]) -> Content | None:
    return answers[0].value if answers else None


def _said(answer: CallResult) -> Content:
    return f"Error: {answer.failure}" if answer.failure else answer.value
