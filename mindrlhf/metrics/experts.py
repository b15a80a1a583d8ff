"""Load of experts as metrics: shares, their entropy, and the load-balancing value."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.models.expert_layers import BALANCE, LOAD

ENTROPY, BUSIEST, VALUE = "expert_entropy", "expert_busiest", "expert_balance"
MOST_SHARES = 256  # of all layers; models with more experts have no metric of each
_SHARE = re.compile(rf"(?P<role>\w+)/{LOAD}/(?P<layer>\d+)/\d+")


def add_experts(metrics: MetricSet, role: str, micros: Iterable[Mapping[tuple[int | None, str], np.ndarray]]) -> None:
    """Add the load of experts in the micro-batches of an update.

    Layers without experts have none.

    micros: side outputs by (layer, name).
    """
    for sides in micros:
        loads = {layer: array for (layer, name), array in sides.items() if name == LOAD}
        for layer, load in loads.items():
            for expert, tokens in enumerate(load.tolist()):
                metrics.add(f"{role}/{LOAD}/{layer}/{expert}", tokens, float(load.sum()))
        if loads:
            weight = float(sum(load.sum() for load in loads.values()))
            value = sum(float(array) for (_, name), array in sides.items() if name == BALANCE)
            metrics.add(f"{role}/{VALUE}", value * weight, weight)


def with_entropy(values: Mapping[str, float]) -> dict[str, float]:
    """Add the relative entropy of each layer's load, and its busiest expert's share.

    The shares of single experts stay if they are few. values: reduced over all ranks.
    """
    layers: dict[tuple[str, str], list[float]] = {}
    for name, value in values.items():
        if found := _SHARE.fullmatch(name):
            layers.setdefault((found["role"], found["layer"]), []).append(value)
    many = sum(map(len, layers.values())) > MOST_SHARES
    kept = {name: value for name, value in values.items() if not (many and _SHARE.fullmatch(name))}
    for (role, layer), shares in layers.items():
        kept[f"{role}/{ENTROPY}/{layer}"] = relative_entropy(shares)
        kept[f"{role}/{BUSIEST}/{layer}"] = max(shares)
    return kept


def relative_entropy(shares: Sequence[float]) -> float:
    """Compute the entropy of shares over that of equal ones.

    It is 1 if all experts are chosen alike, and 0 if one is chosen alone.
    """
    if len(shares) < 2:
        return 1.0
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(len(shares))
