"""Routing of a step's first pass, for the step's other passes (`rollout.routing_replay: old`)."""

from collections.abc import Sequence
from dataclasses import replace

from mindrlhf.models.routing import Routing
from mindrlhf.training.batch import SequenceGroup


class FirstRouting:
    """Routing of groups in the first pass over them, by identity."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Routing] = {}

    def begin(self, groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
        """Forget the last step's routing, and let the routers choose for these groups."""
        self._known = {}
        return [replace(group, routing=None) for group in groups]

    def keep(self, groups: Sequence[SequenceGroup], routings: Sequence[Routing]) -> None:
        """Keep the routing of a first pass."""
        self._known = {group.identity: own for group, own in zip(groups, routings, strict=True)}

    def given(self, groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
        """Give groups their routing."""
        return [replace(group, routing=self._known[group.identity]) for group in groups]
