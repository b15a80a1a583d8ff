"""`mindrlhf dry-run`: the graphs of one rank, without the others and without weights."""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.backend.process.launch import launch_alone, under_msrun
from mindrlhf.checkpoint.tokenizer import open_tokenizer, stop_ids
from mindrlhf.commands import train
from mindrlhf.commands.memory_plan import add_length_arguments, read_work
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.memory.estimate import rank_plan
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import POLICY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train.add_arguments(parser)
    add_length_arguments(parser)
    add = parser.add_argument
    add("--rank", type=int, default=0, metavar="R", help="rank whose graphs are compiled (default 0)")
    asked = "number of ranks that both model YAMLs ask for"
    add("--ranks", type=int, metavar="N", help=f"refuse a job of another number of ranks (default: the {asked})")


def run(args: argparse.Namespace) -> None:
    """Compile a rank's graphs; prints a line for each, and one of JSON."""
    if under_msrun():
        raise UserError("a dry run has one process for each rank, and no msrun; start it without.")
    flags = TrainFlags.of(args)
    work, *_ = read_work(flags, prompt_tokens=args.prompt_tokens, image_tokens=args.image_tokens)
    size = len(work.ranks)
    check_ranks(work, args.rank, args.ranks)
    yaml = work.train if args.rank in work.trains else work.infer
    device = yaml.context.device
    start = time.perf_counter()
    world = launch_alone(device.name, args.rank, size, yaml.context)
    from mindrlhf.acceptance.rehearsal import rehearse
    from mindrlhf.backend.compile.graph import timed
    from mindrlhf.metrics.performance import peak_resident_bytes

    graphs: list[dict[str, object]] = []

    def told(name: str, seconds: float) -> None:
        graphs.append({"name": name, "seconds": round(seconds, 2)})
        print(f"{name:20} {seconds:8.2f} s", flush=True)

    with timed(told), tempfile.TemporaryDirectory() as folder:
        rehearse(work, world, Path(folder), read_stop_ids(work, flags))
    figures = {
        "rank": args.rank,
        "ranks": size,
        "device": device.name,
        "graphs": graphs,
        "seconds": round(time.perf_counter() - start, 1),
        "planned_bytes": rank_plan(work, args.rank).peak,
        "process_bytes": peak_resident_bytes(),
    }
    print(json.dumps(figures), flush=True)


def read_stop_ids(work: Work, flags: TrainFlags) -> Sequence[int]:
    """Collect the tokens that end a response; without a tokenizer, the model's alone."""
    policy = work.roles[POLICY.name]
    if flags.tokenizer_path or flags.vocab_path or policy.path:
        return stop_ids(open_tokenizer(flags, policy.path), policy.model)
    return policy.model.eos_token_ids or (0,)  # any one, which the model has


def check_ranks(work: Work, rank: int, ranks: int | None) -> None:
    """Raise UserError for a missing rank, or another number of ranks."""
    size = len(work.ranks)
    if ranks not in (None, size):
        raise UserError(f"--ranks is {ranks}, and {work.train.path} and {work.infer.path} ask for {size}; give {size}.")
    if rank not in work.ranks:
        raise UserError(f"--rank is {rank}, and the job has the ranks 0 to {size - 1}; give one of them.")
