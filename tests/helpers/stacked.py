"""A family of tests alone, whose layers from the second on have a stack of matrices that two mesh axes cut."""

from dataclasses import replace

from small_model import small_config

from mindrlhf.models import parameters
from mindrlhf.models.axes import DATA, TENSOR
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import Cut, HfTensor, ParameterSpec

COUNT = 4
STACK = "model.layers.1.feed_forward.stack.weight"


def layer_rows(model, layer, rows):
    """From the second layer on [4, inner, hidden], cut by its first dimension along `dp` and its second along `tp`.

    It is four tensors in a checkpoint.
    """
    matrix = (model.intermediate_size, model.hidden_size)
    box = tuple((0, size) for size in matrix)
    pieces = tuple(HfTensor(f"mlp.stack.{i}.up.weight", ((i, i + 1), *box), matrix) for i in range(COUNT))
    cuts = (Cut(DATA, 0), Cut(TENSOR, 1))
    stack = ParameterSpec(
        "feed_forward.stack.weight", "mlp.stack.weight", (COUNT, *matrix), "matrix", 0, cuts, pieces=pieces
    )
    return rows if layer == 0 else [*rows, stack]


def stacked_config(monkeypatch, **changes):
    """Two layers of such a family, in place of Llama."""
    monkeypatch.setattr(parameters, "FAMILIES", {"llama": replace(FAMILIES["llama"], layer_rows=layer_rows)})
    return small_config(family="llama", attention_bias=False, **changes)
