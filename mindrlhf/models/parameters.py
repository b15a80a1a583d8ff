"""The one table of a model's parameters: names, shapes, how each is sharded, which layer it belongs to.

Everything that walks over weights (graphs, loading, saving, optimizer groups, layouts, the reshard planner) walks over
this table, so that a parameter is described in one place only.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from mindrlhf.configs.model import ModelConfig

VALUE_HEAD = "value_head.weight"

Kind = Literal["matrix", "bias", "norm", "embedding", "head"]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the full, unsharded model.

    name: the name in MindFormers' `LlamaForCausalLM`, which is also ours.
    hf_name: the name in a Hugging Face checkpoint.
    shape: the full shape; linear weights are [out, in] in both worlds.
    shard_dim: the dimension that tensor parallelism cuts, None where every rank holds the whole.
    layer: index of the decoder layer, None for the embedding, the final norm and the head.
    kind: what it is; decides weight decay.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    layer: int | None
    kind: Kind

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and an untied head, not to biases, norms and embeddings."""
        return self.kind in ("matrix", "head")

    @property
    def size(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters in their fixed order: embedding, layers one after the other, final norm, head if untied.

    A critic's head reads one number off the hidden states, and is cut by their columns.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    table = [
        ParameterSpec(
            "model.tok_embeddings.embedding_weight", "model.embed_tokens.weight", vocabulary, 0, None, "embedding"
        )
    ]
    for layer in range(config.num_layers):
        table += _layer_table(config, layer)
    table.append(ParameterSpec("model.norm_out.weight", "model.norm.weight", (config.hidden_size,), None, None, "norm"))
    if config.value_head:
        table.append(ParameterSpec(VALUE_HEAD, "score.weight", (1, config.hidden_size), 1, None, "head"))
    elif not config.tie_word_embeddings:
        table.append(ParameterSpec("lm_head.weight", "lm_head.weight", vocabulary, 0, None, "head"))
    return tuple(table)


def parameter_count(config: ModelConfig) -> int:
    """Number of elements of all parameters; a tied head counts once."""
    return sum(spec.size for spec in parameter_table(config))


def _layer_table(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    """The parameters of one decoder layer.

    Column-parallel projections (query, key, value, gate, up) are cut by output, row-parallel ones (attention output,
    down) by input, so that one reduction closes each pair.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows: list[tuple[str, str, tuple[int, ...], int | None, Kind]] = [
        ("attention_norm.weight", "input_layernorm.weight", (hidden,), None, "norm")
    ]
    for ours, theirs, outputs in (("wq", "q_proj", queries), ("wk", "k_proj", keys), ("wv", "v_proj", keys)):
        rows.append((f"attention.{ours}.weight", f"self_attn.{theirs}.weight", (outputs, hidden), 0, "matrix"))
        if config.attention_bias:
            rows.append((f"attention.{ours}.bias", f"self_attn.{theirs}.bias", (outputs,), 0, "bias"))
    if config.qk_norm:
        rows += [
            (f"attention.{norm}.weight", f"self_attn.{norm}.weight", (config.head_dim,), None, "norm")
            for norm in ("q_norm", "k_norm")
        ]
    rows += [
        ("attention.wo.weight", "self_attn.o_proj.weight", (hidden, queries), 1, "matrix"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", (hidden,), None, "norm"),
        ("feed_forward.w1.weight", "mlp.gate_proj.weight", (inner, hidden), 0, "matrix"),
        ("feed_forward.w3.weight", "mlp.up_proj.weight", (inner, hidden), 0, "matrix"),
        ("feed_forward.w2.weight", "mlp.down_proj.weight", (hidden, inner), 1, "matrix"),
    ]
    prefix = f"model.layers.{layer}."
    return [
        ParameterSpec(prefix + ours, prefix + theirs, shape, shard_dim, layer, kind)
        for ours, theirs, shape, shard_dim, kind in rows
    ]
