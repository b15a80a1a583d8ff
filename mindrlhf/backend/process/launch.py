"""Start and end of a process, by itself or as an `msrun` worker.

`msrun` sets MS_ROLE (`MS_SCHED` for the one scheduler, which runs the same script, `MS_WORKER` for the rest),
MS_WORKER_NUM (over all hosts), RANK_ID (when it knows it), MS_SCHED_HOST and MS_SCHED_PORT. Not run on Ascend.
"""

import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field

from mindrlhf import units
from mindrlhf.backend.comm.alone import AbsentPeers
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.membership import Membership, join
from mindrlhf.backend.comm.patience import MESSAGE_LIMIT_S, RANK_TIMEOUT_S
from mindrlhf.backend.comm.point_to_point import PeerGone
from mindrlhf.backend.comm.scheduler import run_scheduler
from mindrlhf.backend.comm.shared_memory import host
from mindrlhf.backend.comm.tcp import NO_CHANNELS, Channels
from mindrlhf.backend.device import SOCKETS, Device, DeviceOptions
from mindrlhf.backend.devices import find_device
from mindrlhf.backend.process.msrun import find_msrun
from mindrlhf.errors import UserError
from mindrlhf.workers.cores import usable_cores

# Limit for all processes to meet; MindSpore's own limit is half an hour.
START_TIMEOUT_S = 600

# A rank that ends because another rank is gone waits first: `msrun` kills all others when it sees that one has ended,
# and should see the one that failed. The others can print their sentences meanwhile.
FOLLOWING_S = 5

# Bytes of addresses that MindSpore reserves for one small graph.
LEAST_ADDRESSES = 9 * units.GIB // 4

_ABORTING = threading.Lock()  # never released by a rank that aborts: it prints one reason, and does not end well


