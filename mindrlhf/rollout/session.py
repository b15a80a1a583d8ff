"""Sessions: requests in slots of a static, refilled cache.

They are submitted and collected at any time. A prompt is prefilled once, and its cache copied to the slots of its
samples, or to one slot if one operator decodes for all of them. The first decode step feeds the prompt's last token, so
that prefill needs no logits. Random numbers depend only on counters: responses do not depend on the number of slots, on
other requests, or on the time of submission. A slot whose turn has ended keeps its cache and waits for the partner's
reply, whose tokens are decoded without a draw. Not supported: paged caches, prefix sharing between different prompts.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.metrics.timer import Timers
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.decode_graphs import FUSED_CONTEXT, FUSED_TOKENS, EngineGraphs
from mindrlhf.rollout.drafts import Histories
from mindrlhf.rollout.partner import Partner, context_ids
from mindrlhf.rollout.prompt_pool import PromptPool
from mindrlhf.rollout.request import Request, Work, check_length, check_stop_strings
from mindrlhf.rollout.sampling import rule_of
from mindrlhf.types import Rollout, RolloutGroup


class Session:
    """Requests being answered, in the slots of one engine.

    limit: most tokens of a response. decode_text: token ids -> text, for stop strings. parts: timers of prefill, decode
    and partner. tokens, most: tokens of responses so far, and the most that all requests can have.
    """

    def __init__(
        self,
        graphs: EngineGraphs,
        limit: int,
        bucket: int,
        histories: Histories,
        parts: Timers,
        decode_text: Callable[[Sequence[int]], str] | None,
    ):
        self._graphs, self._limit, self._histories = graphs, limit, histories
        self._parts, self._decode_text = parts, decode_text
        slots = graphs.slots
        self._requests = self._unplaced = self._ended_tokens = self.most = 0
        self._queue: deque[Work] = deque()
        self._finished: dict[int, RolloutGroup] = {}
        self._pool = PromptPool(graphs, bucket)
        # A slot holds one prompt and one response, which may belong to different prompts.
        self._held = np.zeros(slots, bool)  # slots with a prompt
        self._work: list[tuple[Work, int] | None] = [None] * slots  # the response: its request, and its index
        self._used, self._operator, self._waiting, self._says, self._listens = (np.zeros(slots, bool) for _ in range(5))
        self._token, self._position, self._prefix, self._leader = (np.zeros(slots, np.int32) for _ in range(4))
        self._length, self._most, self._least, self._first = (np.zeros(slots, np.int32) for _ in range(4))
        self._tokens, self._context = (np.full((slots, limit), fill, np.int32) for fill in (0, -1))
        self._numbers, self._behaviour, self._policy = (np.zeros((slots, limit), np.float32) for _ in range(3))
        self._rules = np.repeat(rule_of(SamplingSettings(), graphs.vocabulary)[:, None], slots, 1)
        self._reason = np.full(slots, "", object)
        # 1 at the tokens that a slot already contains, for repetition penalties.
        self._seen = self._nothing = np.zeros((1, 1), np.float32)
        self.counts = np.zeros(3, int)  # decode steps, draft tokens, accepted draft tokens

    @property
    def busy(self) -> bool:
        """True while requests are unanswered."""
        return bool(self._queue) or bool(self._used.any())

    @property
    def tokens(self) -> int:
        return self._ended_tokens + int(self._length.sum())

    def submit(self, request: Request) -> int:
        """Take a request; returns its number.

        Raises UserError for a prompt that is too long.
        """
        check_length(request.prompt, self._graphs.max_prompt)
        limit = request.sampling.max_new_tokens
        if limit > self._limit:
            raise ValueError(f"max_new_tokens {limit} of a request is above the session's {self._limit}")
        check_stop_strings(request.stop_strings, self._decode_text)
        for sample, ids in enumerate(request.openings):
            context_ids(ids, self._graphs.vocabulary, request.row + sample)
        operator = self._graphs.open(request.sampling)
        if self._graphs.penalises and self._seen is self._nothing:
            self._seen = np.zeros((self._graphs.slots, self._graphs.vocabulary), np.float32)
        self._requests += 1
        self._unplaced += request.samples
        self.most += request.samples * limit
        self._queue.append(Work(self._requests, request, operator))
        return self._requests

    def poll(self) -> list[tuple[int, RolloutGroup]]:
        """Collect the requests that were answered since the last call, by number."""
        done, self._finished = sorted(self._finished.items()), {}
        self._histories.remember(group for _, group in done)
        return done

    def step(self) -> None:
        """Fill free slots, take replies, and decode the next tokens."""
        self._refill()
        if self._waiting.any():
            self._receive()
        active = self._active()
        by_operator = self._operator[active]
        for operator in (True, False):
            slots = active[by_operator == operator]
            if len(slots):
                self._decode(slots, operator, len(active) - len(slots))

    def _active(self) -> np.ndarray:
        """List the slots that hold a response and wait for no reply."""
        return np.flatnonzero(self._used & ~self._waiting)

    def _receive(self) -> None:
        """Take the partners' replies; waits for one if no slot can go on."""
        partners: dict[int, tuple[Partner, dict[int, int]]] = {}
        for slot in np.flatnonzero(self._waiting):
            work, sample = self._work[slot]
            _, rows = partners.setdefault(id(work.request.partner), (work.request.partner, {}))
            rows[work.request.row + sample] = int(slot)
        wait, ended = not len(self._active()), []
        with self._parts("partner"):
            for partner, rows in partners.values():
                replies = partner.collect(wait)
                wait = wait and not replies
                for reply in replies:
                    if reply.row not in rows:
                        raise ValueError(f"a reply to row {reply.row}, which waits for none")
                    slot = rows.pop(reply.row)
                    if self._append(slot, reply.row, reply.token_ids, reply.over):
                        ended.append(slot)
        self._retire(ended)

    def _append(self, slot: int, row: int, token_ids: Sequence[int], over: bool) -> bool:
        """Append a reply to a response; returns True if this ends it."""
        ids, length, most = context_ids(token_ids, self._graphs.vocabulary, row), self._length[slot], self._most[slot]
        taken = ids[: most - length]
        end = length + len(taken)
        self._context[slot, length:end] = taken
        self._first[slot], self._waiting[slot] = end, False
        cut = len(taken) < len(ids) or (not over and end == most)
        if over or cut:
            self._tokens[slot, length:end] = taken
            self._length[slot] = end
        if cut:
            self._reason[slot] = "length"
        return over or cut

    def _refill(self) -> None:
        free = np.flatnonzero(~self._used).tolist()
        # A few free slots wait until there are more, so that an admission copies several at once.
        if len(free) < min(self._graphs.admit_size, self._unplaced) and len(self._active()):
            return
        while free and self._queue:
            with self._parts("prefill"):
                if self._queue[0] not in self._pool.prompts:
                    self._pool.fill(self._queue)
            chosen, copies = self._assign(free)
            if not chosen:
                return
            with self._parts("prefill"):
                self._pool.copy(copies)
            self._place(chosen)

    def _assign(self, free: list[int]) -> tuple[list[tuple[int, Work, int]], list[tuple[int, Work]]]:
        """Assign free slots to the next responses whose prompts are prefilled.

        Returns slots with their responses, and slots with the prompts to copy there. For the operator, there is always
        a slot without a prompt: every prompt, except the one being placed, has a response in a slot. Any other response
        needs a slot without a prompt.
        """
        chosen, copies = [], []
        while free and self._queue and self._queue[0] in self._pool.prompts:
            work = self._queue[0]
            place = 0 if work.operator else next((i for i, slot in enumerate(free) if not self._held[slot]), None)
            if place is None:
                break
            slot = free.pop(place)
            if work.home < 0:
                home = int(np.argmin(self._held)) if work.operator else slot
                self._held[home] = True
                copies.append((home, work))
                work.home = home if work.operator else -1
            self._leader[slot] = work.home if work.operator else slot
            chosen.append((slot, work, work.placed))
            work.placed += 1
            if work.placed == work.request.samples:
                self._queue.popleft()
        self._unplaced -= len(chosen)
        return chosen, copies

    def _place(self, chosen: list[tuple[int, Work, int]]) -> None:
        """Begin responses in slots."""
        slots = np.array([slot for slot, *_ in chosen])
        requests = [work.request for _, work, _ in chosen]
        # A prompt that a step draws again gets new samples, not the same samples again.
        counters = [
            (one.seed, one.step, one.prompt.id, one.prompt.occurrence * one.samples + sample)
            for one, (*_, sample) in zip(requests, chosen, strict=True)
        ]
        self._numbers[slots] = uniform(*np.array(counters, np.int64).T[..., None], np.arange(self._limit)[None])
        self._used[slots] = True
        self._operator[slots] = [work.operator for _, work, _ in chosen]
        self._says[slots] = [bool(one.stop_strings) for one in requests]
        self._listens[slots] = [one.listen is not None for one in requests]
        self._token[slots] = [one.prompt.token_ids[-1] for one in requests]
        self._position[slots] = self._prefix[slots] = [len(one.prompt.token_ids) - 1 for one in requests]
        self._most[slots] = [one.sampling.max_new_tokens for one in requests]
        self._least[slots] = [one.sampling.min_new_tokens for one in requests]
        self._rules[:, slots] = np.stack([rule_of(one.sampling, self._graphs.vocabulary) for one in requests], 1)
        self._length[slots] = self._first[slots] = 0
        self._context[slots] = -1
        self._behaviour[slots] = self._policy[slots] = 0.0
        for slot, work, sample in chosen:
            self._work[slot], work.slots[sample] = (work, sample), slot
            if work.request.openings:
                opening = work.request.openings[sample][: self._most[slot] - 1]  # one token at least is drawn
                self._context[slot, : len(opening)] = opening
                self._first[slot] = len(opening)
            if self._seen is not self._nothing:
                self._seen[slot] = 0.0
                self._seen[slot, work.request.prompt.token_ids] = 1.0

    def _decode(self, slots: np.ndarray, operator: bool, others: int) -> None:
        """Decode the next tokens of these slots.

        others: number of slots that another graph decodes.
        """
        counts, count = self._length[slots], self._graphs.slots
        ahead = np.arange(self._columns(slots) if operator else 1)
        numbers = np.zeros((count, len(ahead)), np.float32)
        context = np.full((count, len(ahead)), -1, np.int32)
        places = slots[:, None], np.minimum(counts[:, None] + ahead, self._most[slots, None] - 1)
        numbers[slots], context[slots] = self._numbers[places], self._context[places]
        remaining, banned, prefixes = (np.zeros(count, np.int32) for _ in range(3))
        remaining[slots] = self._most[slots] - counts
        banned[slots] = np.maximum(self._least[slots] - counts, 0)
        leaders = np.arange(count, dtype=np.int32)
        if operator:
            leaders[slots], prefixes[slots] = self._leader[slots], self._prefix[slots]
        rest = leaders, prefixes, self._enough(slots, others), context
        angles = self._position  # in text a token's angle is that of its place
        state = self._token, self._places(operator), angles, remaining, banned, *rest
        with self._parts("decode"):
            graph = self._graphs.decodes[operator]
            histories = self._texts(slots) if operator else self._histories.arrays()
            seen = self._seen if graph.sampler.penalises else self._nothing
            out = graph.on_arrays(*state, histories, numbers, self._rules, seen)
            tokens, behaviour, policy = (part.asnumpy()[slots] for part in out[:3])
            self.counts += out[3].asnumpy() if operator else (1, 0, 0)
        drawn, kept = (tokens >= 0) & (context[slots] < 0), (tokens >= 0).sum(1)
        row, column = np.nonzero(ahead < kept[:, None])
        at = (slots[row], counts[row] + column)
        self._tokens[at], self._behaviour[at], self._policy[at] = (
            part[row, column] for part in (tokens, behaviour, policy)
        )
        last = np.arange(len(slots)), kept - 1
        self._end_turns(slots, kept, tokens[last], drawn[last])

    def _columns(self, slots: np.ndarray) -> int:
        """Count the tokens that a call of the operator may add to a slot."""
        return FUSED_CONTEXT if any(self._work[slot][0].request.partner for slot in slots) else FUSED_TOKENS

    def _enough(self, slots: np.ndarray, others: int) -> np.ndarray:
        """Make `Decode`'s int32[3] of this name.

        Decoding of several tokens ends when only this many slots are active: enough others can be refilled.
        """
        pending = min(self._graphs.admit_size, self._unplaced)
        enough = self._graphs.slots - pending - int(self._waiting.sum()) - others if pending else 0
        steps = 1 if others or self._listens[slots].any() else FUSED_TOKENS
        return np.array([enough, self._graphs.max_prompt, steps], np.int32)

    def _places(self, operator: bool) -> np.ndarray:
        """Return each slot's next place in the cache, int32[B].

        The graph for one token writes to all slots. Those of the operator have their own tokens behind the longest
        prompt: the next one's place is written again before it is read.
        """
        if operator or not (self._used & self._operator).any():
            return self._position
        own = self._graphs.max_prompt + self._position - self._prefix
        return np.where(self._used & ~self._operator, self._position, own)

    def _texts(self, slots: np.ndarray) -> np.ndarray:
        """Collect each slot's texts for drafts.

        These are other answers, and its prompt with its own answer.
        """
        if self._listens[slots].any() or not self._histories.wanted(len(slots)):
            return self._histories.arrays()
        texts = []
        for slot in slots:
            work, sample = self._work[slot]
            prompt = work.request.prompt
            if work.request.sampling.speculation:
                others = [self._answer(work, other) for other in range(work.request.samples) if other != sample]
                own = np.concatenate((prompt.token_ids, self._answer(work, sample)))
                texts.append((slot, prompt.id, [*others, own]))
        return self._histories.arrays(texts)

    def _answer(self, work: Work, sample: int) -> np.ndarray:
        """Return the ids of a response so far."""
        if (rollout := work.rollouts[sample]) is not None:
            return rollout.response_ids
        slot = work.slots[sample]
        return self._tokens[slot, : self._length[slot] if slot >= 0 else 0]

    def _end_turns(self, slots: np.ndarray, kept: np.ndarray, token: np.ndarray, drawn: np.ndarray) -> None:
        """Find the turns that end, hand them to their partners, and retire whole responses.

        kept: numbers of new tokens. token, drawn: the last of them, and whether it was drawn.
        """
        stopped, said = np.isin(token, self._graphs.stop_ids) & drawn, np.zeros(len(slots), bool)
        for i in np.flatnonzero(self._says[slots]):
            first = self._first_said(slots[i], kept[i] - stopped[i])
            if first is not None:
                kept[i], stopped[i], said[i] = first, False, True
        self._length[slots] += kept.astype(np.int32)
        self._token[slots] = self._tokens[slots, self._length[slots] - 1]
        for i in np.flatnonzero(drawn & self._listens[slots]):
            (work, sample), heard = self._work[slots[i]], self._turn(slots[i])
            said[i] |= work.request.listen(work.request.row + sample, heard) and not stopped[i]
        self._position[slots] += kept.astype(np.int32)
        if self._seen is not self._nothing:
            self._seen[slots, self._token[slots]] = 1.0
        ended = stopped | said
        done = ended | (self._length[slots] >= self._most[slots])
        self._reason[slots[done]] = np.select([stopped[done], said[done]], ["eos", "stop"], "length")
        for i in np.flatnonzero(ended):
            work, sample = self._work[slots[i]]
            if work.request.partner:
                length = int(self._length[slots[i]])
                work.request.partner.submit(work.request.row + sample, self._turn(slots[i]), length)
                self._waiting[slots[i]], done[i] = True, False
        self._retire(slots[done])

    def _turn(self, slot: int) -> list[int]:
        """Return the ids of a slot's current turn."""
        return self._tokens[slot, self._first[slot] : self._length[slot]].tolist()

    def _first_said(self, slot: int, more: int) -> int | None:
        """Count the next tokens, up to `more`, until a stop string; None without one."""
        first, count, stops = self._first[slot], self._length[slot], self._work[slot][0].request.stop_strings
        for length in range(max(1, first - count + 1), more + 1):
            text = self._decode_text(self._tokens[slot, first : count + length].tolist())
            if any(stop in text for stop in stops):
                return length
        return None

    def _retire(self, slots: Sequence[int]) -> None:
        """Free slots whose responses have ended."""
        for slot in slots:
            work, sample = self._work[slot]
            length = self._length[slot]
            work.rollouts[sample] = Rollout(
                prompt_id=work.request.prompt.id,
                sample_index=sample,
                response_ids=self._tokens[slot, :length].copy(),
                finish_reason=self._reason[slot],
                seed=work.request.seed,
                tokens={
                    "sampled": self._context[slot, :length] < 0,
                    "behaviour_log_probs": self._behaviour[slot, :length].copy(),
                    "policy_log_probs": self._policy[slot, :length].copy(),
                },
            )
            self._ended_tokens += int(length)
            self.most -= int(self._most[slot] - length)
            if work.answered:
                self._finished[work.number] = RolloutGroup(work.request.prompt, tuple(work.rollouts))
            if work.answered or not work.operator:
                self._held[work.home if work.operator else slot] = False
        slots = np.asarray(slots, int)
        for part in (self._used, self._operator, self._token, self._position, self._prefix, self._length):
            part[slots] = 0
        for slot in slots:
            self._work[slot] = None
