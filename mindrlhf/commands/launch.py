"""`mindrlhf launch`: the ranks of a training by msrun, Slurm, Ray or Kubernetes."""

import argparse
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.launchers.kubernetes import kubernetes_file
from mindrlhf.launchers.msrun import launch_with_msrun
from mindrlhf.launchers.ranks import RankJob, pair_of, python_words
from mindrlhf.launchers.ray_ranks import CPU, launch_with_ray
from mindrlhf.launchers.slurm import slurm_file

MSRUN, SLURM, RAY, KUBERNETES = LAUNCHERS = ("msrun", "slurm", "ray", "k8s")
LOGS = Path("out/launch")
NAME = "mindrlhf"
# Flag -> the launchers that it is for; the others are for all.
BELONGS = {
    "master_addr": (MSRUN,),
    "master_port": (MSRUN,),
    "node_rank": (MSRUN,),
    "per_node": (MSRUN, SLURM, KUBERNETES),
    "output": (SLURM, KUBERNETES),
    "name": (SLURM, KUBERNETES),
    "sbatch": (SLURM,),
    "image": (KUBERNETES,),
    "volume": (KUBERNETES,),
    "resource": (KUBERNETES, RAY),
    "ray_address": (RAY,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--with", dest="launcher", choices=LAUNCHERS, default=MSRUN, help=f"what starts the ranks (default {MSRUN})")
    add("--workers", type=int, required=True, help="ranks on all nodes together")
    add("--per_node", type=int, help="ranks on each node (default: all of them on one)")
    again = "starts after a rank has failed, each from the last checkpoint of the training"
    add("--retries", type=int, default=0, help=f"further {again} (default 0)")
    add("--log_dir", type=Path, default=LOGS, help=f"folder of the ranks' logs, by start (default {LOGS})")
    add("--master_addr", help="msrun on several nodes: address of the node with --node_rank 0")
    add("--master_port", type=int, help="msrun: port of the scheduler (default 8118)")
    add("--node_rank", type=int, help="msrun on several nodes: number of this one, from 0")
    add("--output", type=Path, metavar="FILE", help="slurm, k8s: write the job file here (default: print it)")
    add("--name", help=f"slurm, k8s: name of the job (default {NAME})")
    add("--sbatch", action="append", metavar="KEY=VALUE", help="slurm: an option of sbatch, such as time=24:00:00")
    add("--image", help="k8s: the container's image, as docker/Dockerfile.ascend makes it")
    add("--volume", action="append", metavar="CLAIM:/FOLDER", help="k8s: a volume claim that all pods see in a folder")
    held = "k8s: of a pod, such as huawei.com/Ascend910=8; ray: of a rank, such as NPU=1 (default CPU=1)"
    add("--resource", action="append", metavar="NAME=COUNT", help=held)
    add(
        "--ray_address", help="ray: the cluster, or auto for this machine's (default: RAY_ADDRESS, or one started here)"
    )
    add("ranks", nargs=argparse.REMAINDER, metavar="COMMAND", help="`train` or `sft` with flags, or a script")


def run(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them, or write a job file."""
    job = read_job(args)
    if args.launcher == MSRUN:
        return launch_with_msrun(job, args.master_addr, args.master_port, args.node_rank)
    if args.launcher == RAY:
        return launch_with_ray(job, args.ray_address, ray_resources(args.resource or []))
    name = args.name or NAME
    if args.launcher == SLURM:
        text = slurm_file(job, name, args.sbatch or [])
    else:
        if not args.image:
            raise UserError("--image is missing; give the name of the container's image.")
        text = kubernetes_file(job, name, args.image, args.volume or [], args.resource or [])
    if args.output is None:
        print(text, end="")
        return 0
    with atomic_file(args.output) as path:
        path.write_text(text, encoding="utf-8")
    starts = "sbatch" if args.launcher == SLURM else "kubectl apply -f"
    print(f"{args.output}: {job.workers} ranks on {job.nodes} nodes; start them with `{starts} {args.output}`")
    return 0


def read_job(args: argparse.Namespace) -> RankJob:
    """Check the flags. Raises UserError."""
    for flag, launchers in BELONGS.items():
        if getattr(args, flag) is not None and args.launcher not in launchers:
            raise UserError(f"--{flag} is for --with {' or '.join(launchers)}; take it out.")
    per_node = args.workers if args.per_node is None else args.per_node
    if args.workers < 1 or per_node < 1 or args.retries < 0:
        raise UserError("--workers and --per_node should be 1 or more, and --retries 0 or more.")
    if args.workers % per_node:
        raise UserError(f"--workers {args.workers} is not a multiple of --per_node {per_node}.")
    nodes = args.workers // per_node
    if args.launcher == MSRUN and nodes > 1 and (args.node_rank is None or args.master_addr is None):
        raise UserError(f"--per_node {per_node} makes {nodes} nodes; give --node_rank and --master_addr on each.")
    if args.node_rank is not None and not 0 <= args.node_rank < nodes:
        raise UserError(f"--node_rank {args.node_rank}: there are {nodes} nodes; give 0 to {nodes - 1}.")
    words = python_words(args.ranks, resumes=args.retries > 0)
    if args.launcher in (MSRUN, RAY) and words[0].endswith(".py") and not Path(words[0]).is_file():
        raise UserError(f"{words[0]}: there is no such script.")
    return RankJob(words, args.workers, per_node, args.retries, args.log_dir)


def ray_resources(given: list[str]) -> dict[str, float]:
    """Read NAME=COUNT, of one rank. Raises UserError."""
    found = {}
    form = "NAME=COUNT, such as NPU=1"
    for one in given or [f"{CPU}=1"]:
        name, count = pair_of("--resource", one, "=", form)
        try:
            found[name] = float(count)
        except ValueError:
            raise UserError(f"--resource {one}: give {form}.") from None
    return found
