"""Start of a job's ranks on this host by msrun."""

import os
import sys
import time

import psutil

from mindrlhf.backend.process.start import ending, msrun_words, own_environment, running
from mindrlhf.launchers.ranks import Ending, RankJob, StopRequests, start_until_it_ends, stop_requests

POLL_S = 0.2
SHOWS_LOGS = "tail"  # program by which msrun shows the ranks' logs


def launch_with_msrun(job: RankJob, address: str | None, port: int | None, node_rank: int | None) -> int:
    """Start the ranks of this host and wait for them; returns the exit code.

    address, port, node_rank: as msrun takes them, None for its defaults. Without retries this process becomes msrun.
    """

    def command(attempt: int) -> list[str]:
        logs = job.logs_of(attempt) if node_rank is None else job.logs_of(attempt) / f"node_{node_rank}"
        options = {"master_addr": address, "master_port": port, "node_rank": node_rank, "log_dir": logs}
        return [sys.executable, *msrun_words(job.workers, job.per_node, **options), "python", *job.words]

    if not job.retries:
        sys.stdout.flush()
        os.execve(sys.executable, command(0), own_environment())
    with stop_requests() as requests:
        return start_until_it_ends(lambda attempt: _run(command(attempt), requests), job.retries)


def _run(command: list[str], requests: StopRequests) -> Ending:
    """Run msrun to its end.

    A first signal ends msrun, whose ranks then save and stop by themselves; a second one ends them.
    """
    with running(command) as process:
        family: list[psutil.Process] = []
        while process.poll() is None:
            if requests.count and not family:
                children = psutil.Process(process.pid).children()
                family = [child for child in children if child.name() != SHOWS_LOGS]  # which ends with the block
                process.terminate()
            if requests.count > 1:
                break
            time.sleep(POLL_S)
        while requests.count == 1 and any(member.is_running() for member in family):
            time.sleep(POLL_S)
    if requests.count:
        return Ending(0 if requests.count == 1 else 1, "stopped by a signal", final=True)
    return Ending(process.returncode, f"msrun {ending(process.returncode)}")
