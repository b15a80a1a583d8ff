"""Output of `mindrlhf plan`: tables for a terminal."""

from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.files.printable import printable
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.estimate import Work
from mindrlhf.phases import PHASES
from mindrlhf.units import GIB, size

WIDTH = 120  # where the output is no terminal


def show(work: Work, figures: dict[str, Any], source: str, limit: str) -> None:
    """Print the tables of a plan.

    figures: see `memory_plan.plan_figures`. source, limit: origins of the longest prompt and of the limit, in words.
    """
    console = Console(highlight=False, emoji=False)
    console = console if console.is_terminal else Console(highlight=False, emoji=False, width=WIDTH, soft_wrap=True)
    prompt, response = figures["prompt_tokens"], figures["response_tokens"]
    flops = ", ".join(f"{PHASES[phase].label} {short(value)}" for phase, value in figures["flops"].items())
    fullest = max(figures["ranks"], key=lambda rank: rank["peak"])
    for part in (
        f"{work.model.family}, {work.model.num_layers} layers, {figures['parameters']:,} parameters; "
        f"{len(work.trains)} x {work.train.context.device_target}: trains {axes(work.train)}, generates "
        f"{axes(work.infer)}",
        f"prompts of at most {work.lengths.prompt:,} tokens ({escape(printable(source))}), responses of at most "
        f"{work.config.rollout.max_new_tokens:,}\n",
        rank_table(work, figures),
        "",
        memory_table(fullest),
        "",
        batch_table(work),
        f"tokens           {prompt + response:,} at most: {prompt:,} of prompts, {response:,} of responses",
        f"operations       {short(sum(figures['flops'].values()))}FLOP at most: {flops}\n",
        *verdict(figures, fullest, limit),
    ):
        console.print(part)


def rank_table(work: Work, figures: dict[str, Any]) -> Table:
    """Make one row for consecutive ranks with the same numbers."""
    table = _table("ranks", "train", "numbers", "generate", "numbers", "sends", "receives", "least", "peak")
    rows = []
    for train, infer, plan in zip(work.trains, work.infers, figures["ranks"], strict=True):
        cells = []
        for part in (train, infer):
            numbers = sum(prod(part.shape(spec)) for spec in part.specs)
            cells += [f"layers {part.layers.start}-{part.layers.stop - 1}", f"{numbers:,}"]
        cells += [size(moved[train.rank]) if moved[train.rank] else "-" for moved in figures["reshard"].values()]
        rows.append((*cells, size(plan["peak"])))
    for cells, same in groupby(range(len(rows)), key=rows.__getitem__):
        first, *_, last = list(same) * 2
        table.add_row(str(first) if first == last else f"{first}-{last}", *cells)
    return table


def memory_table(plan: dict[str, Any]) -> Table:
    """Make the table of role by phase of one rank."""
    phases, pools = plan["phases"], plan["activations"]
    table = _table(f"rank {plan['rank']}, GiB", "size", *(PHASES[phase].label for phase in phases))
    for role, nbytes in plan["roles"].items():
        table.add_row(role, _gib(nbytes), *(_gib(held.get(role)) for held in phases.values()))
    table.add_section()
    table.add_row("activations", "", *(_gib(pools.get(phase)) for phase in phases))
    if plan["process"]:
        for name, nbytes in (("pool, which stays", max(pools.values())), ("process, graphs", plan["process"])):
            table.add_row(name, *[_gib(nbytes)] * (len(phases) + 1))
    table.add_section()
    totals = {phase: _gib(nbytes) for phase, nbytes in plan["totals"].items()}
    totals[plan["peak_phase"]] = f"[bold]{totals[plan['peak_phase']]}[/]"
    table.add_row("in all", "", *totals.values())
    return table


def verdict(figures: dict[str, Any], fullest: dict[str, Any], reason: str) -> Iterator[str]:
    """Explain if the job fits, and settings that would make it fit."""
    peak = f"rank {fullest['rank']} peaks at {fullest['peak'] / GIB:.2f} GiB in {fullest['peak_phase']}"
    estimated = "" if fullest["process"] else " (activations estimated by the CPU graphs; fused operators keep less)"
    yield f"{'fits' if figures['fits'] else '[bold]WILL NOT FIT[/]'}: {peak}{estimated}; {reason}"
    for remedy in figures["remedies"]:
        enough = "fits" if remedy["peak"] <= figures["limit"] else "not enough by itself"
        yield f"  {remedy['setting']}: {remedy['peak'] / GIB:.2f} GiB, {enough}"
    if not figures["fits"] and all(remedy["peak"] > figures["limit"] for remedy in figures["remedies"]):
        yield "  or: another layout (model_parallel, pipeline_stage), fewer rollout.num_generations, more ranks"


def axes(yaml: ModelYaml) -> str:
    parallel = yaml.parallel
    return f"dp {parallel.data_parallel} x tp {parallel.model_parallel} x pp {parallel.pipeline_stage}"


def short(value: float) -> str:
    """Format a number as 1.23 T and similar."""
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.2f} {letter}"
    return f"{value:.0f} "


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / GIB:.2f}" if nbytes >= GIB / 100 else f"{nbytes / GIB:.4f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
