"""Graphs of generation over one static key-value cache: prefill, admit, decode."""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.backend.memory import zero_parameter
from mindrlhf.backend.operators import Operators
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.allowed_tokens import never_drawn
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.routing import RoutingForm
from mindrlhf.rollout.recorder import RoutingRecorder
from mindrlhf.rollout.sampling import Sampler, rule_of

# Token limit of one call of the operator that draws several: without, and with a partner's tokens between them.
FUSED_TOKENS, FUSED_CONTEXT = 16, 256


class Cache:
    """Keys and values of `slots` sequences: each layer's [slots, K, size, D].

    packed: arrays are int32[slots, K, size, D / 2], with two bfloat16 numbers in each int32 (`Operators.packs_cache`).
    routing: numbers of the experts that are recorded: int32[slots, layers with experts, size, chosen], or None.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        size: int,
        head_dim: int,
        dtype: str = "float32",
        packed: bool = False,
        routing: RoutingForm | None = None,
    ):
        self.slots = slots
        self.size = size
        self.packed = packed
        shape = (slots, kv_heads, size, head_dim // 2 if packed else head_dim)
        dtype = "int32" if packed else dtype
        self.keys, self.values = (
            ParameterTuple([zero_parameter(f"cache.{part}.{i}", shape, dtype) for i in range(layers)])
            for part in ("key", "value")
        )
        self.routing: Parameter | None = None
        if routing:
            self.routing = zero_parameter("cache.routing", (slots, len(routing.layers), size, routing.chosen), "int32")

    @property
    def parameters(self) -> list[Parameter]:
        return [*self.keys, *self.values, *([] if self.routing is None else [self.routing])]


class Prefill(Graph):
    """Graph from prompts int32[N, P] to the arrays that `Admit` copies (`Decoder.prefill`).

    positions: int32[N * P], places in the sequences. further: see `Decoder.prefill`.
    """

    def __init__(self, decoder: Decoder):
        super().__init__("generate/prefill", decoder.positions, decoder.records)
        self.decoder = decoder

    def construct(self, prefix_ids, positions, *further):
        return self.decoder.prefill(prefix_ids, positions, *further)


class Admit(Graph):
    """Copy of prefilled prompts into slots: row `rows[i]` to slot `slots[i]`, int32[A] each.

    longest: positions of the longest prompt; positions beyond it may belong to the slot's own tokens and must not
    be overwritten by padding. The outputs of `Prefill` are single arguments: with a tuple, MindSpore would compile
    again for each new tuple.
    """

    def __init__(self, cache: Cache, operators: Operators, longest: int):
        super().__init__("generate/admit", longest, cache.packed, cache.routing is not None)
        self.admit = operators.admit
        self.longest = longest
        # Parameters of this graph, which is why it can be kept in the cache of compiled graphs.
        pairs = zip(cache.keys, cache.values, strict=True)
        routing = () if cache.routing is None else (cache.routing,)
        self.caches = ParameterTuple([*(part for pair in pairs for part in pair), *routing])

    def construct(self, slots, rows, *prefilled):
        return self.admit(slots, rows, self.longest, prefilled, self.caches)


class Decode(Graph):
    """Graph that draws the next tokens of each slot.

    The outputs are [B, n] token (-1 for none), behaviour and policy log-prob (see `Sampler`), 0 without a draw; and, if
    one operator draws several tokens, int32[3]: steps, draft tokens, and accepted draft tokens.
    ids: int32[B], the last token. places, angles: int32[B], its place in the cache and its position in the sequence.
    remaining: int32[B], tokens still to come, 0 in an empty slot.
    banned: int32[B], number of next tokens that must not be a stop token.
    leaders, prefixes: int32[B], the slot that holds the prompt and the prompt's positions there, if one operator draws
    several tokens; otherwise each slot holds its own prompt.
    enough: int32[3]: the number of active slots at which no further token begins, a slot's first position after the
    longest prompt, and the most steps; each draws one token of a slot, plus its draft's.
    context: int32[B, n], tokens that are taken as they are and never end a slot; -1 where a token is drawn.
    least_banned: of `banned`. The operator bans tokens that are never drawn in the place of stop tokens, and goes on
    behind these; what it draws has the probability under which it is drawn.
    histories: int32[B, h], texts for drafts (see `rollout.drafts`). uniform: [B, n]. rules, seen: see `Sampler`.
    """

    def __init__(self, decoder: Decoder, cache: Cache, sampler: Sampler):
        kinds = (decoder.operators.weights, cache.packed, decoder.records)
        super().__init__("generate/decode", decoder.positions, *kinds, sampler.rule)
        self.decoder = decoder
        self.sampler = sampler
        self.keys, self.values = cache.keys, cache.values
        self.kept = Tensor(np.zeros((1, 1, 1, 1), np.int32)) if cache.routing is None else cache.routing
        self.fused = decoder.decodes_tokens and sampler.simple
        self.bans = self.fused and sampler.bans
        self.least_banned = np.iinfo(np.int32).max if self.bans else 0
        if self.fused:
            self.layers = decoder.decode_parameters(cache.keys, cache.values)

    def construct(
        self,
        ids,
        places,
        angles,
        remaining,
        banned,
        leaders,
        prefixes,
        enough,
        context,
        histories,
        uniform,
        rules,
        seen,
    ):
        sampler = self.sampler
        if self.fused:
            slots = (ids, places, angles, remaining, banned, leaders, prefixes, enough, context, histories)
            out = self.decoder.decode_tokens(slots, uniform, rules, sampler.stop_ids, self.kept, self.layers)
            return (out[0], out[1], out[1], out[3]) if self.bans else out
        hidden = self.decoder.decode(ids, places, angles, self.keys, self.values, self.kept)
        ban = (banned > 0).astype("float32")
        token, behaviour, policy = sampler(self.decoder.decode_logits(hidden), uniform.reshape((-1,)), ban, rules, seen)
        given = context >= 0
        nothing = ops.zeros_like(context).astype("float32")
        token = ops.select(given, context, token.reshape((-1, 1)))
        behaviour = ops.select(given, nothing, behaviour.reshape((-1, 1)))
        return token, behaviour, ops.select(given, nothing, policy.reshape((-1, 1)))


class EngineGraphs:
    """Graphs of an engine over one cache.

    slots: sequences decoded at once; size: positions of a slot; max_prompt: longest prompt in tokens; stop_ids: tokens
    that end a response. The operator for several tokens needs one graph; the graph for one token of each slot draws
    with all settings that were opened so far. together: the ranks that run each graph at the same time, because experts
    are spread over them. shows: pictures come in responses. Each slot then holds its own prompt, followed by its
    response, and the graph for one token draws.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        slots: int,
        size: int,
        max_prompt: int,
        stop_ids: Sequence[int],
        shows: bool = False,
    ):
        self.vocabulary = config.vocab_size
        self.slots = slots
        self.max_prompt = max_prompt
        self.stop_ids = np.array(sorted(set(stop_ids)), np.int32)
        self.cache = Cache(
            layers=config.num_layers,
            slots=slots,
            kv_heads=decoder.kv_heads,
            size=size,
            head_dim=config.head_dim,
            dtype=decoder.operators.activations,
            packed=decoder.packs_cache,
            routing=decoder.routing if decoder.records else None,
        )
        self.prefill = Prefill(decoder)
        self.admit = Admit(self.cache, decoder.operators, max_prompt)
        self.admit_size = -(-slots // 8)
        self.admit_whole = Admit(self.cache, decoder.operators, size) if shows else None
        self.vision = config.vision
        self.decodes: dict[bool, Decode] = {}  # by use of the operator
        self.recorder = RoutingRecorder(self.cache.routing, decoder.routing, max_prompt) if decoder.records else None
        self.together = decoder.spread
        self._decoder = decoder
        self._drawn_ids = tuple(stop_ids)
        self._never_drawn = never_drawn(config)
        self._settings: list[SamplingSettings] = []  # of the graph for one token
        self._opened: dict[tuple[bytes, bool], bool] = {}

    def open(self, sampling: SamplingSettings) -> bool:
        """Open the graph that draws with these settings.

        Returns True if it is the operator for several tokens.
        """
        kind = rule_of(sampling, self.vocabulary).tobytes(), sampling.min_new_tokens > 0
        if kind not in self._opened:
            self._opened[kind] = self._build(sampling)
        return self._opened[kind]

    def _build(self, sampling: SamplingSettings) -> bool:
        sampler = self._sampler([sampling])
        operator = self._decoder.decodes_tokens and sampler.simple
        if not operator:
            self._settings.append(sampling)
            sampler = self._sampler(self._settings)
        known = self.decodes.get(operator)
        if known is None or (not operator and known.sampler.rule != sampler.rule):
            self.decodes[operator] = Decode(self._decoder, self.cache, sampler)
        return operator

    def _sampler(self, settings: Sequence[SamplingSettings]) -> Sampler:
        return Sampler(
            settings,
            self.vocabulary,
            self._drawn_ids,
            self._decoder.shards,
            self._never_drawn,
            by_token=self.admit_whole is not None,
        )

    @property
    def penalises(self) -> bool:
        """True if a graph reads which tokens a slot contains."""
        return any(graph.sampler.penalises for graph in self.decodes.values())
