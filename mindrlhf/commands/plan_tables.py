"""Output of `mindrlhf plan`: tables for a terminal, or one JSON object."""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.files.printable import printable
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.estimate import RankPlan, Work, engines, score_micro, update_micro
from mindrlhf.memory.remedies import Remedy, remedies
from mindrlhf.metrics.flops import phase_flops
from mindrlhf.models.parameters import parameter_count
from mindrlhf.phases import PHASES
from mindrlhf.reshard.plan import Plan
from mindrlhf.shapes import cache_positions, padded_prefix, pool_size, round_up
from mindrlhf.units import GIB, size

WIDTH = 120  # where the output is no terminal


@dataclass(frozen=True)
class Report:
    """All numbers of a plan.

    source: origin of the longest prompt. limit, limit_text: see `plan.memory_limit`.
    """

    work: Work
    reshard: Plan
    source: str
    limit: int | None
    limit_text: str

    @cached_property
    def ranks(self) -> list[RankPlan]:
        return self.work.rank_plans()

    @property
    def fullest(self) -> RankPlan:
        return max(self.ranks, key=lambda plan: plan.peak)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """Settings that would lower the peak, if it is too high."""
        return [] if self.fits else remedies(self.work)

    @property
    def fits(self) -> bool:
        return self.limit is None or self.fullest.peak <= self.limit

    @cached_property
    def tokens(self) -> tuple[int, int]:
        """Most prompt and response tokens of a step over all ranks.

        A prompt counts once.
        """
        config = self.work.config
        prompts = config.data.prompts_per_step
        return (
            prompts * self.work.lengths.prompt,
            prompts * config.rollout.num_generations * config.rollout.max_new_tokens,
        )

    @cached_property
    def flops(self) -> dict[str, float]:
        """Most operations of a step over all ranks, by the job's phases."""
        config = self.work.config
        group = (self.work.lengths.prompt, [config.rollout.max_new_tokens], config.rollout.num_generations)
        every = phase_flops(self.work.model, [group], config.algorithm.num_iterations)
        return {
            phase: config.data.prompts_per_step * flops for phase, flops in every.items() if phase in self.work.phases
        }

    @cached_property
    def graphs(self) -> list[tuple[str, str]]:
        """Graphs of a rank for the greatest lengths: (graph, its shapes)."""
        work, bucket = self.work, self.work.config.train.length_bucket
        prefix = padded_prefix(work.lengths.prompt, bucket)
        found = []
        for engine in engines(work):
            pool = pool_size(engine.slots, work.config.rollout.num_generations)
            positions = cache_positions(engine.prompt, engine.response, bucket)
            found += [
                ("prefill", f"{pool} x {prefix} prompt tokens"),
                ("admit, decode", f"{engine.slots} slots x {positions} positions"),
            ]
        score, update = (
            f"{micro.count} x ({micro.prefix_size} + {micro.samples} x {micro.response_size}) tokens"
            for micro in (score_micro(work), update_micro(work))
        )
        shapes = {"score": score, "update": update}
        phases = [PHASES[name] for name in work.phases]
        found += [(phase.label, shapes[phase.kind]) for phase in phases if phase.kind in shapes]
        return [*found, ("gradient norm, AdamW", "")]

    @property
    def buckets(self) -> tuple[int, int]:
        """Numbers of padded lengths of prompts and of responses.

        Each pair that comes up compiles once.
        """
        bucket = self.work.config.train.length_bucket
        response = round_up(self.work.config.rollout.max_new_tokens, bucket)
        return padded_prefix(self.work.lengths.prompt, bucket) // bucket, response // bucket

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values; bytes, operations and tokens as whole numbers."""
        work, moved = self.work, self.reshard
        return {
            "parameters": parameter_count(work.model),
            "train": work.train.parallel.model_dump(),
            "infer": work.infer.parallel.model_dump(),
            "longest_prompt": work.lengths.prompt,
            "ranks": [
                {
                    "rank": plan.rank,
                    "roles": dict(plan.roles),
                    "phases": {phase: dict(held) for phase, held in plan.phases.items()},
                    "activations": dict(plan.pools),
                    "process": plan.process,
                    "totals": plan.totals,
                    "peak": plan.peak,
                    "peak_phase": plan.peak_phase,
                }
                for plan in self.ranks
            ],
            "prompt_tokens": self.tokens[0],
            "response_tokens": self.tokens[1],
            "flops": {phase: int(flops) for phase, flops in self.flops.items()},
            "graphs": [{"graph": name, "shape": shape} for name, shape in self.graphs],
            "reshard": {"sends": moved.sent, "receives": moved.received, "least": moved.least},
            "limit": self.limit,
            "fits": self.fits,
            "remedies": [{"setting": remedy.setting, "peak": remedy.peak} for remedy in self.remedies],
        }


def show(report: Report) -> None:
    """Print the tables."""
    console = Console(highlight=False, emoji=False)
    console = console if console.is_terminal else Console(highlight=False, emoji=False, width=WIDTH, soft_wrap=True)
    work = report.work
    parallel, config = work.train.parallel, work.config
    console.print(
        f"{work.model.family}, {work.model.num_layers} layers, {parameter_count(work.model):,} parameters; "
        f"{len(work.ranks)} x {work.train.context.device_target}: trains {axes(work.train)}, generates "
        f"{axes(work.infer)}"
    )
    console.print(
        f"prompts of at most {work.lengths.prompt:,} tokens ({escape(printable(report.source))}), responses of at most "
        f"{config.rollout.max_new_tokens:,}\n"
    )
    console.print(rank_table(report), "")
    console.print(memory_table(report), "")
    console.print(batch_table(config, parallel.data_parallel, work.infer.parallel.data_parallel, work.lengths.prompt))
    prompt, response = report.tokens
    flops = ", ".join(f"{PHASES[phase].label} {short(value)}" for phase, value in report.flops.items())
    console.print(f"tokens           {prompt + response:,} at most: {prompt:,} of prompts, {response:,} of responses")
    console.print(f"operations       {short(sum(report.flops.values()))}FLOP at most: {flops}\n")
    console.print(graph_table(report), "")
    for line in verdict(report):
        console.print(line)


def rank_table(report: Report) -> Table:
    """Make one row for consecutive ranks with the same numbers."""
    work, moved = report.work, report.reshard
    table = _table("ranks", "train", "numbers", "generate", "numbers", "sends", "receives", "least", "peak")
    rows = []
    for plan in report.ranks:
        train, infer = work.trains[plan.rank], work.infers[plan.rank]
        cells = [f"layers {part.layers.start}-{part.layers.stop - 1}" for part in (train, infer)]
        held = [f"{sum(_size(part, spec) for spec in part.specs):,}" for part in (train, infer)]
        figures = (moved.sent[plan.rank], moved.received[plan.rank], moved.least[plan.rank])
        bytes_moved = [size(nbytes) if nbytes else "-" for nbytes in figures]
        rows.append((plan.rank, (cells[0], held[0], cells[1], held[1], *bytes_moved, size(plan.peak))))
    for cells, same in groupby(rows, key=lambda row: row[1]):
        first, *_, last = [rank for rank, _ in same] * 2
        table.add_row(str(first) if first == last else f"{first}-{last}", *cells)
    return table


def memory_table(report: Report) -> Table:
    """Table of role by phase, for the rank with the highest need."""
    plan = report.fullest
    phases = list(plan.phases)
    table = _table(f"rank {plan.rank}, GiB", "size", *(PHASES[phase].label for phase in phases))
    for role, nbytes in plan.roles.items():
        held = [plan.phases[phase].get(role) for phase in phases]
        table.add_row(role, gib(nbytes), *("-" if n is None else gib(n) for n in held))
    own = [plan.pools.get(phase) for phase in phases]
    table.add_section()
    table.add_row("activations", "", *("-" if n is None else gib(n) for n in own))
    if plan.process:
        table.add_row("pool, which stays", gib(plan.pool), *([gib(plan.pool)] * len(phases)))
        table.add_row("process, graphs", gib(plan.process), *([gib(plan.process)] * len(phases)))
    table.add_section()
    totals = {phase: gib(plan.totals[phase]) for phase in phases}
    totals[plan.peak_phase] = f"[bold]{totals[plan.peak_phase]}[/]"
    table.add_row("in all", "", *totals.values())
    return table


def graph_table(report: Report) -> Table:
    prompts, responses = report.buckets
    table = _table("graphs to compile", "at the greatest lengths")
    table.columns[1].justify = "left"
    for name, shape in report.graphs:
        table.add_row(name, shape)
    table.add_row("", f"shorter ones compile as they come up: {prompts} lengths of prompts, {responses} of responses")
    return table


def verdict(report: Report) -> list[str]:
    """Explain if the job fits, and settings that would make it fit."""
    plan = report.fullest
    peak = f"rank {plan.rank} peaks at {plan.peak / GIB:.2f} GiB in {plan.peak_phase}"
    estimated = "" if plan.process else " (activations estimated by the CPU graphs; fused operators keep less)"
    if report.fits:
        return [f"fits: {peak}{estimated}; {report.limit_text}"]
    lines = [f"[bold]WILL NOT FIT[/]: {peak}{estimated}; {report.limit_text}"]
    for remedy in report.remedies:
        enough = "fits" if remedy.peak <= report.limit else "not enough by itself"
        lines.append(f"  {remedy.setting}: {remedy.peak / GIB:.2f} GiB, {enough}")
    if all(remedy.peak > report.limit for remedy in report.remedies):
        lines.append("  or: another layout (model_parallel, pipeline_stage), fewer rollout.num_generations, more ranks")
    return lines


def axes(yaml: ModelYaml) -> str:
    parallel = yaml.parallel
    return f"dp {parallel.data_parallel} x tp {parallel.model_parallel} x pp {parallel.pipeline_stage}"


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes >= GIB / 100 else f"{nbytes / GIB:.4f}"


def short(value: float) -> str:
    """Format a number as 1.23 T and similar."""
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.2f} {letter}"
    return f"{value:.0f} "


def _size(part, spec) -> int:
    """Count a partition's numbers of a parameter."""
    count = 1
    for length in part.shape(spec):
        count *= length
    return count


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
