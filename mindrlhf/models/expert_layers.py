"""Layers with experts: names of their halves, and their rows of the parameter table.

An expert layer has a router and experts in place of one feed-forward half. Imports no MindSpore and no family.
"""

from dataclasses import replace
from typing import Any

from mindrlhf.models.axes import EXPERT
from mindrlhf.models.parameter_spec import Cut, HfTensor, ParameterSpec, View

FEED_FORWARD, EXPERTS = "feed_forward", "experts"
ROUTER = "feed_forward.routed_experts.router.dense"
EXPERT_MAPS = {name: f"feed_forward.routed_experts.ffn.{name}" for name in ("w1", "w3", "w2")}
"""Names within a layer, those of MindFormers' layers with experts."""

LOAD, BALANCE, CHOSEN = "expert_load", "load_balancing", "chosen_experts"
"""Side outputs of a layer with experts.

LOAD: float32[experts], the tokens that each expert computes. BALANCE: float32[], experts * sum over experts of (share
of the choices) * (mean probability), over the number of such layers: the layers' sum is 1 when all experts are chosen
alike (Fedus et al. 2021, arXiv:2101.03961, equation 4). CHOSEN: int32[rows, chosen], each row's experts, of decoders
that record them.
"""

# Map -> tensor of all experts that has it in checkpoints as `transformers` computes with them, and its place there.
JOINT = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
JOINT_PARTS = {"gate_up_proj": 2, "down_proj": 1}


def halves(model: Any, layer: int) -> tuple[str, str]:
    """Name the halves of a layer, for `Family.halves`."""
    return "attention", EXPERTS if layer in model.expert_layers else FEED_FORWARD


def layer_rows(model: Any, layer: int, rows: list[ParameterSpec]) -> list[ParameterSpec]:
    """Replace the feed-forward rows of a layer with experts, for `Family.layer_rows`."""
    if layer not in model.expert_layers:
        return rows
    dense = {row.name.removesuffix(".weight"): row for row in rows}
    kept = [row for name, row in dense.items() if not name.startswith(f"{FEED_FORWARD}.")]
    router = ParameterSpec(
        name=f"{ROUTER}.weight",
        hf_name="mlp.gate.weight",
        shape=(model.num_experts, model.hidden_size),
        kind="router" if model.router_trains else "fixed",
        place=layer,
    )
    return [*kept, router, *(_stack(model, dense[f"{FEED_FORWARD}.{one}"], name) for one, name in EXPERT_MAPS.items())]


def _stack(model: Any, dense: ParameterSpec, name: str) -> ParameterSpec:
    """Make the row of one map of all experts from its dense row.

    Its shape is [experts, out, in]. Experts are spread over ranks; the matrix of each is cut as the dense one is.
    """
    wide = model.moe_intermediate_size
    sizes = tuple(wide if dense.is_cut(dim) else size for dim, size in enumerate(dense.shape))
    group, map_name = dense.hf_name.removesuffix(".weight").split(".")
    joint_name, first = JOINT[map_name]
    height, width = sizes
    joint_shape = (model.num_experts, JOINT_PARTS[joint_name] * height, width)
    names = [f"{group}.experts.{expert}.{map_name}.weight" for expert in range(model.num_experts)]
    box = tuple((0, size) for size in sizes)
    experts = (0, model.num_experts)
    rows = View(joint_shape, (experts, (first * height, (first + 1) * height), (0, width)))
    return replace(
        dense,
        name=f"{name}.weight",
        hf_name=f"{group}.experts.{map_name}.weight",
        shape=(model.num_experts, *sizes),
        cuts=(Cut(EXPERT, 0), *(Cut(cut.axis, cut.dim + 1, cut.parts) for cut in dense.cuts)),
        pieces=tuple(HfTensor(one, ((i, i + 1), *box), sizes) for i, one in enumerate(names)),
        joint=(HfTensor(f"{group}.experts.{joint_name}", (experts, *box), joint_shape, rows),),
    )
