"""Decoder over one set of parameters, with a GRPO step's forms.

- `Decoder.completions`: training and log-probs. The prompt is computed once per group; completion rows attend to the
  shared prompt keys and values and to themselves.
- `Decoder.prefill`, `Decoder.decode` and `Decoder.decode_tokens`: generation with a static key-value cache.

Linear weights are [out, in] as in HF and MindFormers. The parameters are passed by name (`parameters.py` has the
table), so that graphs of equal layout share the same storage; they may be one tensor-parallel rank's shards of one
pipeline stage's layers. Adapter matrices that `config` does not have are not used: `ModelConfig.base` is the same model
without its adapters. Not supported: dropout except of adapters' inputs, sliding windows.
"""

from collections.abc import Mapping

from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.operators import Operators
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.halves import COMPLETIONS, NO_ROWS, Materials, Norm
from mindrlhf.models.inputs import DROPOUT, INPUT_IDS, LENGTHS, NAMES, POSITIONS, PREFIX_IDS, PREFIX_LENGTHS
from mindrlhf.models.layer import Layer, ScaleGradient, side_outputs
from mindrlhf.models.parameters import EMBEDDING, HEAD, VALUE_HEAD, adapter_rows
from mindrlhf.models.rotary import rotary_table
from mindrlhf.models.weight import Weight


class Embedding(nn.Cell):
    """Lookup of token ids int32[T] -> [T, hidden], outside of the parallel regions.

    weight: [vocab, hidden], or [vocab / size, hidden] cut by vocabulary. tied: the head uses the same weight.
    """

    def __init__(self, weight: Parameter, vocab_size: int, tied: bool, shards: TensorParallel):
        super().__init__(auto_prefix=False)
        self.weight = Weight(weight)
        self.cut = weight.shape[0] != vocab_size
        self.first, self.end = shards.share(vocab_size)
        self.rank = shards.rank
        self.size = shards.size
        self.sequence = shards.sequence
        self.leave = shards.leave
        # Every rank looks up the same rows of a whole table, but computes the head's gradient for its own rows only.
        # Both gradients are summed over the ranks together, so the lookup's gradient is divided by their number.
        self.gradient = ScaleGradient(1.0 / shards.size) if tied and shards.size > 1 else nn.Identity()

    def construct(self, ids):
        if self.cut:
            inside = ops.logical_and(ids >= self.first, ids < self.end)
            rows = self.weight.rows(ops.select(inside, ids - self.first, ops.zeros_like(ids)))
            return self.leave(rows * expand(inside.astype(rows.dtype).reshape((-1, 1)), rows.shape))
        if self.sequence:
            share = ids.shape[0] // self.size
            return self.weight.rows(ids[self.rank * share : (self.rank + 1) * share])
        return self.gradient(self.weight.rows(ids))


