"""Generation engine: graphs and a cache for a fixed number of slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.backend.compile.graph import compile_seconds
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.metrics.progress import Advance
from mindrlhf.metrics.timer import Timers
from mindrlhf.models.decoder import Decoder
from mindrlhf.rollout.decode_graphs import EngineGraphs
from mindrlhf.rollout.drafts import Histories
from mindrlhf.rollout.partner import Listener, Partner, Reply, begin
from mindrlhf.rollout.request import Request, check_length, check_stop_strings
from mindrlhf.rollout.session import Session
from mindrlhf.shapes import cache_positions
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
    """Generator of responses with one set of weights.

    sampling: of `generate`; requests of a `session` have their own, with at most its `max_new_tokens`.

    decoder: the model over its parameters; config: its shape; slots: sequences decoded at once; max_prompt: longest
    prompt in tokens; stop_ids: tokens that end a response; decode_text: token ids -> text, needed for stop strings
    only. shows: partners may reply with pictures, so that each token is a step of its own. opening: called before each
    session. Engines of ranks over which experts are spread are opened together, and generate together.
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
        shows: bool = False,
        opening: Callable[[], None] = lambda: None,
    ):
        check_stop_strings(sampling.stop_strings, decode_text)
        self._together = decoder.spread
        slots = int(self._together.largest(np.array([slots]))[0])
        self.sampling = sampling
        self.seed = seed
        self.slots = slots
        self.max_prompt = max_prompt
        self.decode_text = decode_text
        self._opening = opening
        self._limit = sampling.max_new_tokens
        self._bucket = length_bucket
        size = cache_positions(max_prompt, sampling.max_new_tokens, length_bucket)
        self.graphs = EngineGraphs(config, decoder, slots, size, max_prompt, stop_ids, shows)
        self.cache = self.graphs.cache
        operator = self.graphs.open(sampling)
        self.copies_prompts = not operator
        self.statistics = Statistics()
        self._parts = Timers(compile_seconds)
        self._histories = Histories(slots, sampling.speculation and operator)

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
            check_length(prompt, self.max_prompt)
        openings: Sequence[Reply] = ()
        self._parts.collect()  # drops the times of an interrupted call
        if partner and prompts:
            with self._parts("partner"):
                prompts, openings = begin(partner, prompts, num_generations, step)
        requests = []
        for row, prompt in zip(range(0, len(prompts) * num_generations, num_generations), prompts, strict=True):
            own = openings[row : row + num_generations]
            requests.append(Request(prompt, self.sampling, num_generations, self.seed, step, partner, row, own, listen))
        return self._answer(requests, progress)

    def answer(self, requests: Sequence[Request], progress: Advance | None = None) -> list[RolloutGroup]:
        """Answer requests in a session of their own.

        Returns a group for each, in order. progress: see `generate`.
        """
        self._parts.collect()  # drops the times of an interrupted call
        return self._answer(requests, progress)

    def _answer(self, requests: Sequence[Request], progress: Advance | None) -> list[RolloutGroup]:
        session = self.session()
        reported = 0
        for request in requests:
            session.submit(request)
        while self._together.any(session.busy):
            reported = _report(session, reported, progress)
            session.step()
        _report(session, reported, progress)
        seconds = {f"{part}_s": spent for part, spent in self._parts.collect().items()}
        groups = [group for _, group in session.poll()]
        tokens = sum(int(rollout.sampled.sum()) for group in groups for rollout in group.rollouts)
        steps, drafted, accepted = map(int, session.counts)
        self.statistics = Statistics(tokens=tokens, decode_steps=steps, drafted=drafted, accepted=accepted, **seconds)
        return groups

    def ends_turn(self, answer: Rollout, partner: Partner) -> bool:
        """Test if the last turn of a response has ended by itself.

        Its partner was given it then.
        """
        if answer.finish_reason != "length":
            return True
        if not answer.sampled[-1]:
            return False
        turn = answer.response_ids[answer.turn_first :]
        stops = (*self.sampling.stop_strings, *partner.stop_strings)
        text = self.decode_text(turn.tolist()) if stops else ""
        return bool(np.isin(turn[-1], self.graphs.stop_ids)) or any(stop in text for stop in stops)

    def rehearse(self, prompts: Sequence[Prompt], num_generations: int) -> None:
        """Run each graph once for these prompts; see `Session.rehearse`."""
        session = self.session()
        for prompt in prompts:
            session.submit(Request(prompt, self.sampling, num_generations, self.seed, 0))
        session.rehearse()

    def session(self) -> Session:
        """Open a session.

        It ends when the next one, or `generate`, begins to use the cache.
        """
        with self._parts("prefill"):
            self._opening()
        return Session(self.graphs, self._limit, self._bucket, self._histories, self._parts, self.decode_text)


def _report(session: Session, reported: int, progress: Advance | None) -> int:
    """Tell the progress since `reported` tokens; returns the tokens so far."""
    if progress:
        progress(session.tokens - reported, session.most)
    return session.tokens
