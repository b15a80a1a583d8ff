"""Decoder over one set of parameters, with a GRPO step's forms.

- `Decoder.completions`: training and log-probs. The prompt is computed once per group; completion rows attend to the
  shared prompt keys and values and to themselves.
- `Decoder.prefill`, `Decoder.decode` and `Decoder.decode_tokens`: generation with a static key-value cache.

Linear weights are [out, in] as in HF and MindFormers. The parameters are passed by name (`parameters.py` has the
table), so that graphs of equal layout share the same storage; they may be one tensor-parallel rank's shards of one
pipeline stage's layers. Adapter matrices that `config` does not have are not used: `ModelConfig.base` is the same model
without its adapters. A model that sees has a vision tower (`models.vision`) on its first stage, or takes its rows. Not
supported: dropout except of adapters' inputs, sliding windows.
"""

from collections.abc import Mapping

from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.comm.graph_collectives import ExpertParallel, TensorParallel
from mindrlhf.backend.operators import Operators, dtype_named
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.allowed_tokens import masked_tokens, without
from mindrlhf.models.embedding import Embedding
from mindrlhf.models.halves import COMPLETIONS, NO_ROWS, Materials
from mindrlhf.models.inputs import (
    DROPOUT,
    INPUT_IDS,
    LENGTHS,
    NAMES,
    POSITIONS,
    PREFIX_IDS,
    PREFIX_LENGTHS,
    ROUTING,
    SEEN,
)
from mindrlhf.models.layer import Layer, side_outputs
from mindrlhf.models.linear import Norm
from mindrlhf.models.parameters import EMBEDDING, HEAD, VALUE_HEAD, adapter_rows
from mindrlhf.models.rotary import rotary_table
from mindrlhf.models.routing import RoutingForm
from mindrlhf.models.vision.batch import PatchInputs, PictureInputs, RowInputs
from mindrlhf.models.vision.image_rows import ImageRows
from mindrlhf.models.vision.positions import section_spans
from mindrlhf.models.weight import Weight