class Decoder(nn.Cell):
    """Decoder up to the final norm with the head's weight, or one stage's layers.

    operators: of a device, with the dtype of activations and caches; the parameters stay float32. max_positions: number
    of positions of the rotary table. shards: the tensor-parallel ranks that share the layers.
    layers: layers of this stage, all by default; `parameters` has no others. is_first, is_last: the stage's place.
    recompute: the backward pass computes each fused half of a layer again from its input.
    for_updates: adapters have dropout as in `config`; the halves are composed then. packed: weights packed for decode
    steps (`PackedWeights`), by name; the operators must be for this packing.

    inputs: names of a batch's arrays that the graphs take, in order (`models.inputs`). sides: side outputs of this
    stage's layers, in order; model_sides: of all stages' layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: dict[str, Parameter],
        operators: Operators,
        max_positions: int,
        shards: TensorParallel | None = None,
        layers: range | None = None,
        is_first: bool = True,
        is_last: bool = True,
        recompute: bool = False,
        for_updates: bool = False,
        packed: Mapping[str, Parameter] | None = None,
    ):
        super().__init__(auto_prefix=False)
        shards = shards or TensorParallel()
        numbers = range(config.num_layers) if layers is None else layers
        self.is_first = is_first
        self.is_last = is_last
        self._hold_device(operators, shards)
        dropout = config.dropout if for_updates else 0.0
        self.drops = dropout > 0
        self.row_inputs = (DROPOUT,) if self.drops else ()
        self.inputs = (*NAMES, *self.row_inputs)
        self.shared_inputs = len(NAMES)
        self.sides = side_outputs(config, numbers)
        self.model_sides = side_outputs(config, range(config.num_layers))
        self.hidden_size = config.hidden_size
        self.head_trains = config.adapter is None
        if self.is_first:
            self.embed = Embedding(parameters.get(EMBEDDING), config.vocab_size, config.tie_word_embeddings, shards)
        if self.is_last:
            self._hold_head(config, parameters, packed or {})
        of_halves = operators.composed if dropout else operators
        adapters = adapter_rows(config)
        materials = [
            Materials(
                layer=i,
                config=config,
                parameters=parameters,
                operators=of_halves,
                shards=shards,
                adapters=adapters,
                recompute=recompute,
                dropout=dropout,
                packed=packed or {},
            )
            for i in numbers
        ]
        self._hold([Layer(one) for one in materials], of_halves)
        self.positions = max_positions
        cos, sin = rotary_table(config, max_positions)
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        experts = (("chosen", config.num_experts_per_tok), ("normalises", config.norm_topk_prob))
        self.numbers = (("scale", config.head_dim**-0.5), ("epsilon", config.rms_norm_eps), *experts)
        # The operator that draws several tokens reads the whole model.
        self.decodes_tokens = self.fused and shards.size == 1 and self.is_first and self.last_layer is not None
        self.decode_fused = operators.decode_tokens if self.decodes_tokens else None

    def _hold_device(self, operators: Operators, shards: TensorParallel) -> None:
        """Set the operators, and this rank's place among the tensor-parallel ranks."""
        self.operators = operators
        self.linear = operators.linear
        self.group_view = operators.group_view
        self.decode_view = operators.decode_view
        self.dtype = operators.activations
        self.shards = shards
        self.enter = shards.enter
        self.sequence = shards.sequence
        self.shard = shards.rank
        self.shard_count = shards.size
        self.row_shares = shards.size if shards.sequence else 1

    def _hold_head(
        self, config: ModelConfig, parameters: Mapping[str, Parameter], packed: Mapping[str, Parameter]
    ) -> None:
        """Set the last stage's norm and head."""
        operators = self.operators
        self.final_norm = Norm(parameters["model.norm_out.weight"], config.rms_norm_eps, operators.rms_norm)
        name = EMBEDDING if config.tie_word_embeddings else VALUE_HEAD if config.value_head else HEAD
        self.head = Weight(parameters[name], packed.get(name))
        self.head_first, self.head_end = self.shards.share(config.vocab_size)
        self.head_is_whole = self.shards.size > 1 and self.head.shape[0] == config.vocab_size
        self.decoded_head_is_whole = self.head_is_whole and not self.head.is_packed
        self.decode_head = operators.decode_logits if operators.fused else None

    def _hold(self, made: list[Layer], operators: Operators) -> None:
        """Set this stage's layers, and the facts that follow from their halves."""
        halves = [half for layer in made for half in (layer.attention, layer.feed_forward)]
        self.composed = not all(half.fused for half in halves)
        self.fused = operators.fused and not self.composed
        self.fuses = self.fused or any(half.fused for half in halves)
        self.decode_weights = tuple(half.decode_present for half in halves)
        self.packs_cache = operators.packs_cache and all(layer.attention.fused for layer in made)
        self.layers = nn.CellList(made, auto_prefix=False)
        # In the last layer, prompts need only keys and values.
        ends_early = self.is_last and bool(made)
        self.inner_layers = nn.CellList(made[:-1] if ends_early else made, auto_prefix=False)
        self.last_layer = made[-1] if ends_early else None
        self.kv_heads = made[0].attention.kv_heads if made else 1
        self.heads = made[0].attention.heads if made else 1

    def _angles(self, positions):
        """Look up cos and sin [1, T, 1, D] at positions int32[T].

        They are () if all halves are fused.
        """
        if not self.composed:
            return (), ()
        shape = (1, -1, 1, self.cos.shape[1])
        return ops.gather(self.cos, positions, 0).reshape(shape), ops.gather(self.sin, positions, 0).reshape(shape)

    def layer_inputs(self, inputs, split):
        """Prepare the inputs of all layers at once (`models.inputs`).

        inputs: a batch's arrays, in the order of `self.inputs`; split: (N, P, G, R).
        """
        prefix_lengths = inputs[PREFIX_LENGTHS]
        lengths = inputs[LENGTHS]
        rows = inputs[self.shared_inputs :]
        cos, sin = self._angles(inputs[POSITIONS])
        spans = prefix_lengths if split[2] == 0 else ops.concat((prefix_lengths, lengths))
        view = self.group_view(prefix_lengths, lengths, split, self.kv_heads, self.heads) if self.composed else ()
        return cos, sin, view, self.cos, self.sin, inputs[POSITIONS], (), spans, rows

    def _embed(self, ids):
        """Embed int32[T] -> [rows, hidden]."""
        return self.embed(ids).astype(self.dtype)

    def _final(self, x):
        """Normalise rows to final hidden states, inside the head's parallel region.

        [rows, hidden] -> [T, hidden].
        """
        return self.enter(self.final_norm(x))

    def _rows_from(self, x, start):
        """Rows from token `start` on (this rank's slice under sequence parallelism)."""
        if not self.sequence:
            return x[start:]
        rows = self.enter(x)[start:]
        share = rows.shape[0] // self.shard_count
        return rows[self.shard * share : (self.shard + 1) * share]

    def with_head(self, hidden):
        """Return final hidden states, and the head's weight to apply to them.

        The weight is [vocab, hidden], or this rank's rows of it.
        """
        head, hidden = self.head(hidden)
        return hidden, head[self.head_first : self.head_end] if self.head_is_whole else head

    def with_fused_head(self, hidden):
        """Return final hidden states, the head's weight, and `Weight.collected`."""
        return hidden, self.head.parameter, self.head.collected

    def completions(self, inputs):
        """Run prompts and completions, with each prompt computed once.

        `types.TrainBatch` explains the split of prompt and completion. inputs: a batch's arrays, in the order of
        `self.inputs`.

        Returns final hidden states [N*G*R, hidden] at the completion positions, undefined past each length.
        """
        return self.stage(inputs, self.tokens(inputs))[0]

    def tokens(self, inputs):
        """Embed prompts and completions for the first stage: [rows, hidden]."""
        return self._embed(ops.concat((inputs[PREFIX_IDS].reshape((-1,)), inputs[INPUT_IDS].reshape((-1,)))))

    def stage(self, inputs, x):
        """Run this stage's layers on the previous stage's output x [rows, hidden].

        inputs: a batch's arrays, in the order of `self.inputs`.

        Returns [rows, hidden], or from the last stage the result of `completions`; and the side outputs.
        """
        n, p = inputs[PREFIX_IDS].shape
        rows, r = inputs[INPUT_IDS].shape
        split = (n, p, rows // n, r)
        given = self.layer_inputs(inputs, split)
        sides = ()
        for layer in self.inner_layers:
            x, _, _, own = layer(x, given, split)
            sides += own
        if not self.is_last:
            return x, sides
        if self.last_layer is None:
            return self._final(self._rows_from(x, n * p)), sides
        x, _, _, own = self.last_layer(x, given, split, COMPLETIONS)
        return self._final(x), sides + own

    def prefill(self, prefix_ids, positions):
        """Compute keys and values of prompts int32[N, P] with `positions` int32[N * P].

        Returns, per layer, (key, value), each [N, K, P, D].
        """
        n, p = prefix_ids.shape
        split = (n, p, 0, 0)
        lengths = ops.full((n,), p).astype("int32")
        inputs = (prefix_ids, lengths, (), lengths, positions)
        given = self.layer_inputs(inputs, split)
        x = self._embed(prefix_ids.reshape((-1,)))
        cache = ()
        for layer in self.inner_layers:
            x, key, value, _ = layer(x, given, split)
            cache += ((self._by_head(key, n), self._by_head(value, n)),)
        _, key, value, _ = self.last_layer(x, given, split, NO_ROWS)
        return (*cache, (self._by_head(key, n), self._by_head(value, n)))

    def _by_head(self, rows, n):
        """Split heads: [N * P, K * D] -> [N, K, P, D]."""
        return rows.reshape((n, rows.shape[0] // n, self.kv_heads, -1)).transpose((0, 2, 1, 3))

    def decode(self, ids, places, angles, keys, values):
        """Run one token of each slot, and write its key and value in place.

        ids: int32[B]; places: int32[B], where its key and value go in the cache; angles: int32[B], its position in the
        sequence; keys, values: per layer a Parameter [B, K, S, D].
        Returns final hidden states [B, hidden].
        """
        given = self.decode_inputs(places, angles, keys)
        x = self._embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer.decode(x, given, keys[i], values[i])
        return self._final(x)

    def decode_inputs(self, places, angles, keys):
        """Prepare the inputs of all layers at once (`models.inputs`), for new positions."""
        _, heads, size, _ = keys[0].shape
        cos, sin = self._angles(angles)
        view = self.decode_view(places, heads, size) if self.composed else ()
        return cos, sin, view, self.cos, self.sin, angles, places, (), ()

    def decode_parameters(self, keys, values) -> tuple:
        """List the layers' arrays for `decode_tokens`, outside of the graph.

        keys, values: as in `decode`.
        """
        parts = zip(self.layers, keys, values, strict=True)
        return tuple(
            array
            for layer, *cache in parts
            for array in (*layer.attention.decoded, *cache, *layer.feed_forward.decoded)
        )

    def decode_tokens(self, slots, uniform, rules, stop_ids, layers):
        """Draw several tokens of each slot with the fused operator.

        The operator of that name describes the arguments. Needs `decodes_tokens`. layers: from `decode_parameters`.
        """
        table = self.embed.weight.parameter
        norm = self.final_norm.weight.parameter
        head = self.head.decoded
        angles = (self.cos, self.sin)
        given = self.decode_weights
        return self.decode_fused(
            slots, uniform, rules, stop_ids, table, angles, norm, head, layers, given, self.numbers
        )

    def logits(self, hidden):
        """Compute logits: [T, hidden] -> float32[T, vocab], or this rank's part."""
        hidden, head = self.with_head(hidden)
        return self.linear(hidden, head).astype("float32")

    def decode_logits(self, hidden):
        """Compute logits of a decode step, in the shape of `logits`."""
        if self.decode_head is None:
            return self.logits(hidden)
        head = self.head.decoded
        return self.decode_head(hidden, head[self.head_first : self.head_end] if self.decoded_head_is_whole else head)
