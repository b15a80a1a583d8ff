"""Routing by the float64 oracle, to compare with what graphs record and replay."""

import numpy as np
from small_model import EXPERTS, SmallModel

from mindrlhf.models.routing import Routing, RoutingForm
from mindrlhf.training.batch import SequenceGroup

# The first and the last of three layers have experts.
SPARSE = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": (1,), "num_experts": 7}


def random_routing(form: RoutingForm, group: SequenceGroup, seed: int) -> Routing:
    """Any experts, no expert twice for one token of a layer."""
    rng = np.random.default_rng(seed)

    def rows(count: int) -> np.ndarray:
        each = [[rng.permutation(form.experts)[: form.chosen] for _ in form.layers] for _ in range(count)]
        return np.array(each, form.dtype).reshape((count, form.width))

    return Routing(rows(len(group.prompt_ids) - 1), tuple(rows(len(response)) for response in group.responses))


def by_layer(form: RoutingForm, routing: Routing, sample: int) -> dict[int, np.ndarray]:
    """Layer -> experts [P - 1 + R, chosen] of one response with its prompt.

    The last layer's experts of the prompt matter to nothing that comes after.
    """
    rows = np.concatenate((routing.prompt, routing.responses[sample])).astype(np.int64)
    rows[rows == form.experts] = 0
    return {layer: rows[:, form.columns(layer)] for layer in form.layers}


def chosen(model: SmallModel, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """What the oracle's routers choose, [P - 1 + R, width]; no experts of prompts in the last layer."""
    form = RoutingForm.of(model.config)
    found: dict[int, list] = {}
    model.log_probs(prompt, response, routing=found)
    rows = np.concatenate([np.stack(found[layer]) for layer in form.layers], 1).astype(form.dtype)
    if form.layers[-1] == model.config.num_layers - 1:
        rows[: len(prompt) - 1, form.columns(form.layers[-1])] = form.experts
    return rows
