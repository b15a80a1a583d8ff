"""Job file for Kubernetes: a Job with an indexed pod for each node.

msrun starts the ranks of a pod.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mindrlhf.backend.process.start import msrun_words
from mindrlhf.launchers.ranks import RankJob, pair_of

PORT = 8118  # of the ranks' scheduler, in the first pod
SHARED_MEMORY = "/dev/shm"  # ranks of a pod exchange arrays there, and a container has 64 MB of it
INDEX = "JOB_COMPLETION_INDEX"  # a pod's number, which Kubernetes sets

# A pod is found by its name only after it has begun.
START = """\
until getent hosts {first} >/dev/null; do sleep 1; done
exec python {options} --master_addr={first} --master_port={port} --node_rank="${index}" \\
    --log_dir={logs}/node_"${index}" python {words}
"""


class _Dumper(yaml.SafeDumper):
    """Writer of YAML in which a script keeps its lines."""

    def represent_str(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def kubernetes_file(
    job: RankJob, name: str, image: str, volumes: Sequence[str] = (), resources: Sequence[str] = ()
) -> str:
    """Write the Service and the Job of several ranks as YAML.

    name: of both. volumes: claims with the folders at which they appear, as CLAIM:/FOLDER. resources: of a pod, as
    NAME=COUNT. Raises UserError for a volume or resource in another form.
    """
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        # Without an address of its own: each pod has one, also before it is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    starts = job.retries + 1
    running = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            # All pods of a failed start count, and those that come back before the last one of it has gone.
            "backoffLimit": job.nodes * starts if job.retries else 0,
            "template": {"spec": _pod(job, name, image, volumes, resources)},
        },
    }
    return yaml.dump_all([service, running], Dumper=_Dumper, sort_keys=False)


def _pod(job: RankJob, name: str, image: str, volumes: Sequence[str], resources: Sequence[str]) -> Mapping[str, Any]:
    first = f"{name}-0.{name}"
    script = START.format(
        first=first,
        port=PORT,
        index=INDEX,
        options=shlex.join(msrun_words(job.workers, job.per_node)),
        logs=shlex.quote(str(job.logs)),
        words=shlex.join(job.words),
    )
    claims = [pair_of("--volume", one, ":", "CLAIM:/FOLDER") for one in volumes]
    limits = dict(pair_of("--resource", one, "=", "NAME=COUNT") for one in resources)
    mounts = {f"volume-{number}": (claim, folder) for number, (claim, folder) in enumerate(claims)}
    container = {
        "name": "ranks",
        "image": image,
        "command": ["bash", "-c", script],
        "resources": {"limits": limits} if limits else {},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": SHARED_MEMORY},
            *({"name": volume, "mountPath": folder} for volume, (_, folder) in mounts.items()),
        ],
    }
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *({"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, (claim, _) in mounts.items()),
        ],
    }
