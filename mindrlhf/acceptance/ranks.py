"""Checks that several ranks run together.

Collectives of every kind, and weights that change layout.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf import backend
from mindrlhf.acceptance.checks import TOLERANCES, Check, Finding, Trial, compared, same_bits
from mindrlhf.acceptance.graphs import Once, ThereAndBack, arrays_of, tensors
from mindrlhf.acceptance.inputs import numbers, tiny_models, tiny_weights, whole_numbers
from mindrlhf.backend.comm import graph_collectives
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.graph_collectives import (
    CopyToGroup,
    GatherRows,
    ReduceFromGroup,
    ScatterRows,
    StackOverGroup,
)
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml, ParallelSettings
from mindrlhf.models.families import DEFAULT
from mindrlhf.parallel.layout import Layout, sliced_shape, yaml_layout
from mindrlhf.parallel.partition import Group
from mindrlhf.reshard.online import OnlineReshard
from mindrlhf.reshard.plan import plan

ROWS, WIDTH = 8, 32  # of each rank's array; the rows are divided among the ranks
FAMILY = DEFAULT.name  # of the model that changes layout: its head is tied, so that it lies in two stages


def groups_of(size: int, rank: int) -> list[Group]:
    """List the groups of a rank.

    All ranks; neighbours and every second rank, if these are others.
    """
    groups = [tuple(range(size))]
    if size >= 4 and size % 2 == 0:
        groups.append((rank // 2 * 2, rank // 2 * 2 + 1))
        groups.append(tuple(range(rank % 2, size, 2)))
    return groups


def _named(group: Group) -> str:
    return f"ranks {', '.join(map(str, group))}"


def _of(name: str, rank: int) -> np.ndarray:
    """Draw the array that a rank gives: every rank can draw every other's."""
    return numbers(f"{name} of rank {rank}", ROWS, WIDTH)


def check_sums(trial: Trial) -> Iterator[Finding]:
    """Check sums and maxima of arrays on the host."""
    every = Collectives(trial.world)
    rank = trial.world.rank
    for group in groups_of(every.size, rank):
        for dtype in (np.float32, np.float64):
            gathered = [_of("sums", other).astype(dtype) for other in group]
            answer = sum(array.astype(np.float64) for array in gathered)
            found = every.all_reduce_sum(_of("sums", rank).astype(dtype), group)
            part = f"{np.dtype(dtype).name} over {_named(group)}"
            yield compared(f"sum of {part}", found, answer, TOLERANCES["float32"]["operators"])
            largest = every.all_reduce_max(_of("sums", rank).astype(dtype), group)
            yield same_bits(f"maximum of {part}", largest, np.max(gathered, 0))


def check_gathers(trial: Trial) -> Iterator[Finding]:
    """Check arrays of every rank in their order, objects, and one rank's object."""
    every = Collectives(trial.world)
    rank = trial.world.rank
    for group in groups_of(every.size, rank):
        for dtype in ("int8", "int32", "float16", "float32", "float64"):
            drawn = [whole_numbers(f"gathers of rank {other}", 100, 3, 5).astype(dtype) for other in group]
            found = every.all_gather(drawn[group.index(rank)], group)
            yield same_bits(f"{dtype} over {_named(group)}", found, np.stack(drawn))
        long = [numbers(f"long gathers of rank {other}", 50_000) for other in group]
        found = every.all_gather(long[group.index(rank)], group)
        yield same_bits(f"200 kB over {_named(group)}", found, np.stack(long))
        objects = every.all_gather_object({"rank": rank, "text": "x" * rank}, group)
        right = objects == [{"rank": other, "text": "x" * other} for other in group]
        yield Finding(f"objects over {_named(group)}", float(not right), 0.0, "" if right else f"{objects}"[:200])
        root = group[-1]
        value = every.broadcast_object(f"of {rank}", root, group)
        yield Finding(f"object of rank {root} over {_named(group)}", float(value != f"of {root}"), 0.0)
    every.barrier()