@dataclass(frozen=True)
class World:
    """All processes of a job, as one of them sees them; a context manager.

    This process is `rank` in 0..size-1. The exit waits for all ranks, so that none ends while another still needs it.
    With several ranks, an exception is printed with the rank and ends the process at once, with code 2 for a
    `UserError` and 1 otherwise: an orderly exit would leave the others waiting. They notice (on CPU), print which rank
    is gone, and end. A single process passes exceptions on.

    The garbage collector ignores objects that exist at the beginning, mainly MindSpore's modules, until the end:
    MindSpore runs it before each graph that it compiles, and it would visit all of them.
    """

    rank: int
    size: int
    device_target: str
    hosts: tuple[int, ...] = ()  # for each rank its host's first rank, if ranks may share memory
    channels: Channels = field(default=NO_CHANNELS, compare=False, repr=False)  # on CPU
    membership: Membership | None = field(default=None, compare=False, repr=False)  # of several ranks on CPU

    def __enter__(self) -> "World":
        gc.freeze()
        return self

    def __exit__(self, kind, error, trace) -> None:
        gc.unfreeze()
        if self.size == 1:
            return
        orderly = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
        if error is not None and not orderly:
            self.abort(error)
        try:
            Collectives(self).barrier()
        except Exception as failure:
            self.abort(failure)
        with _ABORTING:  # the barrier may have all messages of a rank that is gone since
            if self.membership:
                self.membership.leave()

    def enter_phase(self, phase: str) -> None:
        """Note the work of this rank, which others name if it stands still."""
        if self.membership:
            self.membership.phase = phase

    def abort(self, error: BaseException) -> None:
        """Print the error and end this process at once, from any thread."""
        _ABORTING.acquire()
        code = 2 if isinstance(error, UserError) else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        elif isinstance(error, UserError | PeerGone):
            print(f"rank {self.rank} of {self.size}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"rank {self.rank} of {self.size} failed:", file=sys.stderr)
            traceback.print_exception(error)
        if isinstance(error, PeerGone):
            time.sleep(FOLLOWING_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def under_msrun() -> bool:
    """Test that `msrun` started this process. Needs no MindSpore."""
    return bool(os.environ.get("MS_ROLE"))


def started_workers() -> int:
    """Count the job's processes: 1, or `msrun`'s workers on all hosts. Needs no MindSpore."""
    return int(os.environ["MS_WORKER_NUM"]) if under_msrun() else 1


def is_first_process() -> bool:
    """Test for the one process that does one-off work before the launch."""
    return os.environ.get("MS_ROLE") != "MS_SCHED" and os.environ.get("RANK_ID", "0") == "0"


def launch(
    device_target: str,
    *,
    worker_count: int | None = None,
    layout_source: str = "parallel_config",
    context: DeviceOptions | None = None,
    rank_timeout_s: float = RANK_TIMEOUT_S,
) -> World:
    """Prepare this process to compute: threads, device, graph mode, communication.

    Call it before anything imports MindSpore: that import sets an unset OMP_NUM_THREADS to 1, but here it becomes this
    host's cores divided by its workers. In msrun's scheduler process this function never returns.

    device_target: `CPU` or `Ascend`. worker_count: number of processes that the layout needs, or None for any.
    layout_source: source of that number (file and key), for the message. context: options of the device.
    rank_timeout_s: on CPU, how long a rank that stands still is waited for.

    Raises UserError for another device_target, another number of workers, and Ascend without NPU or CANN.
    """
    role = os.environ.get("MS_ROLE")
    size = started_workers()
    if worker_count not in (None, size):
        raise UserError(
            f"{layout_source} makes the worker count {worker_count} (data_parallel x model_parallel x pipeline_stage), "
            f"but it is {size} here: change the layout or start with "
            f"`msrun --worker_num={worker_count} --local_worker_num={worker_count}`"
        )
    device = find_device(device_target)
    os.environ.setdefault("GLOG_v", "3")
    if role == "MS_SCHED":
        sys.exit(_schedule(device, size, rank_timeout_s))
    _check_addresses()
    _choose_threads(size, started_by_msrun=bool(role))
    _choose_device(device, context, alone=size == 1)
    if size == 1:
        return World(rank=0, size=1, device_target=device_target)
    if device.collectives != SOCKETS:
        return join_library(device.collectives, device.name)
    wanted = os.environ.get("RANK_ID")
    rank, members, channels, membership = join(
        size,
        int(wanted) if wanted else None,
        host(),
        start_limit_s=start_limit_s(),
        silence_limit_s=rank_timeout_s,
    )
    names = [member.host for member in members]
    hosts = tuple(other if name is None else names.index(name) for other, name in enumerate(names))
    world = World(rank, size, device_target, hosts, channels, membership)
    membership.watch(world.abort)
    return world


def launch_alone(device_target: str, rank: int, size: int, context: DeviceOptions | None = None) -> World:
    """Prepare this process to compile as one rank of a job, alone.

    The job's other processes are not there; its collectives are `comm.alone.AloneCollectives`. On a device with a
    library of collectives MindSpore only simulates it, as MS_SIMULATION_LEVEL says (1 by default): the device need not
    be there, and graphs compute nothing. Otherwise as `launch`.
    """
    device = find_device(device_target)
    os.environ.setdefault("GLOG_v", "3")
    _check_addresses()
    _choose_threads(1, started_by_msrun=False)
    by_library = device.collectives != SOCKETS
    if by_library:
        os.environ.setdefault("MS_SIMULATION_LEVEL", "1")
        os.environ.setdefault("DEVICE_ID", "0")
        os.environ |= {"RANK_SIZE": str(size), "RANK_ID": str(rank)}
    _choose_device(device, context, alone=False)
    if by_library and size > 1:
        from mindspore import communication

        communication.init(device.collectives)  # a simulated rank waits for no other
    nobody = AbsentPeers()
    channels = Channels(messages=nobody, gathers=nobody, sums=nobody)
    return World(rank, size, device_target, channels=channels)


def _check_addresses() -> None:
    """Raise UserError if the process may have fewer addresses than MindSpore takes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < LEAST_ADDRESSES:  # -1 is no limit
        found = f"ulimit -v allows this process {units.size(limit)} of addresses"
        raise UserError(f"{found}, and MindSpore alone takes {units.size(LEAST_ADDRESSES)}; raise that limit.")


def start_limit_s() -> float:
    """Return the limit for all processes to meet, in seconds; msrun's --cluster_time_out sets it."""
    return float(os.environ.setdefault("MS_TOPO_TIMEOUT", str(START_TIMEOUT_S)))


def _schedule(device: Device, size: int, rank_timeout_s: float) -> int:
    """Be msrun's scheduler process; returns its exit code."""
    if size == 1:  # a single worker needs none
        return 0
    if device.collectives != SOCKETS:
        _meet("mccl")
        return 0
    # Workers that are told to stop save their state first, and need the scheduler meanwhile; it ends with them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return 0 if run_scheduler(size, rank_timeout_s, start_limit_s()) else 1


def join_library(backend: str, device_target: str = "Ascend") -> World:
    """Meet the other processes through MindSpore: `Device.collectives`, `mccl` for tests on CPU."""
    from mindspore import communication

    # On CPU a collective gives up when it has waited this long for a slower rank; the default is 30 s.
    os.environ.setdefault("MS_NODE_TIMEOUT", str(MESSAGE_LIMIT_S))
    _meet(backend)
    return World(communication.get_rank(), communication.get_group_size(), device_target)


def _meet(backend: str) -> None:
    """Meet the other processes; raises UserError if some are missing after MS_TOPO_TIMEOUT."""
    from mindspore import communication

    limit = f"{start_limit_s():g}"  # also sets it for MindSpore
    try:
        communication.init(backend)
    except RuntimeError as error:
        if "not successfully spawned" not in str(error):
            raise
        me = os.environ["MS_ROLE"].removeprefix("MS_").lower() + f" {os.environ.get('RANK_ID', '')}".rstrip()
        raise UserError(
            f"not all of the {started_workers()} workers came within {limit} s ({me} on {socket.gethostname()} is "
            f"here): see the logs of the others, whether each host was started, and whether it reaches "
            f"{os.environ['MS_SCHED_HOST']}:{os.environ['MS_SCHED_PORT']}; MS_TOPO_TIMEOUT sets the limit"
        ) from error


def _choose_device(device: Device, options: DeviceOptions | None, alone: bool) -> None:
    import mindspore

    device.check_usable()
    # MindSpore refuses to set a device again once it is in use, even to the same one.
    if not device.in_host_memory or mindspore.get_current_device().device_target != device.name:
        mindspore.set_device(device.name, options.device_id if alone and options else None)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    if options:
        device.configure(options)


def _choose_threads(size: int, started_by_msrun: bool) -> None:
    """Set OMP_NUM_THREADS to this host's cores per worker, unless it is set."""
    cores = usable_cores()
    # Importing MindSpore sets an unset OMP_NUM_THREADS to 1, and msrun, which imports it, passes that on: the user's
    # value is in the environment that msrun itself was started with. Once msrun has gone, 1 counts as unset.
    msrun = find_msrun()
    if not started_by_msrun:
        wanted = "OMP_NUM_THREADS" in os.environ
        workers = 1
    elif msrun is None:
        wanted = os.environ.get("OMP_NUM_THREADS", "1") != "1"
        workers = size
    else:
        # msrun may have bound each worker to its own cores. It exports the number of workers on all hosts; the number
        # on this host is in its command line.
        wanted = "OMP_NUM_THREADS" in msrun.environment
        workers = 1 if cores != msrun.cores else msrun.local_workers or size
    if not wanted:
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(cores) // workers))


def operator_threads() -> int:
    """Return the threads of this process's operators, as the compiled ones count them.

    It is the first number of OMP_NUM_THREADS, which may be a list; without a number it is that of cores.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else len(usable_cores())


def crowding(processes: int) -> float:
    """Return how many threads of so many processes share a core.

    It is 1 if each has one of its own.
    """
    return max(1.0, processes * operator_threads() / len(usable_cores()))
