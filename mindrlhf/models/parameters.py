"""Table of a model's parameters: names, shapes, sharding, layers.

All code that iterates over weights (graphs, loading, saving, optimizer groups, layouts, the reshard planner) uses this
table, so that a parameter is described in one place only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from mindrlhf.configs.lora import LAYERS, MCORE_LAYERS, Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.vision import PartName
from mindrlhf.errors import UserError
from mindrlhf.models.axes import TENSOR
from mindrlhf.models.families import FAMILIES, Family
from mindrlhf.models.parameter_spec import Cut, HfTensor, ParameterSpec
from mindrlhf.models.vision.rows import HF_PATCHES, is_tower, part_of

EMBEDDING = "model.tok_embeddings.embedding_weight"
FINAL_NORM = "model.norm_out.weight"
HEAD = "lm_head.weight"  # the same name in Hugging Face's checkpoints
VALUE_HEAD = "value_head.weight"


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """List all parameters in their fixed order.

    The order is: a vision tower, embedding, layers one after the other, final norm, head if untied.
    A critic's head maps hidden states to one number, and is cut by columns.
    An adapter's matrices follow the weight that they belong to; with adapters nothing else trains.
    """
    rows = _base_table(config.base, FAMILIES[config.family])
    if config.frozen:
        rows = tuple(replace(row, trains=part_of(row) not in config.frozen) for row in rows)
    return rows if config.adapter is None else _adapted(rows, config.adapter)


def kept_rows(config: ModelConfig) -> list[ParameterSpec]:
    """List the parameters that training checkpoints hold: all, or those of adapters alone."""
    return [spec for spec in parameter_table(config) if spec.trains or config.adapter is None]


@lru_cache(maxsize=16)
def _base_table(config: ModelConfig, family: Family) -> tuple[ParameterSpec, ...]:
    """List the parameters of a model without adapters."""
    hidden = config.hidden_size
    tied = config.tie_word_embeddings
    table = {"shape": (config.vocab_size, hidden), "cuts": (Cut(TENSOR, 0),)}
    rows = [
        ParameterSpec(
            EMBEDDING,
            "model.embed_tokens.weight",
            kind="embedding",
            place="ends" if tied else "first",
            inside=tied,  # as the head; the lookup by ids is outside the region
            **table,
        )
    ]
    for layer in range(config.num_layers):
        rows += _at_layer(layer, family.layer_rows(config, layer, _layer_rows(config)))
    rows.append(ParameterSpec(FINAL_NORM, "model.norm.weight", (hidden,), "norm", "last", inside=False))
    if config.value_head:
        rows.append(ParameterSpec(VALUE_HEAD, "score.weight", (1, hidden), "head", "last", (Cut(TENSOR, 1),)))
    elif not tied:
        rows.append(ParameterSpec(HEAD, HEAD, kind="head", place="last", **table))
    return tuple(family.model_rows(config, rows))


def parameter_count(config: ModelConfig) -> int:
    """Count the elements of all parameters; a tied head counts once."""
    return sum(spec.size for spec in parameter_table(config))


def trained_count(config: ModelConfig) -> int:
    """Count the elements of the parameters that train."""
    return sum(spec.size for spec in parameter_table(config) if spec.trains)


def trained_parts(config: ModelConfig) -> frozenset[PartName]:
    """Name the parts that updates change, their weights or their adapters."""
    return frozenset(part_of(spec) for spec in parameter_table(config) if spec.trains)


def tower_trains(config: ModelConfig) -> bool:
    """Test that updates change a vision tower, or what joins it to the text."""
    return bool(trained_parts(config) & {"vision", "merger"})


def adapter_rows(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Return the rows of all adapters' matrices by name."""
    return {spec.name: spec for spec in parameter_table(config) if spec.adapts}


def decoded_rows(config: ModelConfig) -> list[ParameterSpec]:
    """List the matrices that decode steps multiply by, of layers and head."""
    kinds = ("matrix", "embedding" if config.tie_word_embeddings else "head")
    return [spec for spec in parameter_table(config) if spec.kind in kinds and not is_tower(spec)]


def is_layer_weight(name: str) -> bool:
    """Test for a decoder layer's weight or bias, of any model, by name."""
    return name.startswith((LAYERS, MCORE_LAYERS)) and name.endswith((".weight", ".bias", ".weight1", ".weight2"))


def is_model_weight(name: str) -> bool:
    """Test for a language model's weight by its name in a checkpoint.

    Other weights are an optimizer's or a trainer's.
    """
    return name.startswith("model.") or name == HEAD


def has_fused_projections(names: Iterable[str]) -> bool:
    """Test for joint query, key and value matrices (MindFormers' `qkv_concat: True`)."""
    return any(".w_qkv." in name for name in names)


