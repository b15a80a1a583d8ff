"""Routing of the engine's responses, read from its cache when they end."""

import numpy as np
from mindspore import Parameter

from mindrlhf import backend
from mindrlhf.models.routing import RoutingForm


class RoutingRecorder:
    """Reader of the cache of a routing.

    cache: int32[slots, layers with experts, positions, chosen]. max_prompt: longest prompt in tokens, behind which
    the operator for several tokens has a slot's own tokens.
    """

    def __init__(self, cache: Parameter, form: RoutingForm, max_prompt: int):
        self._cache = cache
        self._form = form
        self._max_prompt = max_prompt

    def prompt(self, slot: int, prefix: int) -> np.ndarray:
        """Copy the routing of a prompt's first tokens: [prefix, width].

        They are in `slot`.
        """
        return self._copied(slot, 0, prefix)

    def response(self, slot: int, prefix: int, operator: bool, sampled: np.ndarray) -> np.ndarray:
        """Copy the routing of a response: [R, width].

        What follows its last drawn token was not computed, and has none. operator: see `slots.Slots`.
        """
        first = self._max_prompt if operator else prefix
        found = self._copied(slot, first, first + len(sampled))
        computed = max(np.flatnonzero(sampled), default=-1) + 1
        found[computed:] = self._form.experts
        return found

    def _copied(self, slot: int, first: int, end: int) -> np.ndarray:
        rows = backend.read(self._cache)[slot, :, first:end].transpose((1, 0, 2))
        return rows.reshape((end - first, self._form.width)).astype(self._form.dtype)