def check_messages(trial: Trial) -> Iterator[Finding]:
    """Check messages from each rank to the next, and an exchange among all."""
    every = Collectives(trial.world)
    rank = trial.world.rank
    peers = every.peers()
    after = (rank + 1) % every.size
    before = (rank - 1) % every.size
    for turn in range(2):  # two on their way, which must arrive in order
        peers.send(_of(f"message {turn}", rank), after)
    for turn in range(2):
        found = peers.receive(np.empty((ROWS, WIDTH), np.float32), before)
        yield same_bits(f"message {turn + 1} of rank {before}", found, _of(f"message {turn}", before))
    others = [other for other in range(every.size) if other != rank]
    incoming = {other: np.empty((ROWS, WIDTH), np.float32) for other in others}
    outgoing = {other: [_of(f"exchange with {other}", rank)] for other in others}
    peers.exchange(outgoing, {other: [array] for other, array in incoming.items()})
    for other, array in incoming.items():
        yield same_bits(f"exchange with rank {other}", array, _of(f"exchange with {rank}", other))


class _Reduced(nn.Cell):
    def __init__(self, collectives: Collectives, group: Group):
        super().__init__(auto_prefix=False)
        self.all_reduce = graph_collectives.graph_all_reduce(collectives, group)

    def construct(self, x):
        return self.all_reduce(x)


