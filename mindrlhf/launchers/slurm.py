"""Job file for Slurm: one task on each node.

msrun starts the ranks of a node.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.backend.process.start import msrun_words
from mindrlhf.errors import UserError
from mindrlhf.launchers.ranks import RankJob

OURS = ("nodes", "ntasks-per-node", "job-name", "exclusive")  # options of sbatch that this file sets

# The first node of the list runs this script, and the scheduler of the ranks. Ranks get all cores of their node.
SCRIPT = """\
#!/usr/bin/env bash
{directives}
# Written by `mindrlhf launch --with slurm`: {workers} ranks, {per_node} on each node. Submit it with sbatch.
set -uo pipefail

cd {folder}
export PATH={binaries}:$PATH
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
export MASTER_ADDR=${{MASTER_ADDR:-$(head -n 1 <<<"$hosts")}}
export MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}
trap 'exit 143' TERM # after the ranks have saved and stopped: no further start

# A rank that fails ends its node's msrun, and that ends the others.
code=1
for start in $(seq 1 {starts}); do
    export LOGS={logs}/$SLURM_JOB_ID/start_$start
    code=0
    srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
        exec python "${{@:1:{count}}}" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \\
            --node_rank="$SLURM_PROCID" --log_dir="$LOGS/node_$SLURM_PROCID" python "${{@:{after}}}"
    ' ranks \\
        {options} \\
        {words} || code=$?
    ((code)) || break
    echo "start $start of {starts} ended with code $code; logs are in $LOGS" >&2
done
exit "$code"
"""


def slurm_file(job: RankJob, name: str, directives: Sequence[str]) -> str:
    """Write the sbatch script of a job.

    name: of the job. directives: further options of sbatch, as KEY=VALUE. Raises UserError for one that is set here.
    """
    ours = [f"job-name={name}", f"nodes={job.nodes}", "ntasks-per-node=1", "exclusive"]
    for one in directives:
        key, equals, _ = one.partition("=")
        if key in OURS or not equals or "\n" in one:
            right = (
                "give --workers, --per_node and --name; nodes are exclusive"
                if key in OURS
                else "give KEY=VALUE, such as time=24:00:00"
            )
            raise UserError(f"--sbatch {one}: {right}.")
    options = msrun_words(job.workers, job.per_node)
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH --{one}" for one in [*ours, *directives]),
        workers=job.workers,
        per_node=job.per_node,
        folder=shlex.quote(str(Path.cwd())),
        binaries=shlex.quote(str(Path(sys.executable).parent)),
        starts=job.retries + 1,
        logs=shlex.quote(str(job.logs)),
        count=len(options),
        after=len(options) + 1,
        options=shlex.join(options),
        words=shlex.join(job.words),
    )
