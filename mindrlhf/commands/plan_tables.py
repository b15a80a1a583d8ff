"""Output of `mindrlhf plan`: tables for a terminal."""

from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import Any

from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.files.printable import printable
from mindrlhf.files.text import aligned
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.estimate import Work
from mindrlhf.metrics.console import short_number
from mindrlhf.phases import PHASES
from mindrlhf.units import GIB, size


def plan_text(work: Work, figures: dict[str, Any], source: str, limit: str) -> str:
    """Format the tables of a plan.

    figures: see `memory_plan.plan_figures`. source, limit: origins of the longest prompt and of the limit, in words.
    """
    prompt, response, flops = figures["prompt_tokens"], figures["response_tokens"], figures["flops"]
    operations = ", ".join(f"{PHASES[phase].label} {short_number(value)}" for phase, value in flops.items())
    fullest = max(figures["ranks"], key=lambda rank: rank["peak"])
    model, device = work.model, work.train.context.device_target
    return "\n".join(
        (
            f"{model.family}, {model.num_layers} layers, {figures['parameters']:,} parameters; {len(work.trains)} x "
            f"{device}: trains {axes(work.train)}, generates {axes(work.infer)}",
            f"prompts of at most {work.lengths.prompt:,} tokens ({printable(source)}), responses of at most "
            f"{work.config.rollout.max_new_tokens:,}\n",
            rank_table(work, figures) + "\n",
            memory_table(fullest) + "\n",
            batch_table(work),
            f"tokens           {prompt + response:,} at most: {prompt:,} of prompts, {response:,} of responses",
            f"operations       {short_number(sum(flops.values()))} FLOP at most: {operations}\n",
            *verdict(figures, fullest, limit),
        )
    )


def rank_table(work: Work, figures: dict[str, Any]) -> str:
    """Make one row for consecutive ranks with the same numbers."""
    cells = []
    for train, infer, plan in zip(work.trains, work.infers, figures["ranks"], strict=True):
        held = []
        for part in (train, infer):
            numbers = sum(prod(part.shape(spec)) for spec in part.specs)
            held += [f"layers {part.layers.start}-{part.layers.stop - 1}", f"{numbers:,}"]
        moved = [size(nbytes[train.rank]) if nbytes[train.rank] else "-" for nbytes in figures["reshard"].values()]
        cells.append([*held, *moved, size(plan["peak"])])
    rows = [["ranks", "train", "numbers", "generate", "numbers", *figures["reshard"], "peak"]]
    for same, ranks in groupby(range(len(cells)), key=cells.__getitem__):
        first, *_, last = list(ranks) * 2
        rows.append([str(first) if first == last else f"{first}-{last}", *same])
    return aligned(rows)


def memory_table(plan: dict[str, Any]) -> str:
    """Make the table of role by phase of one rank, in GiB."""
    phases, pools = plan["phases"], plan["activations"]
    rows = [[role, nbytes, *(held.get(role) for held in phases.values())] for role, nbytes in plan["roles"].items()]
    rows.append(["activations", max(pools.values()), *map(pools.get, phases)])
    if plan["process"]:
        rows.append(["pool, which stays", *[max(pools.values())] * (len(phases) + 1)])
        rows.append(["process, graphs", *[plan["process"]] * (len(phases) + 1)])
    rows.append(["in all", plan["peak"], *plan["totals"].values()])
    titles = [f"rank {plan['rank']}, GiB", "size", *(PHASES[phase].label for phase in phases)]
    return aligned([titles, *([name, *map(gib, cells)] for name, *cells in rows)])


def verdict(figures: dict[str, Any], fullest: dict[str, Any], reason: str) -> Iterator[str]:
    """Explain if the job fits, and settings that would make it fit."""
    peak = f"rank {fullest['rank']} peaks at {fullest['peak'] / GIB:.2f} GiB in {fullest['peak_phase']}"
    estimated = "" if fullest["process"] else " (activations estimated by the CPU graphs; fused operators keep less)"
    yield f"{'fits' if figures['fits'] else 'WILL NOT FIT'}: {peak}{estimated}; {reason}"
    enough = [remedy["peak"] <= figures["limit"] for remedy in figures["remedies"]]
    for remedy, fits in zip(figures["remedies"], enough, strict=True):
        yield f"  {remedy['setting']}: {remedy['peak'] / GIB:.2f} GiB, {'fits' if fits else 'not enough by itself'}"
    if not figures["fits"] and not any(enough):
        yield "  or: another layout (model_parallel, pipeline_stage), fewer rollout.num_generations, more ranks"


def axes(yaml: ModelYaml) -> str:
    parallel = yaml.parallel
    return f"dp {parallel.data_parallel} x tp {parallel.model_parallel} x pp {parallel.pipeline_stage}"


def gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / GIB:.2f}" if nbytes >= GIB / 100 else f"{nbytes / GIB:.4f}"