class _One(nn.Cell):
    """Cell with one output, as a tuple."""

    def __init__(self, cell: nn.Cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

    def construct(self, x):
        return (self.cell(x),)


def check_graph_sums(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check sums inside of graphs, forward and backward.

    At the ends of parallel regions, too.
    """
    every = Collectives(trial.world)
    rank = trial.world.rank
    tolerance = TOLERANCES[dtype]["operators"]
    for group in groups_of(every.size, rank):
        x = _of("graph", rank)
        slopes = _of("slopes", rank)
        total = sum(_of("graph", other).astype(np.float64) for other in group)
        total_slopes = sum(_of("slopes", other).astype(np.float64) for other in group)
        cases = {
            "sum": (_Reduced, total, total_slopes),
            "entry of a parallel region": (CopyToGroup, x, total_slopes),
            "exit of a parallel region": (ReduceFromGroup, total, slopes),
        }
        for name, (kind, answer, gradient) in cases.items():
            graph = ThereAndBack(kind(every, group), dtype, 1)
            out, d_x = arrays_of(graph(*tensors(slopes, x)))
            yield compared(f"{name} over {_named(group)}", out, answer, tolerance)
            yield compared(f"gradient of the {name} over {_named(group)}", d_x, gradient, tolerance)


def check_graph_rows(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check stacks, and rows that are gathered and scattered, inside of graphs."""
    every = Collectives(trial.world)
    rank = trial.world.rank
    tolerance = TOLERANCES[dtype]["operators"]
    for group in groups_of(every.size, rank):
        xs = [_of("rows", other) for other in group]
        place = group.index(rank)
        share = ROWS // len(group)
        own = slice(place * share, (place + 1) * share)
        stack = Once(_One(StackOverGroup(every, group)))
        (stacked,) = arrays_of(stack(*tensors(xs[place])))
        yield same_bits(f"stack over {_named(group)}", stacked, np.stack(xs))

        parts = [x[:share] for x in xs]
        whole_slopes = [_of("row slopes", other) for other in group]
        summed = sum(slopes.astype(np.float64) for slopes in whole_slopes)
        graph = ThereAndBack(GatherRows(every, group), dtype, 1)
        out, d_x = arrays_of(graph(*tensors(whole_slopes[place][: share * len(group)], parts[place])))
        yield compared(f"rows gathered over {_named(group)}", out, np.concatenate(parts), tolerance)
        yield compared(f"gradient of rows gathered over {_named(group)}", d_x, summed[own], tolerance)

        graph = ThereAndBack(ScatterRows(every, group), dtype, 1)
        out, d_x = arrays_of(graph(*tensors(whole_slopes[place][:share], xs[place])))
        total = sum(x.astype(np.float64) for x in xs)
        yield compared(f"rows scattered over {_named(group)}", out, total[own], tolerance)
        gathered = np.concatenate([slopes[:share] for slopes in whole_slopes])
        yield compared(f"gradient of rows scattered over {_named(group)}", d_x, gathered, tolerance)


def layouts(size: int) -> list[tuple[int, int, int]]:
    """List (dp, tp, pp) of a job of `size` ranks.

    With at most two stages, and four tensor-parallel ranks for two key-value heads.
    """
    axes = [count for count in (1, 2, 4, 8) if size % count == 0]
    return [(dp, tp, pp) for dp, tp, pp in product(axes, axes, (1, 2)) if dp * tp * pp == size and tp <= 4]


def layout_of(sizes: tuple[int, int, int], model: ModelConfig, trial: Trial) -> Layout:
    """Read the layout of a model YAML's `parallel_config`."""
    dp, tp, pp = sizes
    parallel = ParallelSettings(data_parallel=dp, model_parallel=tp, pipeline_stage=pp, micro_batch_num=pp)
    context = ContextSettings(device_target=trial.device.name)
    return yaml_layout(ModelYaml(path="acceptance", parallel=parallel, context=context), model)


def check_reshard(trial: Trial) -> Iterator[Finding]:
    """Check weights that go from each training layout to each generating one."""
    every = Collectives(trial.world)
    rank = trial.world.rank
    model = tiny_models()[FAMILY]
    weights = tiny_weights(model, FAMILY)
    sizes = layouts(every.size)
    for source, destination in product(sizes, [one for one in sizes if one[2] == 1]):
        if source == destination:
            continue
        before = layout_of(source, model, trial)
        after = layout_of(destination, model, trial)
        held = {
            name: Parameter(Tensor(np.ascontiguousarray(weights[name][part])), name=name)
            for name, part in before.shards(rank)
        }
        made = {
            name: Parameter(Tensor(np.zeros(sliced_shape(part), np.float32)), name=name)
            for name, part in after.shards(rank)
        }
        OnlineReshard(plan(before, after), every, held, made).run()
        wrong = [
            name
            for name, part in after.shards(rank)
            if backend.read(made[name]).tobytes() != np.ascontiguousarray(weights[name][part]).tobytes()
        ]
        names = [f"dp {dp} x tp {tp} x pp {pp}" for dp, tp, pp in (source, destination)]
        yield Finding(" to ".join(names), float(len(wrong)), 0.0, f"wrong: {', '.join(wrong)}"[:300] if wrong else "")


def rank_checks(dtypes: Sequence[str], ranks: int) -> Iterator[Check]:
    """List the checks of `ranks` ranks, which take activations of these dtypes."""

    def of_dtype(check: Callable[[str, Trial], Iterator[Finding]], dtype: str) -> Callable[[Trial], Iterator[Finding]]:
        return lambda trial: check(dtype, trial)

    plain = {"sums": check_sums, "gathers": check_gathers}
    among = {"messages": check_messages}
    where = f"on {ranks} ranks" if ranks > 1 else "on 1 rank"
    for name, check in (plain | among if ranks > 1 else plain).items():
        yield Check(f"collectives: {name} {where}", "operators", check, ranks=ranks)
    in_graphs = {"sums in graphs": check_graph_sums, "rows in graphs": check_graph_rows}
    for (name, check), dtype in product(in_graphs.items(), dtypes):
        covers = ("shared_sum",)
        yield Check(f"collectives: {name} {where} {dtype}", "operators", of_dtype(check, dtype), covers, ranks=ranks)
    if ranks > 1:
        yield Check(f"reshard {where}", "model", check_reshard, ranks=ranks)