class Decoder(nn.Cell):
    """Decoder up to the final norm with the head's weight, or one stage's layers.

    operators: of a device, with the dtype of activations and caches; the parameters stay float32. max_positions: number
    of positions of the rotary table. shards: the tensor-parallel ranks that share the layers. spread: those over which
    experts are spread.
    layers: layers of this stage, all by default; `parameters` has no others. is_first, is_last: the stage's place.
    recompute: the backward pass computes each fused half of a layer again from its input.
    for_updates: adapters have dropout as in `config`; the halves are composed then. packed: weights packed for decode
    steps (`PackedWeights`), by name; the operators must be for this packing. replays: the routing of experts is an
    input of the positions. records: it is a side output of each layer with experts, and decode steps write it to a
    cache. image_rows: rows of a tower outside of the graphs, in its place.

    inputs: names of a batch's arrays that the graphs take, in order (`models.inputs`). pictures: builder of those of
    pictures; None for text alone. sides: side outputs of this stage's layers, in order; model_sides: of all stages'
    layers. never_drawn: see `models.allowed_tokens`. blocks: all of them, of the last block of a model whose weights
    are gathered block by block (`training.block_passes`).
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
        replays: bool = False,
        records: bool = False,
        spread: ExpertParallel | None = None,
        image_rows: RowInputs | None = None,
    ):
        super().__init__(auto_prefix=False)
        shards = shards or TensorParallel()
        self.spread = spread or ExpertParallel()
        numbers = range(config.num_layers) if layers is None else layers
        self.is_first = is_first
        self.is_last = is_last
        self._hold_device(operators, shards)
        dropout = config.dropout if for_updates else 0.0
        self.drops = dropout > 0
        self._hold_arrays(config, numbers, replays, records, image_rows)
        adapters = adapter_rows(config)
        if self.is_first:
            self.embed = Embedding(parameters.get(EMBEDDING), config.vocab_size, config.tie_word_embeddings, shards)
            self.images = ImageRows(config.vision, parameters, operators, adapters, shards, image_rows is None)
        if self.is_last:
            self._hold_head(config, parameters, packed or {})
        of_halves = operators.composed if dropout else operators
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
                spread=self.spread,
                replays=replays,
                records=records,
            )
            for i in numbers
        ]
        self._hold([Layer(one) for one in materials], of_halves)
        self.positions = max_positions
        cos, sin = rotary_table(config, max_positions)
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        choice = (("chosen", config.num_experts_per_tok), ("normalises", config.norm_topk_prob), ("records", records))
        self.numbers = (("scale", config.head_dim**-0.5), ("epsilon", config.rms_norm_eps), *choice)
        self._hold_drawing(operators)

    def _hold_arrays(
        self, config: ModelConfig, numbers: range, replays: bool, records: bool, image_rows: RowInputs | None
    ) -> None:
        """Set the names of inputs and side outputs, their forms, and facts about both."""
        self.blocks: tuple = ()
        self.sees = config.vision is not None
        self.pictures: PictureInputs | None = (image_rows or PatchInputs(config.vision)) if self.sees else None
        self.sections = section_spans(config.vision.sections) if self.sees else ()
        self.never_drawn = masked_tokens(config, *self.shards.share(config.vocab_size))
        drops = (DROPOUT,) if self.drops else ()
        self.row_inputs = (*drops, *((ROUTING,) if replays else ()), *(SEEN if self.sees else ()))
        self.shared_inputs = len(NAMES)
        self.first_image_input = len(NAMES) + len(self.row_inputs)
        self.inputs = (*NAMES, *self.row_inputs, *(self.pictures.names if self.sees else ()))
        self.sides = side_outputs(config, numbers, records)
        self.model_sides = side_outputs(config, range(config.num_layers), records)
        self.replays = replays
        self.records = records
        self.routing = RoutingForm.of(config) if replays or records else None
        self.has_experts = tuple(i in config.expert_layers for i in numbers)
        self.hidden_size = config.hidden_size
        self.head_trains = config.text_trains
        self.chosen = config.num_experts_per_tok
        self.experts = config.num_experts

    def _hold_drawing(self, operators: Operators) -> None:
        """Set the operator that draws several tokens, which reads the whole model."""
        alone = self.shards.size == self.spread.size == 1
        self.decodes_tokens = self.fused and alone and self.is_first and self.last_layer is not None
        self.decode_fused = operators.decode_tokens if self.decodes_tokens else None

    def _hold_device(self, operators: Operators, shards: TensorParallel) -> None:
        """Set the operators, and this rank's place among the tensor-parallel ranks."""
        self.operators = operators
        self.linear = operators.linear
        self.group_view = operators.group_view
        self.decode_view = operators.decode_view
        self.dtype = dtype_named(operators.activations)
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
        rows = inputs[self.shared_inputs : self.first_image_input]
        spans = prefix_lengths if split[2] == 0 else ops.concat((prefix_lengths, lengths))
        view = self.group_view(prefix_lengths, lengths, split, self.kv_heads, self.heads) if self.composed else ()
        if self.sees:  # a table of these positions alone
            cos, sin = self._sectioned(self.cos, inputs), self._sectioned(self.sin, inputs)
            shape = (1, -1, 1, cos.shape[1])
            angles = ops.arange(0, cos.shape[0]).astype("int32")
            return cos.reshape(shape), sin.reshape(shape), view, cos, sin, angles, (), spans, rows, ()
        cos, sin = self._angles(inputs[POSITIONS])
        return cos, sin, view, self.cos, self.sin, inputs[POSITIONS], (), spans, rows, ()

    def _sectioned(self, table, inputs):
        """Look up angles [positions, D] at positions of three numbers: [T, D]."""
        lines = self.first_image_input - len(SEEN)
        axes = (inputs[POSITIONS], inputs[lines], inputs[lines + 1])
        parts = ()
        for axis, start, end in self.sections:
            parts += (ops.gather(table, axes[axis], 0)[:, start:end],)
        return ops.stop_gradient(ops.concat(parts + parts, -1))

    def _with_images(self, x, inputs):
        """Put the tower's rows in place of the embeddings [rows, hidden] of images' tokens."""
        first = self.first_image_input
        return self.images(x, inputs[first - 1], inputs[first:]) if self.sees else x

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
        ids = ops.concat((inputs[PREFIX_IDS].reshape((-1,)), inputs[INPUT_IDS].reshape((-1,))))
        return self._with_images(self._embed(ids), inputs)

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

    def prefill(self, prefix_ids, positions, *further):
        """Compute keys and values of prompts int32[N, P] with `positions` int32[N * P].

        further: the arrays of `inputs` after `models.inputs.NAMES`.

        Returns each layer's key and value [N, K, P, D], one after another; and if the routing is recorded, int32[N,
        layers with experts, P, chosen], without experts in the last layer, which prompts do not pass.
        """
        n, p = prefix_ids.shape
        split = (n, p, 0, 0)
        lengths = ops.full((n,), p).astype("int32")
        inputs = (prefix_ids, lengths, (), lengths, positions, *further)
        given = self.layer_inputs(inputs, split)
        x = self._with_images(self._embed(prefix_ids.reshape((-1,))), inputs)
        cache = ()
        routing = ()
        for i, layer in enumerate(self.inner_layers):
            x, key, value, sides = layer(x, given, split)
            cache += (self._by_head(key, n), self._by_head(value, n))
            if self.records and self.has_experts[i]:
                routing += (sides[-1].reshape((n, 1, p, self.chosen)),)
        _, key, value, _ = self.last_layer(x, given, split, NO_ROWS)
        cache += (self._by_head(key, n), self._by_head(value, n))
        if self.records and self.has_experts[-1]:
            routing += (ops.full((n, 1, p, self.chosen), self.experts).astype("int32"),)
        return (*cache, ops.concat(routing, 1)) if self.records else cache

    def _by_head(self, rows, n):
        """Split heads: [N * P, K * D] -> [N, K, P, D]."""
        return rows.reshape((n, rows.shape[0] // n, self.kv_heads, -1)).transpose((0, 2, 1, 3))

    def decode(self, ids, places, angles, keys, values, kept=()):
        """Run one token of each slot, and write its key and value in place.

        ids: int32[B]; places: int32[B], where its key and value go in the cache; angles: int32[B], its position in the
        sequence; keys, values: per layer a Parameter [B, K, S, D]; kept: the routing's cache, if it is recorded.
        Returns final hidden states [B, hidden].
        """
        given = self.decode_inputs(places, angles, keys, kept)
        x = self._embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer.decode(x, given, keys[i], values[i])
        return self._final(x)

    def decode_inputs(self, places, angles, keys, kept=()):
        """Prepare the inputs of all layers at once (`models.inputs`), for new positions."""
        _, heads, size, _ = keys[0].shape
        cos, sin = self._angles(angles)
        view = self.decode_view(places, heads, size) if self.composed else ()
        return cos, sin, view, self.cos, self.sin, angles, places, (), (), kept

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

    def decode_tokens(self, slots, uniform, rules, stop_ids, kept, layers):
        """Draw several tokens of each slot with the fused operator.

        The operator of that name describes the arguments. Needs `decodes_tokens`. layers: from `decode_parameters`.
        """
        table = self.embed.weight.parameter
        norm = self.final_norm.weight.parameter
        head = self.head.decoded
        angles = (self.cos, self.sin)
        given = self.decode_weights
        return self.decode_fused(
            slots, uniform, rules, stop_ids, table, angles, norm, head, kept, layers, given, self.numbers
        )

    def logits(self, hidden):
        """Compute logits: [T, hidden] -> float32[T, vocab], or this rank's part."""
        hidden, head = self.with_head(hidden)
        return self.linear(hidden, head).astype("float32")

    def decode_logits(self, hidden):
        """Compute logits of a decode step, without tokens that are never drawn."""
        if self.decode_head is None:
            return without(self.logits(hidden), self.never_drawn)
        head = self.head.decoded
        own = head[self.head_first : self.head_end] if self.decoded_head_is_whole else head
        return without(self.decode_head(hidden, own), self.never_drawn)
