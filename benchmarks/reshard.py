"""Times the online reshard beside the way through files, on the same weights and ranks in the same run.

msrun --worker_num=4 --local_worker_num=4 --join=True benchmarks/reshard.py --train tp2pp2 --infer dp2tp2

online: from the parameters that train to those that generate, as in a job: a parameter of which a rank holds the same
part on both sides is one and the same. copied: the same with nothing shared.
files: every rank saves its shard, makes its shard of the other layout from all of these (the planner of `mindrlhf
transform`, on all ranks at the same time), and loads it into its parameters.
Each time is that of the slowest rank. All ways have to end in the same bits. A round that does not count comes first.

msrun --worker_num=2 --local_worker_num=2 --join=True benchmarks/reshard.py --apart --train dp1 --infer dp1 --layers 55

--apart: the layout after is on ranks behind those of the layout before, as in a split job. There are no files then, and
the rate is beside that at which ranks copy the same bytes within their memory, all at once and one alone.
"""

import argparse
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World, launch
from mindrlhf.checkpoint.safetensors_file import write_safetensors
from mindrlhf.checkpoint.transform import write_ranks
from mindrlhf.checkpoint.weight_source import index_weights, open_sharded
from mindrlhf.configs.model import ModelConfig
from mindrlhf.files.atomic import atomic_folder
from mindrlhf.parallel.layout import Layout, model_layout, sliced_shape
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.online import OnlineReshard
from mindrlhf.reshard.plan import Plan, plan

STEPS = ("save", "transform", "load")


def mesh_of(text: str) -> Mesh:
    """Parse a mesh such as `dp2tp4`."""
    if not re.fullmatch(r"((dp|tp|pp)\d+)+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no layout like dp2tp4 or tp2pp2")
    return Mesh(**{axis: int(length) for axis, length in re.findall(r"(dp|tp|pp)(\d+)", text)})


