"""Names and shapes of weights in checkpoints of MindFormers' newer models, called mcore.

They are read and not written: MindFormers loads Hugging Face's folders into such models itself. Queries, keys and
values are one tensor, cut by key-value heads; rows of gate and up alternate; experts are transposed. Files do not say
so, and these are MindFormers' defaults: `use_contiguous_weight_layout_attention: False` and
`use_interleaved_weight_layout_mlp: True`.
"""

from math import prod

from mindrlhf.configs.lora import LAYERS, MCORE_LAYERS
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameter_spec import HfTensor, ParameterSpec, View

# Module in Hugging Face's checkpoints -> in these; a layer's below its number.
OUTER = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
}
# Several of Hugging Face's modules in one tensor, in their order.
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj")
EXPERTS_DOWN = ("mlp.experts.down_proj",)


def mcore_tensor(spec: ParameterSpec, config: ModelConfig) -> HfTensor | None:
    """Describe the tensor with a parameter; None for one without a name there."""
    module, _, ending = spec.hf_name.rpartition(".")
    if module in OUTER:
        return spec.as_tensor(f"{OUTER[module]}.{ending}")
    inner = module.removeprefix(f"{LAYERS}{spec.layer}.")
    layer = f"{MCORE_LAYERS}{spec.layer}."
    if inner in LAYER:
        return spec.as_tensor(f"{layer}{LAYER[inner]}.{ending}")
    if inner in ATTENTION:
        return _viewed(spec, f"{layer}self_attention.linear_qkv.{ending}", _attention(spec, config, inner), 3)
    if inner in GATED:
        height, width = spec.shape
        box = ((0, height), _one(GATED, inner), (0, width))
        return _viewed(spec, f"{layer}mlp.linear_fc1.{ending}", View((height, 2, width), box), 2)
    for name, maps in (("weight1", EXPERTS), ("weight2", EXPERTS_DOWN)):
        if inner in maps:
            return _viewed(spec, f"{layer}mlp.experts.{name}", _experts(spec, maps, inner), 2)
    return None


def _one(maps: tuple[str, ...], inner: str) -> tuple[int, int]:
    place = maps.index(inner)
    return place, place + 1


def _attention(spec: ParameterSpec, config: ModelConfig, inner: str) -> View:
    """View [kv heads, (queries of one, key, value), head_dim, ...]."""
    groups, queries = config.num_kv_heads, config.num_heads // config.num_kv_heads
    first, last = _one(ATTENTION, inner)
    own = (0, queries) if first == 0 else (queries + first - 1, queries + last - 1)
    rest = spec.shape[1:]
    dims = (groups, queries + 2, config.head_dim, *rest)
    return View(dims, ((0, groups), own, (0, config.head_dim), *((0, size) for size in rest)))


def _experts(spec: ParameterSpec, maps: tuple[str, ...], inner: str) -> View:
    """View [experts, in, outs of all maps], with the last two dimensions exchanged."""
    experts, outs, ins = spec.shape
    first, last = _one(maps, inner)
    box = ((0, experts), (0, ins), (first * outs, last * outs))
    return View((experts, ins, len(maps) * outs), box, (0, 2, 1))


def _viewed(spec: ParameterSpec, name: str, view: View, joined: int) -> HfTensor:
    """Describe a tensor in which the first `joined` dimensions of a view are one."""
    shape = (prod(view.dims[:joined]), *view.dims[joined:])
    return HfTensor(name, spec.as_tensor(name).box, shape, view)
