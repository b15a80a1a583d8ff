"""Reuse of graphs that earlier runs compiled."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mindrlhf.backend.compile.graph import kept_graphs
from mindrlhf.backend.compile.graph_cache import GRAPHS, GraphCache
from mindrlhf.backend.process.launch import World
from mindrlhf.files.user_cache import user_cache
from mindrlhf.model_roles import ROLES

_log = logging.getLogger(__name__)

# Groups of settings that no graph depends on; further groups by the beginning of a graph's name. The seed is an input
# of graphs that use it.
NOT_COMPILED = ("data", "memory", "optimizer", "reward", "seed", "trainer", "validation")
NOT_TRAINED_BY = (
    *("algorithm", "dynamic_sampling", "rollout_correction", "train"),
    *(role.settings for role in ROLES.values() if role.settings),
)
NOT_COMPILED_INTO = {
    "generate/": NOT_TRAINED_BY,
    "optimizer/": (*NOT_TRAINED_BY, "rollout"),
    "train/scores": NOT_TRAINED_BY,
    "tower/": (*NOT_TRAINED_BY, "rollout"),
}


def use_compile_cache(described: Mapping[str, Any], kind: str, world: World, stack: ExitStack) -> None:
    """Use this user's cached graphs of equal jobs until `stack` closes.

    described, kind: see `graph_settings`.
    """

    def key(name: str) -> str:
        return f"{world} {graph_settings(described, kind, name)}"

    try:
        cache = GraphCache(user_cache() / GRAPHS, world.rank, key)
    except OSError as error:
        _log.warning("--enable_compile_cache: compiled graphs are not kept (%s)", error)
        return
    stack.enter_context(kept_graphs(cache))
    if world.rank == 0:
        stack.callback(lambda: print(cache, flush=True))


def graph_settings(described: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """Select the settings that are compiled into a graph.

    Prompts, rewards, rates, the seed and the length of a run are not, so a run may continue with other values, and runs
    of several seeds share their graphs. described: see `Job`; its settings have the key `kind`. name: the graph's.
    """
    left_out = {
        group for beginning, groups in NOT_COMPILED_INTO.items() if name.startswith(beginning) for group in groups
    }
    left_out.update(NOT_COMPILED)
    found = {name: part for name, part in described.items() if name != "flags"}
    found[kind] = {group: own for group, own in described[kind].items() if group not in left_out}
    for yaml in (name for name in described if name.endswith("_yaml")):
        found[yaml] = {key: value for key, value in described[yaml].items() if key != "path"}
    return found
