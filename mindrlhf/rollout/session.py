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

from mindrlhf.metrics.timer import Timers
from mindrlhf.rollout.decode_graphs import FUSED_CONTEXT, FUSED_TOKENS, EngineGraphs
from mindrlhf.rollout.drafts import Histories
from mindrlhf.rollout.partner import Partner, check_context
from mindrlhf.rollout.prompt_pool import PromptPool
from mindrlhf.rollout.request import Request, Work, check_length, check_stop_strings
from mindrlhf.rollout.slots import Slots
from mindrlhf.types import RolloutGroup


class Session:
    """Requests being answered, in the slots of one engine.

    limit: most tokens of a response. decode_text: token ids -> text, for stop strings. parts: timers of prefill, decode
    and partner. tokens, most: tokens of responses so far, and the most that all requests can have.

    A request may be cancelled while it waits, is decoded or waits for its partner's reply: its slots and its prompt's
    are free at once, and `poll` never returns it. The tokens that it has stay counted. The partner is not told; its
    reply is dropped when it comes.
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
        self._graphs = graphs
        self._limit = limit
        self._histories = histories
        self._parts = parts
        self._decode_text = decode_text
        self._requests = self._unplaced = self._ended_tokens = self.most = 0
        self._queue: deque[Work] = deque()
        self._finished: dict[int, RolloutGroup] = {}
        self._unwanted: set[tuple[int, int]] = set()  # replies to cancelled requests: their partner's id, and row
        self._pool = PromptPool(graphs, bucket)
        self._slots = Slots(graphs.slots, limit, graphs.vocabulary, graphs.vision if graphs.admit_whole else None)
        self.counts = np.zeros(3, int)  # decode steps, draft tokens, accepted draft tokens

    @property
    def busy(self) -> bool:
        """True while requests are unanswered."""
        return bool(self._queue) or bool(self._slots.used.any())

    @property
    def tokens(self) -> int:
        return self._ended_tokens + int(self._slots.length.sum())

    def submit(self, request: Request) -> int:
        """Take a request; returns its number.

        Raises UserError for a prompt that is too long.
        """
        check_length(request.prompt, self._graphs.max_prompt)
        limits = [request.limit(sample) for sample in range(request.samples)]
        if (limit := max(limits)) > self._limit:
            raise ValueError(f"max_new_tokens {limit} of a request is above the session's {self._limit}")
        check_stop_strings(request.stop_strings, self._decode_text)
        for opening in request.openings:
            check_context(opening, self._graphs.vocabulary)
        operator = self._graphs.open(request.sampling)
        if self._graphs.penalises:
            self._slots.penalise()
        self._requests += 1
        self._unplaced += request.samples
        self.most += sum(limits)
        self._queue.append(Work(self._requests, request, operator))
        return self._requests

    def poll(self) -> list[tuple[int, RolloutGroup]]:
        """Collect the requests that were answered since the last call, by number."""
        done, self._finished = sorted(self._finished.items()), {}
        self._histories.remember(group for _, group in done)
        return done

    def cancel(self, number: int) -> None:
        """Drop a request between two steps.

        A request that `poll` has returned is left as it is.
        """
        self._finished.pop(number, None)
        known = (*self._queue, *(placed[0] for placed in self._slots.work if placed))
        work = next((one for one in known if one.number == number), None)
        if work is None:
            return
        if work in self._queue:
            self._queue.remove(work)
        slots = self._slots.of(work)
        unplaced = range(work.placed, work.request.samples)
        self._unplaced -= len(unplaced)
        self.most -= sum(map(work.request.limit, unplaced))
        for slot in slots:
            if self._slots.waiting[slot]:
                self._unwanted.add((id(work.request.partner), work.request.row + self._slots.work[slot][1]))
        self._slots.drop_prompt(work)
        self._free(slots)

    def step(self) -> None:
        """Fill free slots, take replies, and decode the next tokens."""
        self._refill()
        if self._slots.waiting.any():
            self._receive()
        active = self._slots.active()
        by_operator = self._slots.operator[active]
        for operator in (True, False):
            slots = active[by_operator == operator]
            if len(slots) or (self._graphs.together.size > 1 and not operator):
                self._decode(slots, operator, len(active) - len(slots))

    def rehearse(self) -> None:
        """Run each graph once for the submitted requests, without filling a slot.

        Nothing depends on what graphs compute.
        """
        first = self._queue[0]
        self._pool.fill(self._queue)
        self._pool.copy([(0, first)])
        for operator in self._graphs.decodes:
            self._decode(np.zeros(0, int), operator, 0)

    def _receive(self) -> None:
        """Take the partners' replies; waits for one if no slot can go on."""
        partners: dict[int, tuple[Partner, dict[int, int]]] = {}
        for slot in np.flatnonzero(self._slots.waiting):
            work, sample = self._slots.work[slot]
            _, rows = partners.setdefault(id(work.request.partner), (work.request.partner, {}))
            rows[work.request.row + sample] = int(slot)
        wait = not len(self._slots.active())
        ended = []
        answered = []
        with self._parts("partner"):
            for partner, rows in partners.values():
                replies = partner.collect(wait)
                wait = wait and not replies
                for reply in replies:
                    if reply.row not in rows:
                        if (unwanted := (id(partner), reply.row)) not in self._unwanted:
                            raise ValueError(f"a reply to row {reply.row}, which waits for none")
                        self._unwanted.remove(unwanted)
                        continue
                    slot = rows.pop(reply.row)
                    check_context(reply, self._graphs.vocabulary)
                    (ended if self._slots.append(slot, reply) else answered).append(slot)
        self._retire(ended)
        self._see(answered)

    def _see(self, slots: Sequence[int]) -> None:
        """Compute conversations anew, up to their last pictures; what follows is decoded."""
        for slot, conversation in self._slots.unseen(slots):
            with self._parts("prefill"):
                self._pool.begin_anew(slot, conversation)
            self._slots.begin_anew(slot, conversation)

    def _refill(self) -> None:
        free = np.flatnonzero(~self._slots.used).tolist()
        # A few free slots wait until there are more, so that an admission copies several at once.
        if len(free) < min(self._graphs.admit_size, self._unplaced) and len(self._slots.active()):
            free = []
        while True:
            self._place(free)
            needed = bool(free and self._queue) and self._queue[0] not in self._pool.prompts
            if not self._graphs.together.any(needed):
                return
            with self._parts("prefill"):
                self._pool.fill(self._queue if needed else ())

    def _place(self, free: list[int]) -> None:
        """Begin responses whose prompts are prefilled, in free slots."""
        while free and self._queue and self._queue[0] in self._pool.prompts:
            chosen, copies = self._assign(free)
            if not chosen:
                return
            with self._parts("prefill"):
                self._pool.copy(copies)
            self._slots.place(chosen)
            self._see([slot for slot, *_ in chosen])

    def _assign(self, free: list[int]) -> tuple[list[tuple[int, Work, int]], list[tuple[int, Work]]]:
        """Assign free slots to the next responses whose prompts are prefilled.

        Returns slots with their responses, and slots with the prompts to copy there. For the operator, there is always
        a slot without a prompt: every prompt, except the one being placed, has a response in a slot. Any other response
        needs a slot without a prompt.
        """
        chosen = []
        copies = []
        while free and self._queue and self._queue[0] in self._pool.prompts:
            work = self._queue[0]
            place = 0 if work.operator else next((i for i, slot in enumerate(free) if not self._slots.held[slot]), None)
            if place is None:
                break
            slot = free.pop(place)
            if work.home < 0:
                home = int(np.argmin(self._slots.held)) if work.operator else slot
                self._slots.held[home] = True
                copies.append((home, work))
                work.home = home if work.operator else -1
            self._slots.leader[slot] = work.home if work.operator else slot
            chosen.append((slot, work, work.placed))
            work.placed += 1
            if work.placed == work.request.samples:
                self._queue.popleft()
        self._unplaced -= len(chosen)
        return chosen, copies

    def _decode(self, slots: np.ndarray, operator: bool, others: int) -> None:
        """Decode the next tokens of these slots.

        others: number of slots that another graph decodes.
        """
        counts = self._slots.length[slots]
        count = self._graphs.slots
        ahead = np.arange(self._columns(slots) if operator else 1)
        numbers = np.zeros((count, len(ahead)), np.float32)
        context = np.full((count, len(ahead)), -1, np.int32)
        places = slots[:, None], np.minimum(counts[:, None] + ahead, self._slots.most[slots, None] - 1)
        numbers[slots], context[slots] = self._slots.numbers[places], self._slots.context[places]
        remaining, banned, prefixes = (np.zeros(count, np.int32) for _ in range(3))
        remaining[slots] = self._slots.most[slots] - counts
        graph = self._graphs.decodes[operator]
        banned[slots] = np.maximum(self._slots.least[slots] - counts, graph.least_banned)
        leaders = np.arange(count, dtype=np.int32)
        if operator:
            leaders[slots], prefixes[slots] = self._slots.leader[slots], self._slots.prefix[slots]
        rest = leaders, prefixes, self._enough(slots, others), context
        angles = self._slots.position + self._slots.shift  # in text a token's angle is that of its place
        state = self._slots.token, self._places(operator), angles, remaining, banned, *rest
        with self._parts("decode"):
            histories = self._texts(slots) if operator else self._histories.arrays()
            seen = self._slots.seen if graph.sampler.penalises else self._slots.nothing
            out = graph.on_arrays(*state, histories, numbers, self._slots.rules, seen)
            if not len(slots):
                return  # other ranks have some
            tokens, behaviour, policy = (part.asnumpy()[slots] for part in out[:3])
            self.counts += out[3].asnumpy() if operator else (1, 0, 0)
        drawn = (tokens >= 0) & (context[slots] < 0)
        kept = self._until_stop(tokens, drawn) if graph.bans else (tokens >= 0).sum(1)
        row, column = np.nonzero(ahead < kept[:, None])
        at = (slots[row], counts[row] + column)
        self._slots.tokens[at], self._slots.behaviour[at], self._slots.policy[at] = (
            part[row, column] for part in (tokens, behaviour, policy)
        )
        last = np.arange(len(slots)), kept - 1
        self._end_turns(slots, kept, tokens[last], drawn[last])

    def _until_stop(self, tokens: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Count each slot's new tokens up to the first stop token that was drawn.

        For graphs that go on behind it.
        """
        stops = np.isin(tokens, self._graphs.stop_ids) & drawn
        return np.where(stops.any(1), stops.argmax(1) + 1, (tokens >= 0).sum(1))

    def _columns(self, slots: np.ndarray) -> int:
        """Count the tokens that a call of the operator may add to a slot."""
        requests = [self._slots.work[slot][0].request for slot in slots]
        return FUSED_CONTEXT if any(one.partner or one.begun for one in requests) else FUSED_TOKENS

    def _enough(self, slots: np.ndarray, others: int) -> np.ndarray:
        """Make `Decode`'s int32[3] of this name.

        Decoding of several tokens ends when only this many slots are active: enough others can be refilled.
        """
        pending = min(self._graphs.admit_size, self._unplaced)
        enough = self._graphs.slots - pending - int(self._slots.waiting.sum()) - others if pending else 0
        steps = 1 if others or self._slots.listens[slots].any() else FUSED_TOKENS
        return np.array([enough, self._graphs.max_prompt, steps], np.int32)

    def _places(self, operator: bool) -> np.ndarray:
        """Return each slot's next place in the cache, int32[B].

        The graph for one token writes to all slots. Those of the operator have their own tokens behind the longest
        prompt: the next one's place is written again before it is read. So is that of a free slot, which may hold the
        prompt of responses that are not placed yet.
        """
        if operator:
            return self._slots.position
        own = self._graphs.max_prompt + self._slots.position - self._slots.prefix
        return np.where(self._slots.used & ~self._slots.operator, self._slots.position, own)

    def _texts(self, slots: np.ndarray) -> np.ndarray:
        """Collect each slot's texts for drafts.

        These are other answers, and its prompt with its own answer.
        """
        if self._slots.listens[slots].any() or not self._histories.wanted(len(slots)):
            return self._histories.arrays()
        texts = []
        for slot in slots:
            work, sample = self._slots.work[slot]
            prompt = work.request.prompt
            if work.request.sampling.speculation:
                others = [self._slots.answer(work, other) for other in range(work.request.samples) if other != sample]
                own = np.concatenate((prompt.token_ids, self._slots.answer(work, sample)))
                texts.append((slot, prompt.id, [*others, own]))
        return self._histories.arrays(texts)

    def _end_turns(self, slots: np.ndarray, kept: np.ndarray, token: np.ndarray, drawn: np.ndarray) -> None:
        """Find the turns that end, hand them to their partners, and retire whole responses.

        kept: numbers of new tokens. token, drawn: the last of them, and whether it was drawn.
        """
        stopped = np.isin(token, self._graphs.stop_ids) & drawn
        said = np.zeros(len(slots), bool)
        for i in np.flatnonzero(self._slots.says[slots]):
            first = self._first_said(slots[i], kept[i] - stopped[i])
            if first is not None:
                kept[i] = first
                stopped[i] = False
                said[i] = True
        self._slots.length[slots] += kept.astype(np.int32)
        self._slots.token[slots] = self._slots.tokens[slots, self._slots.length[slots] - 1]
        for i in np.flatnonzero(drawn & self._slots.listens[slots]):
            work, sample = self._slots.work[slots[i]]
            heard = self._slots.turn(slots[i])
            said[i] |= work.request.listen(work.request.row + sample, heard) and not stopped[i]
        self._slots.position[slots] += kept.astype(np.int32)
        if self._slots.penalises:
            self._slots.seen[slots, self._slots.token[slots]] = 1.0
        ended = stopped | said
        done = ended | (self._slots.length[slots] >= self._slots.most[slots])
        self._slots.reason[slots[done]] = np.select([stopped[done], said[done]], ["eos", "stop"], "length")
        for i in np.flatnonzero(ended):
            work, sample = self._slots.work[slots[i]]
            if work.request.partner:
                length = int(self._slots.length[slots[i]])
                work.request.partner.submit(work.request.row + sample, self._slots.turn(slots[i]), length)
                self._slots.waiting[slots[i]] = True
                done[i] = False
        self._retire(slots[done])

    def _first_said(self, slot: int, more: int) -> int | None:
        """Count the next tokens, up to `more`, until a stop string; None without one."""
        first = self._slots.first[slot]
        count = self._slots.length[slot]
        work, sample = self._slots.work[slot]
        stops = work.request.stop_strings
        for length in range(max(1, max(first, work.request.known(sample)) - count + 1), more + 1):
            text = self._decode_text(self._slots.tokens[slot, first : count + length].tolist())
            if any(stop in text for stop in stops):
                return length
        return None

    def _retire(self, slots: Sequence[int]) -> None:
        """Free slots whose responses have ended."""
        for slot in slots:
            work, sample = self._slots.work[slot]
            work.rollouts[sample] = self._slots.rollout(slot, self._graphs.recorder)
            if work.answered:
                self._finished[work.number] = RolloutGroup(work.request.prompt, tuple(work.rollouts))
                self._slots.drop_prompt(work)
        self._free(slots)

    def _free(self, slots: Sequence[int]) -> None:
        """Free slots; their tokens stay counted."""
        slots = np.asarray(slots, int)
        lengths = self._slots.length[slots]
        self._ended_tokens += int(lengths.sum())
        self.most -= int((self._slots.most[slots] - lengths).sum())
        self._slots.free(slots)
