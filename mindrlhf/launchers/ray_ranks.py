"""Start of a job's ranks on a Ray cluster.

Each rank has an actor with the resources of a rank. Ray chooses the nodes; ranks of one node are neighbours. Ray is
imported here, when it is asked for.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.backend.process.start import SCHEDULER, ending, job_variables, rank_variables
from mindrlhf.errors import UserError
from mindrlhf.launchers.ranks import (
    USERS_MISTAKE,
    Ending,
    RankJob,
    StopRequests,
    start_until_it_ends,
    stop_requests,
)
from mindrlhf.launchers.ray_host import ENDING_S, RankHost

POLL_S = 0.5
FAREWELL_S = 10.0  # after a failure, for the other ranks to print their sentences and end
PLACE_S = 600.0  # for the cluster to have room for all ranks
OBJECT_STORE = 100 << 20  # bytes of a cluster that is started here, which exchanges next to nothing
CPU = "CPU"  # Ray's name of a processor


@dataclass(frozen=True)
class _Rank:
    """A rank's actor, its place, and the names of its processes."""

    number: int
    host: Any
    node: str
    address: str

    @property
    def name(self) -> str:
        return f"worker_{self.number}"


def launch_with_ray(job: RankJob, address: str | None, resources: Mapping[str, float]) -> int:
    """Start the ranks and wait for them; returns the exit code.

    address: of the cluster; None for one on this machine, which ends with the job. resources: of a rank, by Ray's
    names. Raises UserError without Ray, or if the cluster cannot be reached or is too small.
    """
    ray = _ray()
    _connect(ray, address)
    try:
        with stop_requests() as requests:
            return start_until_it_ends(lambda attempt: _run(ray, job, attempt, resources, requests), job.retries)
    finally:
        ray.shutdown()


def _ray() -> ModuleType:
    try:
        return import_module("ray")
    except ImportError as error:
        raise UserError("--with ray: Ray is not installed; run `pip install 'mindrlhf[ray]'`.") from error


def _connect(ray: ModuleType, address: str | None) -> None:
    wanted = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": wanted or "local", "log_to_driver": False, "configure_logging": False}
    if not wanted:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(f"--ray_address {wanted}: no Ray cluster answers there ({reason}).") from error


def _run(ray: ModuleType, job: RankJob, attempt: int, resources: Mapping[str, float], requests: StopRequests) -> Ending:
    """Start all ranks once and wait for their end."""
    with _hosts(ray, job.workers, resources) as hosts:
        try:
            ranks, scheduler = _numbered(ray, hosts)
            _start(ray, job, ranks, scheduler, str(job.logs_of(attempt).absolute()))
            return _watch(ray, ranks, requests)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().split("\n")[0]
            return Ending(1, f"an actor of a rank was lost ({reason})")


@contextmanager
def _hosts(ray: ModuleType, workers: int, resources: Mapping[str, float]) -> Iterator[list[Any]]:
    """Make an actor for each rank; they and their processes end with the block."""
    group = ray.util.placement_group([dict(resources)] * workers, strategy="PACK")
    hosts: list[Any] = []
    try:
        if not group.wait(PLACE_S if _has_room(ray, workers, resources) else 0):
            there = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}" for name in resources)
            wanted = ", ".join(f"{workers * count:g} {name}" for name, count in resources.items())
            raise UserError(f"--with ray: {workers} ranks take {wanted}, and the cluster has {there}.")
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        others = {name: count for name, count in resources.items() if name != CPU}
        options = {"num_cpus": resources.get(CPU, 0), "resources": others, "max_restarts": 0}
        kind = ray.remote(**options)(RankHost)
        for number in range(workers):
            placed = strategy(placement_group=group, placement_group_bundle_index=number)
            hosts.append(kind.options(scheduling_strategy=placed).remote())
        yield hosts
    finally:
        with suppress(ray.exceptions.RayError):
            ray.wait([host.end.remote() for host in hosts], num_returns=len(hosts) or 1, timeout=2 * ENDING_S)
        for host in hosts:
            ray.kill(host)
        ray.util.remove_placement_group(group)


def _has_room(ray: ModuleType, workers: int, resources: Mapping[str, float]) -> bool:
    """Tell whether the whole cluster, idle, is large enough."""
    there = ray.cluster_resources()
    return all(there.get(name, 0) >= workers * count for name, count in resources.items())


def _numbered(ray: ModuleType, hosts: Sequence[Any]) -> tuple[list[_Rank], tuple[str, int]]:
    """Return the ranks, numbered node by node, and the scheduler's address."""
    places = ray.get([host.place.remote() for host in hosts])
    first = places[0][0]  # this node's ranks come first
    order = sorted(range(len(hosts)), key=lambda index: (places[index][0] != first, places[index][0], index))
    ranks = [
        _Rank(number, hosts[index], node=places[index][0], address=places[index][1])
        for number, index in enumerate(order)
    ]
    return ranks, (places[order[0]][1], places[order[0]][2])


def _start(ray: ModuleType, job: RankJob, ranks: Sequence[_Rank], scheduler: tuple[str, int], logs: str) -> None:
    """Start the scheduler and all ranks."""
    common = job_variables(job.workers, *scheduler)
    folder = str(Path.cwd())
    words = list(job.words)
    pids = {}
    for _, members in groupby(ranks, key=lambda rank: rank.node):
        local = list(members)
        for device, rank in enumerate(local):
            if rank.number == 0:
                rank.host.start.remote("scheduler", words, common | SCHEDULER, folder, logs, len(local))
            variables = common | rank_variables(rank.number, device)
            pids[rank] = rank.host.start.remote(rank.name, words, variables, folder, logs, len(local))
    for rank, pid in pids.items():
        log = f"{logs}/{rank.name}.log"
        print(f"rank {rank.number}: process {ray.get(pid)} on {rank.address}, {log}", flush=True)


def _watch(ray: ModuleType, ranks: Sequence[_Rank], requests: StopRequests) -> Ending:
    """Wait for the end of all processes; shows the first rank's output."""
    failed: Ending | None = None
    waited = 0.0
    asked = False
    first = ranks[0]
    while True:
        time.sleep(POLL_S)
        codes = ray.get([rank.host.poll.remote() for rank in ranks])
        print(ray.get(first.host.read.remote(first.name)), end="", flush=True)
        failed = failed or _failure(ray, ranks, codes, asked)
        if all(code is not None for of_rank in codes for code in of_rank.values()):
            return failed or Ending(0, "ended", final=True)
        if requests.count > 1 or waited > FAREWELL_S:
            return failed or Ending(1, "was ended by a second signal", final=True)
        waited += POLL_S if failed else 0.0
        if requests.count and not asked:
            asked = True
            for rank in ranks:
                rank.host.request_stop.remote()


def _failure(
    ray: ModuleType, ranks: Sequence[_Rank], codes: Sequence[Mapping[str, int | None]], asked: bool
) -> Ending | None:
    """Describe the first process that has failed."""
    for rank, of_rank in zip(ranks, codes, strict=True):
        for name, code in of_rank.items():
            if code:
                said = ray.get(rank.host.last_lines.remote(name))
                words = f"{name.replace('_', ' ')} on {rank.address} {ending(code)}: {said}"
                return Ending(max(1, code), words, final=asked or code == USERS_MISTAKE)
    return None
