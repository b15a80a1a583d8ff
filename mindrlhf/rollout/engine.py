"""Generation engine: a fixed number of slots over a static, refilled cache.

A prompt is prefilled once, and its cache copied to the slots of its samples, or to one slot if one operator decodes for
all of them. The first decode step feeds the prompt's last token, so that prefill needs no logits. Random numbers depend
only on counters: rollouts do not depend on the number of slots, order of prompts, or workers. With a partner, a slot
whose turn has ended keeps its cache and waits for the reply, whose tokens are decoded without a draw. Not supported:
paged caches, prefix sharing between different prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindrlhf.backend.compile.graph import compile_seconds
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.metrics.progress import Advance
from mindrlhf.metrics.timer import Timers
from mindrlhf.models.decoder import Decoder
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.decode_graphs import FUSED_CONTEXT, FUSED_TOKENS, Admit, Cache, Decode, Prefill
from mindrlhf.rollout.drafts import Histories
from mindrlhf.rollout.partner import Exchange, Listener, Partner
from mindrlhf.rollout.sampling import Sampler
from mindrlhf.shapes import cache_positions, padded_prefix, pool_size
from mindrlhf.types import Prompt, Rollout, RolloutGroup


@dataclass(frozen=True)
class Statistics:
    """Statistics of a `generate` call.

    tokens: drawn tokens. drafted, accepted: all draft tokens, and the accepted ones. Seconds are wall time; only
    compile_s includes compiling; partner_s: work of the partner and waiting for it.
    """

    tokens: int = 0
    decode_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    partner_s: float = 0.0
    compile_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s + self.partner_s


class Engine:
    """Generator of responses with one set of weights and one sampling rule.

    decoder: the model over its parameters; config: its shape; slots: sequences decoded at once; max_prompt: longest
    prompt in tokens; stop_ids: tokens that end a response; decode_text: token ids -> text, needed for stop strings
    only.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        sampling: SamplingSettings,
        slots: int,
        max_prompt: int,
        stop_ids: Sequence[int],
        seed: int,
        length_bucket: int = 32,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ):
        self.config, self.sampling, self.seed, self.bucket = config, sampling, seed, length_bucket
        self.slots, self.max_prompt = slots, max_prompt
        self.stop_ids = np.array(sorted(set(stop_ids)), np.int32)
        self.decode_text = decode_text
        if sampling.stop_strings and decode_text is None:
            raise ValueError("stop strings need decode_text")
        size = cache_positions(max_prompt, sampling.max_new_tokens, length_bucket)
        sizes = config.num_layers, slots, decoder.kv_heads, size, config.head_dim
        self.cache = Cache(*sizes, decoder.dtype, decoder.operators.packs_cache)
        self.statistics = Statistics()
        self._parts = Timers(compile_seconds)
        self._admit_size = -(-slots // 8)
        self._prefill, self._admit = Prefill(decoder), Admit(self.cache, decoder.operators, max_prompt)
        sampler = Sampler(sampling, config.vocab_size, tuple(stop_ids), decoder.shards)
        self._decode = Decode(decoder, self.cache, sampler)
        self.copies_prompts = not self._decode.fused
        self._histories = Histories(slots, sampling.speculation and self._decode.fused)
        self._penalises = sampling.repetition_penalty != 1.0
        # 1 at the tokens that a slot already contains; the sampler reads it only when it penalises.
        self._seen = np.zeros((slots, config.vocab_size) if self._penalises else (1, 1), np.float32)

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        step: int,
        progress: Advance | None = None,
        partner: Partner | None = None,
        listen: Listener | None = None,
    ) -> list[RolloutGroup]:
        """Generate responses to each prompt, or conversations with a partner.

        progress: gets the number of new response tokens, and the most tokens that all responses can have; it may end
        the call by raising. listen: called after each drawn token. The tokens do not depend on how long replies take.
        """
        for prompt in prompts:
            if len(prompt.token_ids) > self.max_prompt:
                raise UserError(
                    f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and the limit is {self.max_prompt}; "
                    f"raise max_prompt_length or convert the data with --truncation left."
                )
        if not prompts:
            self.statistics = Statistics()
            return []
        if partner and partner.stop_strings and self.decode_text is None:
            raise ValueError("a partner's stop strings need decode_text")
        self._parts.collect()  # drops the times of an interrupted call
        run = _Run(self, prompts, num_generations, step, progress, partner, listen)
        run.finish()
        seconds = {f"{part}_s": spent for part, spent in self._parts.collect().items()}
        groups = run.groups()
        tokens = sum(int(rollout.sampled.sum()) for group in groups for rollout in group.rollouts)
        self.statistics = Statistics(tokens, *map(int, run.counts), **seconds)
        self._histories.remember(groups)
        return groups