def _at_layer(layer: int, rows: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    prefix = f"{LAYERS}{layer}."

    def placed(row: ParameterSpec) -> ParameterSpec:
        pieces, joint = (tuple(replace(one, name=prefix + one.name) for one in of) for of in (row.pieces, row.joint))
        names = {"name": prefix + row.name, "hf_name": prefix + row.hf_name}
        return replace(row, place=layer, pieces=pieces, joint=joint, **names)

    return [placed(row) for row in rows]


def _adapted(rows: Iterable[ParameterSpec], adapter: Adapter) -> tuple[ParameterSpec, ...]:
    """Freeze all rows, and insert the adapters' rows after the rows of their weights.

    A [r, in] and B [out, r] are cut as the weight [out, in] is: A with its columns, B with its rows. Both are used
    inside of the parallel region, so that a rank that holds a whole matrix computes a part of its gradient.
    """
    adapted: list[ParameterSpec] = []
    for row in rows:
        adapted.append(replace(row, trains=False))
        found = {adapter.of(tensor.module) for tensor in row.hf_tensors} if row.kind == "matrix" else {None}
        if found != {None} and row.hf_name == HF_PATCHES:
            module = row.hf_name.removesuffix(".weight")
            found = f"the adapter's target_modules name {module}, a convolution, which has no adapters here"
            raise UserError(f"{found}; name it in lora.exclude_modules.")
        if len(found) > 1:
            raise UserError(
                f"lora gives the tensors of {row.hf_name} several ranks; they are one stack, with one rank."
            )
        (one,) = found
        if one is not None:
            adapted += _adapter_pair(row, *one)
    return tuple(adapted)


def _adapter_pair(row: ParameterSpec, rank: int, scale: float) -> Iterator[ParameterSpec]:
    """Make the rows of A and B of a matrix [..., out, in].

    A parameter of several tensors is a stack of whole matrices.
    """
    *stack, outputs, inputs = row.shape
    for kind, letter, matrix, reduced in (("lora_a", "A", (rank, inputs), -2), ("lora_b", "B", (outputs, rank), -1)):
        names = [f"{tensor.module}.lora_{letter}.weight" for tensor in row.hf_tensors]
        box = tuple((0, size) for size in matrix)
        pieces = [
            HfTensor(name, (*tensor.box[:-2], *box), matrix) for name, tensor in zip(names, row.hf_tensors, strict=True)
        ]
        yield replace(
            row,
            name=f"{row.name.removesuffix('.weight')}.{kind}",
            hf_name=f"{row.hf_name.removesuffix('.weight')}.lora_{letter}.weight",
            shape=(*stack, *matrix),
            kind=kind,
            scale=scale,
            cuts=tuple(cut for cut in row.cuts if cut.dim != len(row.shape) + reduced),
            pieces=tuple(pieces) if row.pieces else (),
            joint=(),
        )


def _layer_rows(config: ModelConfig) -> list[ParameterSpec]:
    """List the parameters of one decoder layer, under their names within it.

    Column-parallel projections (query, key, value, gate, up) are cut by output, row-parallel ones (attention output,
    down) by input, so that one reduction closes each pair. Key and value projections are cut by whole heads.
    """
    hidden = config.hidden_size
    inner = config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str, hf_name: str, size: int) -> ParameterSpec:
        return ParameterSpec(f"{name}.weight", f"{hf_name}.weight", (size,), "norm", 0)

    def matrix(name: str, hf_name: str, outputs: int, inputs: int, dim: int, parts: int | None = None) -> ParameterSpec:
        shape = (outputs, inputs)
        return ParameterSpec(f"{name}.weight", f"{hf_name}.weight", shape, "matrix", 0, (Cut(TENSOR, dim, parts),))

    rows = [norm("attention_norm", "input_layernorm", hidden)]
    for ours, theirs, outputs, parts in (
        ("wq", "q_proj", queries, None),
        ("wk", "k_proj", keys, config.num_kv_heads),
        ("wv", "v_proj", keys, config.num_kv_heads),
    ):
        weight = matrix(f"attention.{ours}", f"self_attn.{theirs}", outputs, hidden, 0, parts)
        rows.append(weight)
        if config.attention_bias:
            name, hf_name = f"attention.{ours}.bias", f"self_attn.{theirs}.bias"
            rows.append(replace(weight, name=name, hf_name=hf_name, shape=(outputs,), kind="bias"))
    if config.qk_norm:
        rows += [norm(f"attention.{one}", f"self_attn.{one}", config.head_dim) for one in ("q_norm", "k_norm")]
    return [
        *rows,
        matrix("attention.wo", "self_attn.o_proj", hidden, queries, 1),
        norm("ffn_norm", "post_attention_layernorm", hidden),
        matrix("feed_forward.w1", "mlp.gate_proj", inner, hidden, 0),
        matrix("feed_forward.w3", "mlp.up_proj", inner, hidden, 0),
        matrix("feed_forward.w2", "mlp.down_proj", hidden, inner, 1),
    ]