def name_of(mesh: Mesh) -> str:
    """Format a mesh as `mesh_of` reads it, without axes of length one."""
    lengths = {axis: getattr(mesh, axis) for axis in ("dp", "tp", "pp")}
    return "".join(f"{axis}{length}" for axis, length in lengths.items() if length > 1) or "dp1"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=mesh_of, default="tp2pp2", help="layout before (default: %(default)s)")
    parser.add_argument("--infer", type=mesh_of, default="dp2tp2", help="layout after (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers of 8.7 M parameters (default: 8)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument("--apart", action="store_true", help="the layout after is on other ranks")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    return parser.parse_args()


def model_of(layers: int) -> ModelConfig:
    """Build a model of Qwen2's shape, width 768, embedding tied."""
    return ModelConfig(
        vocab_size=16384, hidden_size=768, intermediate_size=3072, num_layers=layers, num_heads=12, num_kv_heads=4,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip


class Bench:
    """One rank: its parameters in both layouts, and both ways from one to the other."""

    def __init__(self, world: World, source: Layout, destination: Layout, folder: Path):
        self.rank, self.folder = world.rank, folder
        self.collectives = Collectives(world)
        self.source, self.destination = source, destination
        self.before, self.after = self._shards(source), self._shards(destination)
        self.plan = plan(source, destination)
        both = self.before.keys() & self.after.keys()
        same = {n: self.before[n] for n in both if source.slices(self.rank, n) == destination.slices(self.rank, n)}
        self.ways = {
            "online": OnlineReshard(self.plan, self.collectives, self.before, self.after | same),
            "copied": OnlineReshard(self.plan, self.collectives, self.before, self.after),
        }

    def _shards(self, layout: Layout) -> dict:
        """Make new Parameters, filled with numbers that differ by place and rank."""
        from mindspore import Parameter, Tensor

        parameters = {}
        for name, part in layout.shards(self.rank):
            start = float(len(parameters) + 100 * part[0].start)
            values = np.arange(prod(sliced_shape(part)), dtype=np.float32).reshape(sliced_shape(part)) + start
            parameters[name] = Parameter(Tensor(values), name=name)
        return parameters

    def slowest(self, step: Callable[[], None]) -> float:
        """Measure seconds of a step on the slowest rank; all ranks begin together."""
        self.collectives.barrier()
        start = time.perf_counter()
        step()
        return float(self.collectives.all_reduce_max(np.array(time.perf_counter() - start)))

    def save(self) -> None:
        with atomic_folder(self.folder / "train" / f"rank_{self.rank}") as folder:
            shapes = [(name, parameter.shape) for name, parameter in self.before.items()]
            arrays = map(backend.read, self.before.values())
            write_safetensors(folder / "weights.safetensors", shapes, arrays, "float32", {})

    def transform(self) -> None:
        write_ranks(
            open_sharded(self.folder / "train", self.source),
            self.destination,
            self.folder / "infer",
            prefix="weights_",
            file_format="safetensors",
            advance=lambda count: None,
            only_rank=self.rank,
        )

    def load(self) -> None:
        stored = index_weights(self.folder / "infer" / f"rank_{self.rank}")
        for name, parameter in self.after.items():
            backend.write(parameter, stored[name].read())

    def through_files(self) -> dict[str, float]:
        """Measure seconds of each step; leaves no file."""
        seconds = {step: self.slowest(getattr(self, step)) for step in STEPS}
        self.collectives.barrier()
        if self.rank == 0:
            for name in ("train", "infer"):
                shutil.rmtree(self.folder / name)
        return seconds

    def round(self) -> dict[str, float]:
        """Measure seconds of all ways. Raises RuntimeError if two ways end in different bits."""
        seconds = self.through_files()
        expected = {name: backend.read(parameter).copy() for name, parameter in self.after.items()}
        for way, reshard in self.ways.items():
            for parameter in self.after.values():
                backend.write(parameter, np.nan)
            seconds[way] = self.slowest(reshard.run)
            found = reshard.destination
            wrong = [name for name, array in expected.items() if backend.read(found[name]).tobytes() != array.tobytes()]
            if wrong:
                raise RuntimeError(f"rank {self.rank}: files and {way} differ in {wrong}")
        return seconds


class ApartBench(Bench):
    """One rank of a split job: it has its parameters in one of the layouts."""

    def round(self) -> dict[str, float]:
        """Measure seconds of the way between the sides, and of copies. Raises an error for a wrong checksum."""
        for parameter in self.after.values():
            backend.write(parameter, np.nan)
        reshard = self.ways["copied"]
        seconds = {"online": self.slowest(reshard.run)}
        reshard.verify()
        arrays = [backend.read(parameter) for parameter in (self.before or self.after).values()]
        copies = [array.copy() for array in arrays]
        for name, alone in (("all copy", False), ("one copies", True)):
            seconds[name] = self.slowest(lambda alone=alone: self.copy(arrays, copies, alone))
        return seconds

    def copy(self, arrays: list[np.ndarray], copies: list[np.ndarray], alone: bool) -> None:
        """Copy arrays over others; on the first rank only, if `alone`."""
        for array, other in zip(arrays, copies, strict=True) if self.rank == 0 or not alone else ():
            np.copyto(other, array)


def report_apart(made: Plan, rounds: list[dict[str, float]]) -> None:
    """Print the rates of each round, and their medians."""
    nbytes = sum(transfer.nbytes for transfer in made.transfers)
    rates = [{name: nbytes / seconds / 1e9 for name, seconds in row.items()} for row in rounds]
    print(f"{nbytes / 1e6:,.0f} MB between ranks, GB/s" + "".join(f"{name:>12}" for name in rates[0]))
    middle = {name: statistics.median(row[name] for row in rates) for name in rates[0]}
    for label, row in [*enumerate(rates, 1), ("median", middle)]:
        print(f"{label!s:>29}" + "".join(f"{row[name]:>12.2f}" for name in row))
    print(f"share of one rank's copying: {middle['online'] / middle['one copies']:.2f}", flush=True)


def report(made: Plan, rounds: list[dict[str, float]]) -> None:
    """Print one line per round, then medians."""
    for row in rounds:
        row["files"] = sum(row[step] for step in STEPS)
        row["ratio"] = row["files"] / row["online"]
    medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    columns = ("online", "copied", "files", *STEPS)
    print("round " + "".join(f"{name:>11}" for name in columns) + "  files / online")
    for label, row in [*enumerate(rounds, 1), ("median", medians)]:
        print(f"{label!s:>6}" + "".join(f"{row[name]:>10.3f}s" for name in columns) + f"{row['ratio']:>15.1f}")
    moved, copied = (sum(transfer.nbytes for transfer in part) for part in (made.transfers, made.copies))
    print(
        f"online: {moved / 1e6:,.0f} MB between ranks, {moved / medians['online'] / 1e9:.2f} GB/s; "
        f"copied: {copied / 1e6:,.0f} MB more within ranks, {(moved + copied) / medians['copied'] / 1e9:.2f} GB/s",
        flush=True,
    )


def main() -> None:
    args = arguments()
    model = model_of(args.layers)
    meshes, workers = [args.train, args.infer], args.train.size
    if args.apart:
        workers += args.infer.size
        meshes[1] = replace(args.infer, ranks=tuple(range(args.train.size, workers)))
    layouts = [model_layout(model, mesh, vocab_emb_dp=False) for mesh in meshes]
    with launch("CPU", worker_count=workers, layout_source="--train") as world:
        own = Collectives(world).broadcast_object(tempfile.mkdtemp(dir=args.folder) if world.rank == 0 else None, 0)
        try:
            bench = (ApartBench if args.apart else Bench)(world, *layouts, Path(own))
            rounds = [bench.round() for _ in range(args.rounds + 1)][1:]
            if world.rank == 0:
                size = sum(prod(shape) for shape in layouts[0].shapes.values())
                print(f"{size / 1e6:.0f} M float32 parameters, {name_of(args.train)} -> {name_of(args.infer)}")
                (report_apart if args.apart else report)(bench.plan, rounds)
        finally:
            if world.rank == 0:
                shutil.rmtree(own, ignore_errors=True)


if __name__ == "__main__":
    main()
