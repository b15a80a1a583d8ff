"""State of the slots of an engine: the prompt and the response in each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.partner import Reply
from mindrlhf.rollout.recorder import RoutingRecorder
from mindrlhf.rollout.request import Work
from mindrlhf.rollout.sampling import rule_of
from mindrlhf.rollout.shown import fitted, until_last_image
from mindrlhf.types import Prompt, Rollout

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture


class Slots:
    """Arrays over the slots of an engine.

    A slot holds one prompt and one response, which may belong to different prompts.

    held: slots with a prompt. work: the response's request, and its index there. used: slots with a response. operator:
    those that the operator for several tokens decodes. waiting: those that wait for a partner's reply. says: those with
    stop strings. listens: those whose request has a listener. leader: the slot with the response's prompt. token,
    position: the last token, and its place. prefix: positions of the prompt without its last token. shift: rotary
    position minus place of the response's tokens (`types.Prompt.position_shift`). pictures: of each response, by the
    index of their first tokens.
    length, most, least: tokens of the response so far, and their limits; room: the most with a partner's reply. first:
    the first token of the current turn. tokens, context: ids of the response, and ids that are not drawn (-1: drawn).
    numbers: random numbers of the tokens.
    behaviour, policy: their log-probs. rules: see `sampling.rule_of`. reason: of the response's end. seen: 1 at the
    tokens that a slot already contains; [1, 1] as long as no request penalises repetitions.
    """

    def __init__(self, count: int, limit: int, vocabulary: int, vision: VisionConfig | None = None):
        """Make empty slots for responses of up to `limit` tokens.

        vision: of a model that sees.
        """
        self.count = count
        self._vision = vision
        self._vocabulary = vocabulary
        self.held = np.zeros(count, bool)
        self.work: list[tuple[Work, int] | None] = [None] * count
        self.used, self.operator, self.waiting, self.says, self.listens = (np.zeros(count, bool) for _ in range(5))
        self.token, self.position, self.prefix, self.leader = (np.zeros(count, np.int32) for _ in range(4))
        self.shift = np.zeros(count, np.int32)
        self.length, self.most, self.room, self.least, self.first = (np.zeros(count, np.int32) for _ in range(5))
        self.tokens, self.context = (np.full((count, limit), fill, np.int32) for fill in (0, -1))
        self.numbers, self.behaviour, self.policy = (np.zeros((count, limit), np.float32) for _ in range(3))
        self.rules = np.repeat(rule_of(SamplingSettings(), vocabulary)[:, None], count, 1)
        self.reason = np.full(count, "", object)
        self.pictures: list[dict[int, Picture]] = [{} for _ in range(count)]
        self.seen = self.nothing = np.zeros((1, 1), np.float32)

    @property
    def penalises(self) -> bool:
        """True if `seen` is kept."""
        return self.seen is not self.nothing

    def penalise(self) -> None:
        """Keep `seen` from here on."""
        if not self.penalises:
            self.seen = np.zeros((self.count, self._vocabulary), np.float32)

    def active(self) -> np.ndarray:
        """List the slots that hold a response and wait for no reply."""
        return np.flatnonzero(self.used & ~self.waiting)

    def of(self, work: Work) -> list[int]:
        """List the slots that hold responses to a request."""
        return [slot for slot, placed in enumerate(self.work) if placed and placed[0] is work]

    def place(self, chosen: Sequence[tuple[int, Work, int]]) -> None:
        """Begin responses: each has a slot, a request, and its index there."""
        slots = np.array([slot for slot, *_ in chosen])
        requests = [work.request for _, work, _ in chosen]
        counters = [
            (one.seed, one.step, one.prompt.id, one.key(sample))
            for one, (*_, sample) in zip(requests, chosen, strict=True)
        ]
        limit = self.numbers.shape[1]
        self.numbers[slots] = uniform(*np.array(counters, np.int64).T[..., None], np.arange(limit)[None])
        self.used[slots] = True
        self.operator[slots] = [work.operator for _, work, _ in chosen]
        self.says[slots] = [bool(one.stop_strings) for one in requests]
        self.listens[slots] = [one.listen is not None for one in requests]
        self.token[slots] = [one.prompt.token_ids[-1] for one in requests]
        self.position[slots] = self.prefix[slots] = [len(one.prompt.token_ids) - 1 for one in requests]
        self.shift[slots] = [one.prompt.position_shift for one in requests]
        self.most[slots] = [work.request.limit(sample) for _, work, sample in chosen]
        self.room[slots] = [one.sampling.max_new_tokens for one in requests]
        self.least[slots] = [one.sampling.min_new_tokens for one in requests]
        self.rules[:, slots] = np.stack([rule_of(one.sampling, self._vocabulary) for one in requests], 1)
        self.length[slots] = self.first[slots] = 0
        self.context[slots] = -1
        self.behaviour[slots] = self.policy[slots] = 0.0
        for slot, work, sample in chosen:
            self.work[slot] = (work, sample)
            work.slots[sample] = slot
            if work.request.openings:
                said = work.request.openings[sample]
                room = self.most[slot] - 1  # one token at least is drawn
                opening, self.pictures[slot] = fitted(said.token_ids, said.pictures, room, self._vision)
                if said.pictures and len(opening) < len(said.token_ids):  # a picture is never left out of the middle
                    self.most[slot] = self.room[slot] = len(opening) + 1
                self.context[slot, : len(opening)] = opening
                self.first[slot] = len(opening)
            if work.request.begun:
                self.context[slot, : work.request.known(sample)] = work.request.begun[sample]
            if work.request.firsts:
                self.first[slot] = work.request.firsts[sample]
            if self.penalises:
                self.seen[slot] = 0.0
                self.seen[slot, work.request.prompt.token_ids] = 1.0

    def append(self, slot: int, reply: Reply) -> bool:
        """Append a reply to a response; returns True if this ends it."""
        length = int(self.length[slot])
        ids = reply.token_ids
        over = reply.over
        taken, shown = fitted(ids, reply.pictures, self.room[slot] - length, self._vision)
        self.pictures[slot] |= {length + place: picture for place, picture in shown.items()}
        end = length + len(taken)
        self.context[slot, length:end] = taken
        self.first[slot] = end
        self.waiting[slot] = False
        cut = len(taken) < len(ids) or (not over and end >= self.most[slot])
        if over or cut:
            self.tokens[slot, length:end] = taken
            # Tokens that were drawn behind a stop string have left theirs.
            self.behaviour[slot, length:end] = self.policy[slot, length:end] = 0.0
            self.length[slot] = end
        if cut:
            self.reason[slot] = "length"
        return over or cut

    def unseen(self, slots: Sequence[int]) -> list[tuple[int, Prompt]]:
        """List slots with pictures whose keys and values are not computed.

        Each has its conversation up to the token behind the last picture, which is decoded next.
        """
        found = []
        for slot in slots:
            length = self.length[slot]
            if max(self.pictures[slot], default=-1) >= length:
                work, _ = self.work[slot]
                ids = np.concatenate([self.tokens[slot, :length], self.context[slot, length : self.first[slot]]])
                found.append((slot, until_last_image(work.request.prompt, ids, self.pictures[slot])))
        return found

    def begin_anew(self, slot: int, conversation: Prompt) -> None:
        """Go on behind a conversation whose keys and values are computed.

        Those of its last token are not.
        """
        work, _ = self.work[slot]
        begin = self.length[slot]
        end = len(conversation.token_ids) - len(work.request.prompt.token_ids)
        self.tokens[slot, begin:end] = self.context[slot, begin:end]
        self.behaviour[slot, begin:end] = self.policy[slot, begin:end] = 0.0
        self.length[slot] = end
        self.token[slot] = conversation.token_ids[-1]
        self.position[slot] = len(conversation.token_ids) - 1
        self.shift[slot] = conversation.position_shift
        if self.penalises:
            self.seen[slot, conversation.token_ids] = 1.0

    def answer(self, work: Work, sample: int) -> np.ndarray:
        """Return the ids of a response so far."""
        if (rollout := work.rollouts[sample]) is not None:
            return rollout.response_ids
        slot = work.slots[sample]
        return self.tokens[slot, : self.length[slot] if slot >= 0 else 0]

    def turn(self, slot: int) -> list[int]:
        """Return the ids of a slot's current turn."""
        return self.tokens[slot, self.first[slot] : self.length[slot]].tolist()

    def rollout(self, slot: int, recorder: RoutingRecorder | None = None) -> Rollout:
        """Copy a response that has ended.

        recorder: of its routing.
        """
        work, sample = self.work[slot]
        length = self.length[slot]
        sampled = self.context[slot, :length] < 0
        recorded = {}
        if recorder:
            prefix = self.prefix[slot]
            if work.prompt_routing is None:
                work.prompt_routing = recorder.prompt(self.leader[slot], prefix)
            routing = recorder.response(slot, prefix, self.operator[slot], sampled)
            recorded = {"routing": routing, "prompt_routing": work.prompt_routing}
        return Rollout(
            prompt_id=work.request.prompt.id,
            sample_index=sample,
            response_ids=self.tokens[slot, :length].copy(),
            finish_reason=self.reason[slot],
            seed=work.request.seed,
            tokens={
                "sampled": sampled,
                "behaviour_log_probs": self.behaviour[slot, :length].copy(),
                "policy_log_probs": self.policy[slot, :length].copy(),
                **recorded,
            },
            pictures=dict(self.pictures[slot]),
        )

    def drop_prompt(self, work: Work) -> None:
        """Let the prompt go that all responses to a request share."""
        if work.home >= 0:
            self.held[work.home] = False

    def free(self, slots: np.ndarray) -> None:
        """Let responses go, with prompts that are theirs alone."""
        self.held[slots[~self.operator[slots]]] = False
        for part in (self.used, self.operator, self.waiting, self.token, self.position, self.prefix, self.length):
            part[slots] = 0
        self.shift[slots] = 0
        for slot in slots:
            self.work[slot] = None
            self.pictures[slot] = {}
