"""Routing of tokens: the experts that compute each token, by layer. Imports no MindSpore."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RoutingForm:
    """Numbers of a model with experts.

    layers: those with experts. experts: their number, which stands for none in arrays of a routing. chosen: experts of
    a token.
    """

    layers: tuple[int, ...]
    experts: int
    chosen: int

    @classmethod
    def of(cls, model: Any) -> "RoutingForm":
        """Describe the routing of a model by its `ModelConfig`."""
        return cls(model.expert_layers, model.num_experts, model.num_experts_per_tok)

    @property
    def width(self) -> int:
        """Experts of a token over all layers."""
        return len(self.layers) * self.chosen

    @property
    def dtype(self) -> type:
        """The smallest dtype that holds `experts`."""
        return np.uint8 if self.experts <= np.iinfo(np.uint8).max else np.uint16

    def columns(self, layer: int) -> slice:
        """Select a layer's experts among those of a token."""
        first = self.layers.index(layer) * self.chosen
        return slice(first, first + self.chosen)

    def unknown(self, *shape: int) -> np.ndarray:
        """Make a routing [*shape, width] without any expert."""
        return np.full((*shape, self.width), self.experts, self.dtype)


@dataclass(frozen=True, eq=False)
class Routing:
    """Experts of the positions of a group.

    Of the prompt [P - 1, width], and of G responses [R, width].

    The prompt is without its last token, whose experts are in the first row of each response; a response's last token
    is computed by none.
    """

    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]

    @classmethod
    def of_rollouts(cls, tokens: tuple[Mapping[str, np.ndarray], ...]) -> "Routing | None":
        """Return the routing that the engine recorded, or None.

        tokens: `Rollout.tokens` of a group.
        """
        if not all("routing" in one and one["routing"].shape[1] for one in tokens):
            return None
        responses = tuple(one["routing"] for one in tokens)
        return cls(tokens[0].get("prompt_routing", responses[0][:0]), responses)  # a prompt of one token has no rows
