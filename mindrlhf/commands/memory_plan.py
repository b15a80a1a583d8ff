"""`mindrlhf plan`: memory, work, time and messages of a training job, without weights."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby
from math import prod
from typing import Any

from mindrlhf.backend import default_device
from mindrlhf.backend.ascend import ASCEND
from mindrlhf.backend.ceiling import matmul_ceiling
from mindrlhf.backend.process.launch import crowding, launch, under_msrun
from mindrlhf.checkpoint.local import local_models
from mindrlhf.checkpoint.tokenizer import open_tokenizer
from mindrlhf.commands import train
from mindrlhf.configs.images import MOST_BY_DEFAULT
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.placement import planned_workers
from mindrlhf.configs.validate import check_lengths
from mindrlhf.configs.vision_checks import check_seeing
from mindrlhf.errors import UserError
from mindrlhf.files.printable import printable
from mindrlhf.files.text import aligned, folded
from mindrlhf.flags import TrainFlags
from mindrlhf.job import NO_OBJECTS, Objects
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.chip_time import SHARES, chip_seconds
from mindrlhf.memory.division import compare_divisions
from mindrlhf.memory.division_table import division_lines, exchange_line
from mindrlhf.memory.estimate import rank_plans
from mindrlhf.memory.exchange import exchanged
from mindrlhf.memory.limit import CHIPS, find_chip, memory_limit
from mindrlhf.memory.pictures import NO_PICTURES, Lengths, Pictures
from mindrlhf.memory.remedies import remedies
from mindrlhf.memory.step_time import forecast, measured_rates, run_rates, time_line
from mindrlhf.memory.work import Work
from mindrlhf.metrics.console import short_number
from mindrlhf.metrics.flops import phase_flops
from mindrlhf.model_roles import BESIDE, SCORE, role_of
from mindrlhf.models.parameters import parameter_count
from mindrlhf.phases import PHASES
from mindrlhf.reshard.plan import Plan, plan
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.run.training_data import read_problems, total_steps
from mindrlhf.trainer.check import read_model, read_roles, read_settings
from mindrlhf.types import Prompt
from mindrlhf.units import GIB, size


def add_length_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the longest prompt."""
    longest = "the longest prompt; default: the dataset's, or what seq_length leaves for it"
    parser.add_argument("--prompt_tokens", type=int, help=longest)
    images = (
        "tokens of the image that a prompt shows to a model that sees; default: the dataset's, or the largest image"
    )
    parser.add_argument("--image_tokens", type=int, help=images)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train.add_arguments(parser)
    add_length_arguments(parser)
    chip = f"Ascend chip whose figures hold, one of {', '.join(CHIPS)} (default: {ASCEND.default_chip}); "
    chip += f"or --device {ASCEND.name}:NAME"
    parser.add_argument("--chip", metavar="NAME", help=chip)
    parser.add_argument("--json", action="store_true", help="everything as one JSON object instead of tables")
    parser.add_argument("--every_transfer", action="store_true", help="also list each transfer of the online reshard")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns 1 if the job will not fit, else 0."""
    if ":" in (args.device_target or ""):
        args.device_target, _, args.chip = args.device_target.partition(":")
    with redirect_stdout(sys.stderr if args.json else sys.stdout):  # translations are printed while settings are read
        given = {"prompt_tokens": args.prompt_tokens, "image_tokens": args.image_tokens}
        work, sources, steps = read_work(TrainFlags.of(args), **given)
    limit, reason = memory_limit(work.train, len(work.ranks), args.chip, work.communicator_bytes)
    moved = plan(*work.layouts)
    figures = plan_figures(work, moved, limit) | plan_times(work, steps, moved, limit, args.chip)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print(plan_text(work, figures, sources, reason))
        if args.every_transfer:
            print(moved.describe(every_transfer=True))
    return 0 if figures["fits"] else 1


def describe_plan(flags: TrainFlags, objects: Objects) -> str:
    """Describe a job as the command does; UserError as `train`."""
    work, sources, steps = read_work(flags, objects)
    limit, reason = memory_limit(work.train, len(work.ranks), outside=work.communicator_bytes)
    moved = plan(*work.layouts)
    figures = plan_figures(work, moved, limit) | plan_times(work, steps, moved, limit)
    return plan_text(work, figures, sources, reason)


def plan_figures(work: Work, moved: Plan, limit: int) -> dict[str, Any]:
    """Collect all numbers of a plan as plain values.

    Tokens and operations are the maximum of a step over all ranks; a prompt counts once. limit: bytes that one process
    may use.
    """
    config = work.config
    prompt = work.lengths.prompt
    prompts = config.data.prompts_per_step
    samples = config.rollout.num_generations
    response = config.rollout.max_new_tokens
    flops = operations(work)
    ranks = rank_plans(work)
    fits = max(rank.peak for rank in ranks) <= limit
    return {
        "parameters": parameter_count(work.model),
        **{name: yaml.parallel.model_dump() for name, yaml in work.yamls.items()},
        "longest_prompt": prompt,
        "images": work.lengths.pictures.count,
        "image_tokens": work.lengths.pictures.tokens,
        "ranks": [asdict(rank) for rank in ranks],
        "prompt_tokens": prompts * prompt,
        "response_tokens": prompts * samples * response,
        "flops": {phase: int(prompts * each) for phase, each in flops.items() if phase in work.phases},
        "reshard": {"sends": moved.sent, "receives": moved.received, "least": moved.least},
        "exchange": exchanged(work, moved),
        "limit": limit,
        "fits": fits,
        "remedies": [] if fits else [asdict(remedy) for remedy in remedies(work)],
    }


def operations(work: Work) -> dict[str, float]:
    """Count the operations of a prompt and its answers by phase.

    A vision tower that does not train computes an image when a prompt is answered, and not again.
    """
    iterations = work.config.algorithm.num_iterations
    whole = phase_flops(work.roles, [work.group], iterations)
    text = phase_flops(work.roles, [work.group._replace(images=())], iterations)
    kept = {role_of(name).name for name in work.roles if work.keeps_tower(name)}
    once = {phase for phase in whole if PHASES[phase].role in kept and PHASES[phase].kind != "generate"}
    return {phase: text[phase] if phase in once else flops for phase, flops in whole.items()}


def plan_times(work: Work, steps: int | None, moved: Plan, limit: int, chip: str | None = None) -> dict[str, Any]:
    """Forecast a step's seconds by phase, describe them, and compare divisions of split ranks.

    The seconds are None for a short run. A device with memory of its own has the figures of a chip; otherwise all of
    the job's processes are assumed to share this machine. limit: bytes that one process may use.
    """
    target = work.train.context.device_target
    device = work.train.context.device
    if not device.in_host_memory:
        return chip_times(work, steps, moved, chip)
    if target != default_device() or under_msrun():
        return {"step_seconds": None, "time": f"measured when the job begins, on {target}", "division": None}
    with launch(target, worker_count=1, layout_source="mindrlhf plan"):
        crowd = crowding(len(work.ranks))
        rates = run_rates(work, steps, matmul_ceiling(target, work.train.model.compute_dtype) / crowd)
        seconds = forecast(work, [rates and rates.shared(crowd)])
        division = None
        if seconds and work.infer.first_rank:

            def other_seconds(other: Work) -> dict[str, float]:
                return forecast(other, [measured_rates(other).shared(crowd)])

            division = compare_divisions(work, seconds, other_seconds, lambda _: limit).figures()
    return {"step_seconds": seconds, "time": time_line(work, steps, seconds), "division": division}


def chip_times(work: Work, steps: int | None, moved: Plan, chip: str | None) -> dict[str, Any]:
    """Forecast as `plan_times` from the figures of a chip."""
    name = chip or work.train.context.device.default_chip
    figures = find_chip(name)

    def seconds_of(one: Work, transfers: Plan) -> dict[str, float]:
        return chip_seconds(one, figures, max(transfers.received.values(), default=0))

    def limit_of(one: Work) -> int:
        return memory_limit(one.train, len(one.ranks), chip, one.communicator_bytes)[0]

    seconds = seconds_of(work, moved)
    division = None
    if work.infer.first_rank:
        others = compare_divisions(work, seconds, lambda one: seconds_of(one, plan(*one.layouts)), limit_of)
        division = others.figures()
    products, memory, links = (f"{share:.0%}" for share in SHARES)
    shares = f"{products} of a {name}'s rate of products, {memory} of its memory's, {links} of its links'"
    return {
        "step_seconds": seconds,
        "time": time_line(work, steps, seconds),
        "assumed": shares,
        "division": division,
    }


def read_work(
    flags: TrainFlags,
    objects: Objects = NO_OBJECTS,
    prompt_tokens: int | None = None,
    image_tokens: int | None = None,
) -> tuple[Work, tuple[str, str], int | None]:
    """Read a job's sizes; UserError as `train`.

    Returns the origins of the longest prompt and of its images, too, and the number of steps; None if it is not known.
    objects: the calling program's. prompt_tokens: length of the longest prompt, instead of the dataset's. image_tokens:
    of its one image, likewise.
    """
    flags, config, yamls = read_settings(flags)
    flags = local_models(flags, weights=False)
    checkpoint = flags.load_sft_checkpoint_train or flags.load_sft_checkpoint_infer
    workers = planned_workers(yamls["train"], yamls["infer"], flags.scorer_ranks or 0)
    model = read_model(flags, config, yamls, workers)
    if not flags.replay:
        with RewardRunner(config.reward.model_copy(update={"workers": 1}), objects.functions):
            pass  # opening it checks that the functions exist and take their arguments
    tokenizer = open_tokenizer(flags, checkpoint) if flags.tokenizer_path or flags.vocab_path or checkpoint else None
    reading = tokenizer, config, objects.datasets
    vision = model.vision
    named = flags.mind_dataset_dir
    if named or config.data.val_dataset:
        check_seeing(model, checkpoint or yamls["train"].path)
    rows = read_problems(named, *reading, split="train", vision=vision) if named else []
    if prompt_tokens is not None:
        prompt = prompt_tokens
        source = "--prompt_tokens"
    elif rows:
        prompt = _longest(rows)
        source = str(flags.mind_dataset_dir)
    else:
        positions = [model.max_position_embeddings, *(yaml.model.seq_length for yaml in yamls.values())]
        prompt = min(filter(None, positions)) - config.rollout.max_new_tokens
        source = "what seq_length leaves; else --prompt_tokens"
    if prompt < 1:
        found = f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, which leaves no room for a prompt"
        raise UserError(f"{found}; lower it, or raise seq_length.")
    for yaml in yamls.values():
        check_lengths(config, yaml, model, prompt)
    problems = read_problems(config.data.val_dataset, *reading, vision=vision) if config.data.val_dataset else []
    problems = problems[: config.validation.limit]
    steps = total_steps(config, len(rows)) if rows or config.trainer.total_steps else None
    pictures, shown = read_pictures(model, rows, prompt, image_tokens, source)
    lengths = Lengths(prompt, len(problems), _longest(problems), pictures, Pictures.of(problems, vision))
    work = Work.of(config, read_roles(flags, config, model, weights=False), yamls, lengths)
    return work, (source, shown), steps


def read_pictures(
    model: ModelConfig, rows: Sequence[Prompt], prompt: int, tokens: int | None, source: str
) -> tuple[Pictures, str]:
    """Find the pictures of the longest prompt, and their origin in words.

    prompt: its tokens. tokens: of its one image, as given. source: of the rows. Raises UserError.
    """
    vision = model.vision
    if vision is None:
        if tokens is not None:
            found = f"--image_tokens is {tokens}, and a model of the family {model.family} takes text alone"
            raise UserError(f"{found}; leave it out.")
        return NO_PICTURES, ""
    if tokens is not None:
        if not 0 <= tokens <= prompt:
            raise UserError(f"--image_tokens is {tokens}, and must be from 0 to the prompt's {prompt} tokens.")
        return Pictures.of_tokens(tokens, vision), "--image_tokens"
    if rows:
        return Pictures.of(rows, vision), source
    most = vision.images.max_pixels if vision.images else MOST_BY_DEFAULT
    tokens = min(most // vision.token_pixels**2, prompt)
    return Pictures.of_tokens(tokens, vision), "the largest image; else --image_tokens"


def _longest(prompts: list[Prompt]) -> int:
    return max((len(prompt.token_ids) for prompt in prompts), default=0)


def plan_text(work: Work, figures: dict[str, Any], sources: tuple[str, str], limit: str) -> str:
    """Format the tables of a plan.

    figures: all numbers, by name. sources, limit: origins of the longest prompt, its images and the limit, in words.
    """
    prompt = figures["prompt_tokens"]
    response = figures["response_tokens"]
    flops = figures["flops"]
    operations = ", ".join(f"{PHASES[phase].label} {short_number(value)}" for phase, value in flops.items())
    fullest = max(figures["ranks"], key=_peak)
    sides = dict.fromkeys(yaml.ranks for yaml in work.yamls.values()) if work.infer.first_rank else [work.ranks]
    tables = [memory_table(max((f for f in figures["ranks"] if f["rank"] in side), key=_peak)) for side in sides]
    model = work.model
    return "\n".join(
        (
            f"{model.family}, {model.num_layers} layers, {figures['parameters']:,} parameters; {len(work.ranks)} x "
            f"{work.train.context.device_target}: trains {axes(work.train)}, generates {axes(work.infer)}"
            + (f", scores {axes(work.yamls[SCORE])}" if work.scorers else "")
            + (", and scores where it generates" if BESIDE in work.yamls else "")
            + (" on ranks of their own" if work.infer.first_rank else ""),
            f"prompts of at most {work.lengths.prompt:,} tokens ({printable(sources[0])}), responses of at most "
            f"{work.config.rollout.max_new_tokens:,}",
            *images_line(work, sources[1]),
            "",
            rank_table(work, figures) + "\n",
            *(table + "\n" for table in tables),
            folded(batch_table(work), 4),
            f"tokens           {prompt + response:,} at most: {prompt:,} of prompts, {response:,} of responses",
            f"operations       {short_number(sum(flops.values()))} FLOP at most: {operations}",
            f"time             {figures['time']}",
            *([f"                 assumed: {figures['assumed']}"] if "assumed" in figures else []),
            *split_lines(work, figures),
            "",
            *verdict(figures, fullest, limit),
        )
    )


def split_lines(work: Work, figures: dict[str, Any]) -> Iterator[str]:
    """Describe the exchange between the sides of a split job, and its possible divisions."""
    if figures["exchange"]:
        yield exchange_line(figures["exchange"], len(work.trains) + len(work.scorers))
        if figures["division"]:
            yield from ("", *division_lines(figures["division"]))
        else:
            yield "divisions        not compared, for a step has no forecast"


def images_line(work: Work, source: str) -> Iterator[str]:
    """Describe the images of a prompt, for a model that sees."""
    pictures = work.lengths.pictures
    if work.model.vision and pictures.count:
        images = "image" if pictures.count == 1 else "images"
        words = f"prompts with at most {pictures.count} {images} of at most {pictures.tokens:,} tokens"
        yield f"{words} ({printable(source)}), which every tensor-parallel rank of the first stage computes"
        if most := max(map(work.image_rows_bytes, work.ranks)):
            yield f"the vision tower does not train: a process keeps up to {size(most)} of images' rows in host memory"
    elif work.model.vision:
        yield f"prompts without images ({printable(source)})"
    if work.config.rollout.tool_images:
        yield "images that tools show are not counted (rollout.tool_images)"


def _peak(figure: dict[str, Any]) -> int:
    return figure["peak"]


def rank_table(work: Work, figures: dict[str, Any]) -> str:
    """Make one row for consecutive ranks with the same numbers."""
    cells = {}
    for figure in figures["ranks"]:
        rank = figure["rank"]
        held = []
        for part in (work.trains.get(rank), work.infers.get(rank)):
            numbers = sum(prod(part.shape(spec)) for spec in part.specs) if part else 0
            held += [f"layers {part.layers.start}-{part.layers.stop - 1}", f"{numbers:,}"] if part else ["-", "-"]
        moved = [size(nbytes[rank]) if nbytes.get(rank) else "-" for nbytes in figures["reshard"].values()]
        cells[rank] = [*held, *moved, size(figure["peak"])]
    rows = [["ranks", "train", "numbers", "generate", "numbers", *figures["reshard"], "peak"]]
    for same, ranks in groupby(cells, key=cells.__getitem__):
        first, *_, last = list(ranks) * 2
        rows.append([str(first) if first == last else f"{first}-{last}", *same])
    return aligned(rows)


def memory_table(figure: dict[str, Any]) -> str:
    """Make the table of roles and phases of one rank, in GiB."""
    phases = figure["phases"]
    pools = figure["activations"]
    rows = [[role, nbytes, *(held.get(role) for held in phases.values())] for role, nbytes in figure["roles"].items()]
    rows.append(["activations", max(pools.values()), *map(pools.get, phases)])
    if figure["process"]:
        rows.append(["pool, which stays", *[max(pools.values())] * (len(phases) + 1)])
        rows.append(["process, graphs", *[figure["process"]] * (len(phases) + 1)])
    rows += [[name, nbytes, *[nbytes] * len(phases)] for name, nbytes in figure["extra"].items()]
    rows.append(["in all", figure["peak"], *figure["totals"].values()])
    titles = [f"rank {figure['rank']}, GiB", "size", *(PHASES[phase].label for phase in phases)]
    return aligned([titles, *([name, *map(gib, cells)] for name, *cells in rows)])


def verdict(figures: dict[str, Any], fullest: dict[str, Any], reason: str) -> Iterator[str]:
    """Explain whether the job fits, and which settings would make it fit."""
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
    experts = f" (ep {parallel.expert_parallel})" if parallel.expert_parallel > 1 else ""
    return f"dp {parallel.data_parallel}{experts} x tp {parallel.model_parallel} x pp {parallel.pipeline_stage}"


def gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / GIB:.2f}" if nbytes >= GIB / 100 else f"{nbytes / GIB:.4f}"