class _Run:
    """State of one `generate` call: a row for each requested sample, and slots."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], generations: int, step: int, progress, partner, listen
    ):
        self.engine, self.generations, self.progress, self.listen = engine, generations, progress, listen
        count, limit, slots = len(prompts) * generations, engine.sampling.max_new_tokens, engine.slots
        self.exchange = Exchange(partner, count, limit, engine.config.vocab_size)
        self.stop_strings = (*engine.sampling.stop_strings, *(partner.stop_strings if partner else ()))
        with engine._parts("partner"):
            self.prompts = prompts = self.exchange.begin(prompts, generations, step)
        self.group = np.repeat(np.arange(len(prompts)), generations)
        ids = np.array([(prompt.id, prompt.occurrence * generations) for prompt in prompts], np.int64)[self.group]
        # A prompt that a step draws again gets new samples, not the same samples again.
        drawn = ids[:, 1] + np.tile(np.arange(generations), len(prompts))
        self.uniform = uniform(engine.seed, step, ids[:, :1], drawn[:, None], np.arange(limit)[None])
        self.tokens = np.zeros((count, limit), np.int32)
        self.behaviour, self.policy = (np.zeros((count, limit), np.float32) for _ in range(2))
        self.length = np.zeros(count, np.int32)
        self.reason = np.full(count, "", object)
        # For each prompt: its last token, and that token's position.
        self.last_token = np.array([prompt.token_ids[-1] for prompt in prompts], np.int32)
        self.last = np.array([len(prompt.token_ids) - 1 for prompt in prompts], np.int32)
        self.next_sample = 0
        self.pool_groups = min(len(prompts), pool_size(slots, generations))
        self.pool, self.pool_end = None, 0  # prefilled prompts, and the index of the next one
        self.prefix_size = padded_prefix(int(self.last.max()) + 1, engine.bucket)
        self.sample = np.full(slots, -1)  # sample in each slot; -1 is none
        self.token, self.position = (np.zeros(slots, np.int32) for _ in range(2))
        # If responses share their prompt's cache: the slot that holds each prompt being answered; -1 is none. A slot
        # holds one prompt and one response, which may belong to different prompts.
        self.prompt_slot = np.full(len(prompts), -1)
        self.unanswered = np.full(len(prompts), generations)
        self.saved = self.reported = 0  # tokens: unused by ended responses, and reported
        self.counts = np.zeros(3, int)  # decode steps, draft tokens, accepted draft tokens

    def finish(self) -> None:
        """Answer all prompts."""
        while self.unanswered.any():
            self._report()
            self._refill()
            if self.exchange.waiting.any():
                self._listen()
            active = self._active()
            if len(active):
                self._step(active)
        self._report()

    def _report(self) -> None:
        if self.progress:
            done = int(self.length.sum())
            self.progress(done - self.reported, self.tokens.size - self.saved)
            self.reported = done

    def _active(self) -> np.ndarray:
        """List the slots that hold a response and wait for no reply."""
        return np.flatnonzero((self.sample >= 0) & ~self.exchange.waiting[self.sample])

    def _listen(self) -> None:
        """Take the partner's replies; waits for one if no slot can go on."""
        with self.engine._parts("partner"):
            ended = self.exchange.collect(not len(self._active()), self.length)
        for row, end, cut in ended:
            self.tokens[row, self.length[row] : end] = self.exchange.context[row, self.length[row] : end]
            self.length[row] = end
            if cut:
                self.reason[row] = "length"
        self._retire(np.array([row for row, *_ in ended], int))

    def groups(self) -> list[RolloutGroup]:
        """Return the prompts with their responses."""
        arrays = {
            "sampled": self.exchange.context < 0,
            "behaviour_log_probs": self.behaviour,
            "policy_log_probs": self.policy,
        }
        rollouts = [
            Rollout(
                prompt_id=self.prompts[group].id,
                sample_index=row % self.generations,
                response_ids=self.tokens[row, :length].copy(),
                finish_reason=self.reason[row],
                seed=self.engine.seed,
                tokens={name: array[row, :length].copy() for name, array in arrays.items()},
            )
            for row, (group, length) in enumerate(zip(self.group, self.length, strict=True))
        ]
        starts = range(0, len(rollouts), self.generations)
        own = (tuple(rollouts[start : start + self.generations]) for start in starts)
        return [RolloutGroup(*pair) for pair in zip(self.prompts, own, strict=True)]

    def _refill(self) -> None:
        free, total = np.flatnonzero(self.sample < 0), len(self.group)
        # A few free slots wait until there are more, so that an admission copies several at once.
        if len(free) < min(self.engine._admit_size, total - self.next_sample) and len(self._active()):
            return
        while len(free) and self.next_sample < total:
            group = self.group[self.next_sample]
            if group >= self.pool_end:
                self._fill_pool(group)
            end = min(total, self.pool_end * self.generations, self.next_sample + len(free))
            rows = np.arange(self.next_sample, end)
            self._place(free[: len(rows)], rows)
            self.next_sample, free = end, free[len(rows) :]

    def _fill_pool(self, group: int) -> None:
        ids = np.zeros((self.pool_groups, self.prefix_size), np.int32)
        for row, prompt in enumerate(self.prompts[group : group + self.pool_groups]):
            ids[row, : len(prompt.token_ids) - 1] = prompt.token_ids[:-1]
        self.pool_end = group + self.pool_groups
        with self.engine._parts("prefill"):
            positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), len(ids))
            self.pool = self.engine._prefill(Tensor(ids), Tensor(positions))

    def _place(self, slots: np.ndarray, rows: np.ndarray) -> None:
        engine, size, groups = self.engine, self.engine._admit_size, self.group[rows]
        places, copied = (slots, groups) if engine.copies_prompts else self._keep_prompts(groups)
        # Padding repeats the last entry: a second copy does not change the cache.
        pairs = np.stack((places, copied - self.pool_end + self.pool_groups)).astype(np.int32)
        pairs = np.pad(pairs, ((0, 0), (0, -len(places) % size)), "edge")
        with engine._parts("prefill"):
            for first in range(0, len(places), size):
                engine._admit(*(Tensor(part.copy()) for part in pairs[:, first : first + size]), *self.pool)
        self.sample[slots], self.token[slots], self.position[slots] = rows, self.last_token[groups], self.last[groups]
        if engine._penalises:
            for slot, group in zip(slots, groups, strict=True):
                engine._seen[slot] = 0.0
                engine._seen[slot, self.prompts[group].token_ids] = 1.0

    def _keep_prompts(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Assign slots to prompts without one; returns slots and prompts.

        There is always a free slot: every kept prompt, except the one being placed, has a response in a slot.
        """
        new = np.unique(groups[self.prompt_slot[groups] < 0])
        free = np.setdiff1d(np.arange(self.engine.slots), self.prompt_slot)
        self.prompt_slot[new] = free[: len(new)]
        return self.prompt_slot[new], new

    def _step(self, active: np.ndarray) -> None:
        """Decode the next tokens of these slots."""
        engine, limit = self.engine, self.engine.sampling.max_new_tokens
        rows = self.sample[active]
        counts, groups = self.length[rows], self.group[rows]
        ahead = np.arange((FUSED_CONTEXT if self.exchange.partner else FUSED_TOKENS) if engine._decode.fused else 1)
        numbers = np.zeros((engine.slots, len(ahead)), np.float32)
        context = np.full((engine.slots, len(ahead)), -1, np.int32)
        places = rows[:, None], np.minimum(counts[:, None] + ahead, limit - 1)
        numbers[active], context[active] = self.uniform[places], self.exchange.context[places]
        remaining, banned, prefixes = (np.zeros(engine.slots, np.int32) for _ in range(3))
        remaining[active] = limit - counts
        banned[active] = np.maximum(engine.sampling.min_new_tokens - counts, 0)
        leaders = np.arange(engine.slots, dtype=np.int32)
        if not engine.copies_prompts:
            leaders[active], prefixes[active] = self.prompt_slot[groups], self.last[groups]
        pending = min(engine._admit_size, len(self.group) - self.next_sample)
        # Decoding of several tokens ends when only this many slots are active: enough others can be refilled.
        waiting = int(self.exchange.waiting.sum())
        enough = engine.slots - pending - waiting if pending else 0
        enough = np.array([enough, engine.max_prompt, 1 if self.listen else FUSED_TOKENS], np.int32)
        angles = self.position  # in text a token's angle is that of its place
        slots = (self.token, self.position, angles, remaining, banned, leaders, prefixes, enough, context)
        with engine._parts("decode"):
            out = engine._decode.on_arrays(*slots, self._histories(active), numbers, engine._seen)
            tokens, behaviour, policy = (part.asnumpy()[active] for part in out[:3])
            self.counts += out[3].asnumpy() if engine._decode.fused else (1, 0, 0)
        drawn, kept = (tokens >= 0) & (context[active] < 0), (tokens >= 0).sum(1)
        last = np.arange(len(rows)), kept - 1
        stopped = np.isin(tokens[last], engine.stop_ids) & drawn[last]
        row, column = np.nonzero(ahead < kept[:, None])
        at = (rows[row], counts[row] + column)
        self.tokens[at], self.behaviour[at], self.policy[at] = (
            part[row, column] for part in (tokens, behaviour, policy)
        )
        said = np.zeros(len(rows), bool)
        if self.stop_strings:
            for i, length in enumerate(kept):
                first = self._first_said(rows[i], counts[i], length - stopped[i])
                if first is not None:
                    kept[i], stopped[i], said[i] = first, False, True
        self.length[rows] = counts + kept
        if self.listen:
            for i in np.flatnonzero(drawn[last]):
                heard = self.tokens[rows[i], self.exchange.first[rows[i]] : self.length[rows[i]]]
                said[i] |= self.listen(int(rows[i]), heard.tolist()) and not stopped[i]
        self.token[active] = tokens[np.arange(len(rows)), kept - 1]
        self.position[active] += kept
        if engine._penalises:
            engine._seen[active, self.token[active]] = 1.0  # a call draws one token then
        self._end_turns(rows, stopped, said)

    def _histories(self, active: np.ndarray) -> np.ndarray:
        """Collect each slot's texts: other answers, and its prompt with its own answer."""
        histories = self.engine._histories
        if self.listen or not histories.wanted(len(active)):
            return histories.arrays()
        texts = []
        for slot, row in zip(active, self.sample[active], strict=True):
            prompt, first = self.prompts[self.group[row]], row - row % self.generations
            others = (i for i in range(first, first + self.generations) if i != row)
            own = np.concatenate((prompt.token_ids, self.tokens[row, : self.length[row]]))
            texts.append((slot, prompt.id, [*(self.tokens[i, : self.length[i]] for i in others), own]))
        return histories.arrays(texts)

    def _first_said(self, row: int, count: int, more: int) -> int | None:
        """Count the next tokens, up to `more`, until a stop string; None without one."""
        first = self.exchange.first[row]
        for length in range(max(1, first - count + 1), more + 1):
            text = self.engine.decode_text(self.tokens[row, first : count + length].tolist())
            if any(stop in text for stop in self.stop_strings):
                return length
        return None

    def _end_turns(self, rows: np.ndarray, stopped: np.ndarray, said: np.ndarray) -> None:
        """Hand finished turns to the partner; retire whole responses."""
        ended, full = stopped | said, self.length[rows] >= self.engine.sampling.max_new_tokens
        done = ended | full
        if done.any():
            self.reason[rows[done]] = np.select([stopped[done], said[done]], ["eos", "stop"], "length")
            if self.exchange.partner:
                for row in rows[ended]:
                    self.exchange.submit(int(row), self.tokens[row], int(self.length[row]))
                done &= ~ended
            self._retire(rows[done])

    def _retire(self, rows: np.ndarray) -> None:
        if len(rows):
            np.subtract.at(self.unanswered, self.group[rows], 1)
            self.saved += int((self.engine.sampling.max_new_tokens - self.length[rows]).sum())
            self.prompt_slot[self.unanswered == 0] = -1
            slots = np.flatnonzero(np.isin(self.sample, rows))
            self.sample[slots], self.token[slots], self.position[slots] = -1, 0, 0
