"""Compiled graphs of earlier runs, for this one."""

import logging
from contextlib import ExitStack
from typing import Any

from mindrlhf.backend.compile.graph import kept_graphs
from mindrlhf.backend.compile.graph_cache import GRAPHS, GraphCache
from mindrlhf.backend.process.launch import World
from mindrlhf.files.user_cache import user_cache
from mindrlhf.job import Job

_log = logging.getLogger(__name__)

NOT_COMPILED = ("data", "reward", "optimizer", "trainer")  # groups of settings


def use_compile_cache(job: Job, world: World, stack: ExitStack) -> None:
    """Use this user's graphs of equal jobs, if asked for, until `stack` closes."""
    if not job.flags.enable_compile_cache:
        return
    try:
        cache = GraphCache(user_cache() / GRAPHS, world.rank, f"{world} {graph_settings(job)}")
    except OSError as error:
        _log.warning("--enable_compile_cache: compiled graphs are not kept (%s)", error)
        return
    stack.enter_context(kept_graphs(cache))
    if world.rank == 0:
        stack.callback(lambda: print(cache, flush=True))


def graph_settings(job: Job) -> dict[str, Any]:
    """Select the settings that are compiled into graphs.

    Prompts, rewards, rates and the length of a run are not, so that it may go on with others.
    """
    described = job.described()
    kind = job.config.kind
    described[kind] = {group: own for group, own in described[kind].items() if group not in NOT_COMPILED}
    for yaml in ("train_yaml", "infer_yaml"):
        del described[yaml]["path"]
    del described["flags"]
    return described
