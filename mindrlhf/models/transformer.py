"""One Qwen2 / Qwen2.5 / Qwen3 decoder, in the three forms that a GRPO step needs, over one set of parameters.

- `Decoder.completions`: training and log-probs. The prompt is computed once per group; completion rows attend to the
  shared prompt keys and values and to themselves.
- `Decoder.prefill` and `Decoder.decode`: generation with a static key-value cache.
- `Decoder.plain`: every row a whole sequence, nothing shared: the oracle of the other two.

Linear weights are [out, in] as in HF and MindFormers. The parameters are handed in by name (`parameters.py` has the
table), so that graphs of equal layout share the same storage; they may be one tensor-parallel rank's shards of the
layers of one pipeline stage. Not here: dropout, sliding windows, scaled rotary embeddings, mixture of experts.

Column-parallel projections (query, key, value, gate, up) and the row-parallel ones behind them form parallel regions
(Shoeybi et al. 2019, arXiv:1909.08053, section 3); `TensorParallel.enter` and `leave` stand at their ends.
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import VALUE_HEAD
from mindrlhf.models.weight import Weight
from mindrlhf.parallel.tensor_parallel import TensorParallel


def rotary_table(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32[positions, head_dim], of position * theta^(-2i/d), each frequency written twice.

    Computed in float64 (Su et al. 2021, section 3.4.2).
    """
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.arange(positions)[:, None] * np.concatenate([frequencies, frequencies])[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Linear(nn.Cell):
    """x [T, in] -> [T, out] with weight [out, in] and an optional bias [out], in the dtype of x."""

    def __init__(self, weight: Parameter, bias: Parameter | None, kernels):
        super().__init__(auto_prefix=False)
        self.weight = Weight(weight)
        self.has_bias = bias is not None
        if self.has_bias:
            self.bias = Weight(bias)
        self.linear, self.linear_bias = kernels.linear, kernels.linear_bias

    def construct(self, x):
        weight, x = self.weight(x)
        if not self.has_bias:
            return self.linear(x, weight)
        bias, x = self.bias(x)
        return self.linear_bias(x, weight, bias)


class Norm(nn.Cell):
    """RMSNorm over the last axis, with a weight of its size."""

    def __init__(self, weight: Parameter, eps: float, kernels):
        super().__init__(auto_prefix=False)
        self.weight, self.eps, self.rms_norm = Weight(weight), eps, kernels.rms_norm

    def construct(self, x):
        weight, x = self.weight(x)
        return self.rms_norm(x, weight, self.eps)


class ScaleGradient(nn.Cell):
    """The identity, whose gradient is multiplied by `factor`."""

    def __init__(self, factor: float):
        super().__init__(auto_prefix=False)
        self.factor = factor

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (dout * self.factor,)


class Embedding(nn.Cell):
    """int32[T] -> [T, hidden] outside of the parallel regions, from the whole table or this rank's part of it.

    weight: [vocab, hidden], or [vocab / size, hidden] cut by vocabulary. tied: it is the head's weight too.
    """

    def __init__(self, weight: Parameter, vocab_size: int, tied: bool, shards: TensorParallel):
        super().__init__(auto_prefix=False)
        self.weight = Weight(weight)
        self.cut = weight.shape[0] != vocab_size
        self.first, self.end = shards.share(vocab_size)
        self.rank, self.size, self.sequence = shards.rank, shards.size, shards.sequence
        self.leave = shards.leave
        # Every rank looks up the same rows of a whole table, where the head's gradient is of this rank's rows alone:
        # to be summed over the ranks together with it, each has to be a share.
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


class Block(nn.Cell):
    """One decoder layer over flat tokens [T, hidden]; attention itself is called by `Decoder`.

    The rows outside of the parallel regions may be this rank's share of the T (`TensorParallel.sequence`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        parameters: dict[str, Parameter],
        kernels,
        shards: TensorParallel,
        recompute: bool = False,
    ):
        super().__init__(auto_prefix=False)
        prefix = f"model.layers.{layer}."

        def linear(name):
            return Linear(parameters[f"{prefix}{name}.weight"], parameters.get(f"{prefix}{name}.bias"), kernels)

        def norm(name):
            return Norm(parameters[f"{prefix}{name}.weight"], config.rms_norm_eps, kernels)

        self.attention_norm, self.ffn_norm = norm("attention_norm"), norm("ffn_norm")
        self.wq, self.wk, self.wv, self.wo = (linear(f"attention.{name}") for name in ("wq", "wk", "wv", "wo"))
        self.w1, self.w2, self.w3 = (linear(f"feed_forward.{name}") for name in ("w1", "w2", "w3"))
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = norm("attention.q_norm"), norm("attention.k_norm")
        self.head_dim = config.head_dim
        self.heads = self.wq.weight.shape[0] // config.head_dim
        self.kv_heads = self.wk.weight.shape[0] // config.head_dim
        self.rotary, self.swiglu = kernels.rotary, kernels.swiglu
        self.enter, self.leave = shards.enter, shards.leave
        self.eps = config.rms_norm_eps
        self.has_bias = self.wq.has_bias
        others = (self.wk.has_bias, self.wv.has_bias)
        no_more = not any(linear.has_bias for linear in (self.wo, self.w1, self.w2, self.w3))
        self.fused = (
            shards.size == 1 and others == (self.has_bias,) * 2 and no_more and hasattr(kernels, "decode_layer")
        )
        if self.fused:
            self.decode_layer, self.fused_layer = kernels.decode_layer, kernels.layer
        self.whole = self.fused and not config.qk_norm
        self.recompute = recompute
        self.decode_attention = kernels.decode_attention

    def decode(self, x, cos, sin, view, keys, values, scale):
        """One new position of each slot: [B, hidden] -> [B, hidden]; its key and value go into the caches in place."""
        if self.fused:
            return self.decode_layer(
                x,
                self.decode_weights(),
                cos,
                sin,
                view,
                keys,
                values,
                scale,
                self.eps,
                self.has_bias,
                self.qk_norm,
            )
        h = self.normed(x)
        q = self.query(h, cos, sin)
        k, v = self.key_value(h, cos, sin)
        return self.finish(x, self.decode_attention(q, k, v, keys, values, view, scale))

    def decode_weights(self):
        """What fused operators take: the weights of the attention norm, of wq, wk, wv, their biases, of the norms of
        query and key, wo, the feed-forward norm, w1, w3, w2; in place of what the model has not any other.
        """
        norm = self.attention_norm.weight.parameter
        weights = (norm, self.wq.weight.parameter, self.wk.weight.parameter, self.wv.weight.parameter)
        if self.has_bias:
            weights += (self.wq.bias.parameter, self.wk.bias.parameter, self.wv.bias.parameter)
        else:
            weights += (norm, norm, norm)
        weights += (self.q_norm.weight.parameter, self.k_norm.weight.parameter) if self.qk_norm else (norm, norm)
        weights += (self.wo.weight.parameter, self.ffn_norm.weight.parameter)
        return (*weights, self.w1.weight.parameter, self.w3.weight.parameter, self.w2.weight.parameter)

    def layer(self, x, cos, sin, asking, view, split, scale):
        """The layer over all rows with the fused operator of that name, which says what is what; only if `whole`. Its
        gradients are collected (`models.weight`), and there are no others.
        """
        _, p, g, r = split
        dims = (p, g, r, self.kv_heads, self.head_dim, 1 if asking.shape[1] == cos.shape[1] else 0)
        weights = self.decode_weights()
        weights = weights[:7] + weights[9:]
        numbers = (scale, self.eps, self.has_bias)
        if not self.wq.weight.collects:
            return self.fused_layer(x, weights, cos, sin, asking, view, dims, numbers)
        norm = self.attention_norm.weight.buffer
        buffers = (norm, self.wq.weight.buffer, self.wk.weight.buffer, self.wv.weight.buffer)
        if self.has_bias:
            buffers += (self.wq.bias.buffer, self.wk.bias.buffer, self.wv.bias.buffer)
        else:
            buffers += (norm, norm, norm)
        buffers += (self.wo.weight.buffer, self.ffn_norm.weight.buffer)
        buffers += (self.w1.weight.buffer, self.w3.weight.buffer, self.w2.weight.buffer)
        collected = (buffers, self.wq.weight.trigger)
        return self.fused_layer(x, weights, cos, sin, asking, view, dims, numbers, collected, self.recompute)

    def normed(self, x):
        """The layer's attention input [T, hidden] for x [rows, hidden]."""
        return self.enter(self.attention_norm(x))

    def query(self, h, cos, sin):
        """[T, hidden] -> [T, heads, D], rotated; cos and sin are [1, T, 1, D]."""
        q = self.wq(h).reshape((1, -1, self.heads, self.head_dim))
        if self.qk_norm:
            q = self.q_norm(q)
        return self.rotary(q, cos, sin).reshape((-1, self.heads, self.head_dim))

    def key_value(self, h, cos, sin):
        """[T, hidden] -> key [T, K, D], rotated, and value [T, K, D]."""
        k = self.wk(h).reshape((1, -1, self.kv_heads, self.head_dim))
        if self.qk_norm:
            k = self.k_norm(k)
        k = self.rotary(k, cos, sin)
        shape = (-1, self.kv_heads, self.head_dim)
        return k.reshape(shape), self.wv(h).reshape(shape)

    def finish(self, x, attended):
        """Output projection, residual, feed-forward, residual; x is [rows, hidden], attended [T, heads * D]."""
        x = x + self.leave(self.wo(attended))
        h = self.enter(self.ffn_norm(x))
        return x + self.leave(self.w2(self.swiglu(self.w1(h), self.w3(h))))


class Decoder(nn.Cell):
    """The decoder up to the final norm, and the head's weight; or the layers of one pipeline stage.

    kernels: a module of `backend`. max_positions: how many positions the rotary table covers. compute_dtype: of
    activations and caches; the parameters stay float32. shards: the tensor-parallel ranks that share the layers.
    layers: those of this stage, all by default; `parameters` has no others. is_first, is_last: which stage that is.
    recompute: whether going back computes layers again that are one operator, from their inputs; `recomputes` says
    whether all of them do.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: dict[str, Parameter],
        kernels,
        max_positions: int,
        compute_dtype: str = "float32",
        shards: TensorParallel | None = None,
        layers: range | None = None,
        is_first: bool = True,
        is_last: bool = True,
        recompute: bool = False,
    ):
        super().__init__(auto_prefix=False)
        shards = shards or TensorParallel()
        layers = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = is_first, is_last
        self.shards = shards
        self.kernels = kernels
        self.linear = kernels.linear
        self.group_view, self.group_attention = kernels.group_view, kernels.group_attention
        self.decode_view = kernels.decode_view
        self.hidden_size, self.row_shares = config.hidden_size, shards.size if shards.sequence else 1
        tied = config.tie_word_embeddings
        table = parameters.get("model.tok_embeddings.embedding_weight")
        if self.is_first:
            self.embed = Embedding(table, config.vocab_size, tied, shards)
        if self.is_last:
            self.final_norm = Norm(parameters["model.norm_out.weight"], config.rms_norm_eps, kernels)
            self.head = Weight(table if tied else parameters[VALUE_HEAD if config.value_head else "lm_head.weight"])
            self.head_first, self.head_end = shards.share(config.vocab_size)
            self.head_is_whole = shards.size > 1 and self.head.shape[0] == config.vocab_size
        blocks = [Block(config, i, parameters, kernels, shards, recompute) for i in layers]
        self.recomputes = recompute and all(block.whole for block in blocks)
        self.blocks = nn.CellList(blocks, auto_prefix=False)
        # Of the last layer's prompt only keys and values are needed.
        ends_early = self.is_last and bool(blocks)
        self.inner_blocks = nn.CellList(blocks[:-1] if ends_early else blocks, auto_prefix=False)
        self.last_block = blocks[-1] if ends_early else None
        self.kv_heads = blocks[0].kv_heads if blocks else 1
        self.heads = blocks[0].heads if blocks else 1
        cos, sin = rotary_table(config, max_positions)
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        self.dtype = compute_dtype
        self.scale = config.head_dim**-0.5
        self.enter = shards.enter
        self.decodes_tokens = bool(blocks) and blocks[0].fused and self.is_first and self.is_last
        self.numbers = (self.scale, config.rms_norm_eps, bool(blocks) and blocks[0].has_bias, config.qk_norm)
        if self.decodes_tokens:
            self.fused_tokens = kernels.decode_tokens
        self.sequence, self.shard, self.shard_count = shards.sequence, shards.rank, shards.size

    def _angles(self, positions):
        """cos and sin [1, T, 1, D] at positions int32[T]."""
        shape = (1, -1, 1, self.cos.shape[1])
        return ops.gather(self.cos, positions, 0).reshape(shape), ops.gather(self.sin, positions, 0).reshape(shape)

    def _embed(self, ids):
        """int32[T] -> [rows, hidden]."""
        return self.embed(ids).astype(self.dtype)

    def _final(self, x):
        """[rows, hidden] -> final hidden states [T, hidden], inside the head's parallel region."""
        return self.enter(self.final_norm(x))

    def _rows_from(self, x, start):
        """Of the rows of all T tokens, those of tokens start.. (this rank's share of them)."""
        if not self.sequence:
            return x[start:]
        rows = self.enter(x)[start:]
        share = rows.shape[0] // self.shard_count
        return rows[self.shard * share : (self.shard + 1) * share]

    def with_head(self, hidden):
        """Final hidden states, and the head's weight to read them with: [vocab, hidden], or this rank's rows of it."""
        head, hidden = self.head(hidden)
        return hidden, head[self.head_first : self.head_end] if self.head_is_whole else head

    def _prompts_view(self, n, p):
        """Who sees whom among N sequences of P positions, each by itself; and how they lie."""
        split = (n, p, 0, 0)
        lengths = ops.full((n,), p).astype("int32")
        return self.group_view(lengths, lengths, split, self.kv_heads, self.heads), split

    def _attend_and_finish(self, block, x, cos, sin, view, split):
        """One layer over all rows, operator by operator; also its keys and values."""
        h = block.normed(x)
        q = block.query(h, cos, sin)
        k, v = block.key_value(h, cos, sin)
        return block.finish(x, self.group_attention(q, k, v, view, split, self.scale)), k, v

    def _run(self, block, x, cos, sin, view, split):
        """The same, in one operator where there is one."""
        if block.whole:
            out = block.layer(x, cos, sin, cos, view, split, self.scale)
            return out[0], out[2], out[3]
        return self._attend_and_finish(block, x, cos, sin, view, split)

    def plain(self, ids):
        """ids int32[B, S], right-padded -> final hidden states [B*S, hidden]."""
        b, s = ids.shape
        cos, sin = self._angles(ops.tile(ops.arange(0, s), (b,)))
        view, split = self._prompts_view(b, s)
        x = self._embed(ids.reshape((-1,)))
        for block in self.blocks:
            x, _, _ = self._attend_and_finish(block, x, cos, sin, view, split)
        return self._final(x)

    def completions(self, prefix_ids, prefix_lengths, input_ids, lengths):
        """Shared-prompt forward (see `types.TrainBatch` for the split of prompt and completion).

        prefix_ids: int32[N, P]; prefix_lengths: int32[N]; input_ids: int32[N*G, R]; lengths: int32[N*G].
        Returns final hidden states [N*G*R, hidden] at the completion positions; behind the lengths they say nothing.
        """
        return self.stage(prefix_ids, prefix_lengths, input_ids, lengths, self.tokens(prefix_ids, input_ids))

    def tokens(self, prefix_ids, input_ids):
        """What the first stage begins with: the embedded prompts and completions, [rows, hidden]."""
        return self._embed(ops.concat((prefix_ids.reshape((-1,)), input_ids.reshape((-1,)))))

    def stage(self, prefix_ids, prefix_lengths, input_ids, lengths, x):
        """The layers of this stage on x [rows, hidden], the output of the stage before.

        Returns [rows, hidden], or from the last stage what `completions` returns.
        """
        n, p = prefix_ids.shape
        rows, r = input_ids.shape
        g = rows // n
        far = n * p
        positions = ops.concat(
            (
                ops.tile(ops.arange(0, p), (n,)),
                (ops.tile(prefix_lengths.reshape((n, 1, 1)), (1, g, 1)) + ops.arange(0, r).reshape((1, 1, r))).reshape(
                    (-1,)
                ),
            )
        )
        cos, sin = self._angles(positions)
        split = (n, p, g, r)
        view = self.group_view(prefix_lengths, lengths, split, self.kv_heads, self.heads)
        for block in self.inner_blocks:
            x, _, _ = self._run(block, x, cos, sin, view, split)
        if not self.is_last:
            return x
        near = self._rows_from(x, far)
        if self.last_block is None:
            return self._final(near)
        if self.last_block.whole:
            return self._final(self.last_block.layer(x, cos, sin, cos[:, far:], view, split, self.scale)[0])
        h = self.last_block.normed(x)
        q = self.last_block.query(h[far:], cos[:, far:], sin[:, far:])
        k, v = self.last_block.key_value(h, cos, sin)
        return self._final(self.last_block.finish(near, self.group_attention(q, k, v, view, split, self.scale)))

    def prefill(self, prefix_ids):
        """Keys and values of prompts: int32[N, P] -> per layer (key, value), each [N, K, P, D]."""
        n, p = prefix_ids.shape
        cos, sin = self._angles(ops.tile(ops.arange(0, p), (n,)))
        view, split = self._prompts_view(n, p)
        shape = (n, p, self.kv_heads, -1)
        x = self._embed(prefix_ids.reshape((-1,)))
        cache = ()
        for block in self.inner_blocks:
            x, k, v = self._run(block, x, cos, sin, view, split)
            cache += ((k.reshape(shape).transpose((0, 2, 1, 3)), v.reshape(shape).transpose((0, 2, 1, 3))),)
        k, v = self.last_block.key_value(self.last_block.normed(x), cos, sin)
        return (*cache, (k.reshape(shape).transpose((0, 2, 1, 3)), v.reshape(shape).transpose((0, 2, 1, 3))))

    def decode(self, ids, positions, keys, values):
        """One token of each slot: writes its key and value into the caches in place, and attends.

        ids, positions: int32[B]; keys, values: per layer a Parameter [B, K, S, D].
        Returns final hidden states [B, hidden].
        """
        _, heads, size, _ = keys[0].shape
        cos, sin = self._angles(positions)
        view = self.decode_view(positions, heads, size)
        x = self._embed(ids)
        for i, block in enumerate(self.blocks):
            x = block.decode(x, cos, sin, view, keys[i], values[i], self.scale)
        return self._final(x)

    def decode_parameters(self, keys, values) -> tuple[Parameter, ...]:
        """What `decode_tokens` reads and writes of the layers; made outside of the graph, where it costs nothing.

        keys, values: as in `decode`.
        """
        caches = zip(keys, values, strict=True)
        pairs = zip(self.blocks, caches, strict=True)
        return tuple(one for block, cache in pairs for one in (*block.decode_weights(), *cache))

    def decode_tokens(self, slots, uniform, stop_ids, inverse, greedy, layers):
        """Several tokens of each slot with the fused operator of that name, which says what they are; only where
        `decodes_tokens`. layers: of `decode_parameters`.
        """
        numbers = (*self.numbers, inverse, greedy)
        table, norm, head = self.embed.weight.parameter, self.final_norm.weight.parameter, self.head.parameter
        angles = (self.cos, self.sin)
        return self.fused_tokens(slots, uniform, stop_ids, table, angles, norm, head, layers, numbers)

    def logits(self, hidden):
        """[T, hidden] -> float32[T, vocab], or of this rank's part of the vocabulary."""
        hidden, head = self.with_head(hidden)
        return self.linear(hidden, head).astype("float32")
