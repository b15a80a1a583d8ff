"""Times the phases of a GRPO step: what `mindrlhf train` runs, on work given by flags.

OMP_NUM_THREADS=2 python benchmarks/grpo_step.py --fixed-length --steps 8 --warmup 2 --json out.json
python benchmarks/grpo_step.py --load DIR ...      # DIR: an HF directory with its tokenizer and prompts.jsonl

A step is one batch of rollouts and all updates made on it. Of each step, in seconds: gen (generation), logprob
(reference and old policy), reward, other (advantages), train (forward, backward, clipping), optim, rest, and compile:
graphs are built when a shape is met first, which is in none of the others. A step in which a graph was built, or in
which other processes used more than --max-others cores, is left out of the averages, and so are the first --warmup.
Rates: gen_tok_s (response tokens / gen), tok_s (prompt and response tokens / step, a prompt counted for each of its
responses). Memory: the peak of this process and, apart, of the reward processes.
Afterwards the rate of matrix products of --dtype is measured in the same process, and how much of it each phase
reached.

Under msrun, with --data-parallel and --model-parallel, the first worker prints its own times and memory.

Trailing `group.key=value` are settings of the run, laid over the flags.
"""

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comparison_jobs import FAMILIES
from machine import Moment, peak_mib, seconds_since_start
from work import Work, prepare

from mindrlhf.backend.process.launch import is_first_process
from mindrlhf.errors import UserError
from mindrlhf.files.settings_file import versions

PHASES = ("gen", "logprob", "train")
RATES = ("gen_tok_s", "tok_s")
COLUMNS = ("step", "gen", "logprob", "reward", "other", "train", "optim", "rest", "compile", "gen_tok_s", "tok_s")
COLUMNS += ("completion_tokens", "cpu_util", "others")

Row = dict[str, float | None]

if TYPE_CHECKING:
    from mindrlhf.metrics.flops import GroupLengths


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")
    group = parser.add_argument_group("model")
    group.add_argument("--hidden", type=int, default=256)
    group.add_argument("--layers", type=int, default=4)
    group.add_argument("--heads", type=int, default=4)
    group.add_argument("--kv-heads", type=int, default=2)
    group.add_argument("--intermediate", type=int, default=704)
    group.add_argument("--model-vocab", type=int, default=0, help="embedding rows; 0: tokenizer size, rounded up to 64")
    families = "qwen3: norms of heads, no biases; qwen3_moe: 16 experts too"
    group.add_argument("--family", choices=FAMILIES, default="qwen2", help=families)
    group.add_argument("--untie", action="store_true", help="a head of its own (default: the embedding)")
    group.add_argument("--load", default="", help="directory with model, tokenizer and prompts.jsonl instead")
    group = parser.add_argument_group("data")
    group.add_argument("--bpe-vocab", type=int, default=2048, help="size of the tokenizer")
    group.add_argument("--dataset-size", type=int, default=256, help="prompts to draw from")
    group = parser.add_argument_group("GRPO")
    group.add_argument("--steps", type=int, default=6, help="with those of --warmup")
    group.add_argument("--warmup", type=int, default=1, help="first steps that are left out")
    group.add_argument("--prompts", type=int, default=8, help="of a step")
    group.add_argument("--num-generations", type=int, default=8)
    group.add_argument("--max-prompt", type=int, default=64, help="tokens; every prompt has as many")
    group.add_argument("--max-completion", type=int, default=64, help="tokens")
    group.add_argument("--fixed-length", action="store_true", help="no response ends before --max-completion")
    group.add_argument("--micro-batch", type=int, default=0, help="tokens of a micro-batch; 0: the suite's default")
    group.add_argument("--mini-batches", type=int, default=1, help="updates of one pass over a step's responses")
    group.add_argument("--num-iterations", type=int, default=1, help="passes over a step's responses")
    group.add_argument("--beta", type=float, default=0.04, help="of the KL term; 0: no reference model")
    group.add_argument("--lr", type=float, default=1e-4)
    group.add_argument("--lora-rank", type=int, default=0, help="of adapters of all linear modules; 0: none")
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group = parser.add_argument_group("run")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products")
    group.add_argument("--threads", type=int, default=2, help="of each worker")
    group.add_argument("--data-parallel", type=int, default=1, help="replicas; start one worker for each under msrun")
    group.add_argument("--model-parallel", type=int, default=1, help="tensor-parallel workers of each replica")
    group.add_argument("--seq-parallel", action="store_true", help="these split rows too")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--max-others", type=float, default=0.15, help="cores that other processes may use")
    group.add_argument("--compile-cache", action="store_true", help="graphs from ~/.cache/mindrlhf, or kept there")
    group.add_argument("--json", type=Path, help="write the result here")
    group.add_argument("--quiet", action="store_true")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="grpo_step_") as folder:
            work = prepare(args, Path(folder))
            result = measure(args, work)
    except UserError as error:
        print(f"grpo_step: {error}", file=sys.stderr)
        return 2
    if not is_first_process():
        return 0
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if not args.quiet:
        print(table(result))
    return 0


def measure(args: argparse.Namespace, work: Work) -> dict[str, Any]:
    """Run the steps and the matrix products."""
    from mindrlhf.backend.process.launch import launch
    from mindrlhf.commands import train
    from mindrlhf.flags import TrainFlags
    from mindrlhf.run.stop_signals import StopSignals
    from mindrlhf.trainer.check import check

    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    begun = Moment.now()
    with contextlib.ExitStack() as stack:
        if args.quiet or not is_first_process():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        job = check(TrainFlags.of(parser.parse_intermixed_args(work.train)))
        world = stack.enter_context(launch("CPU", worker_count=args.data_parallel * args.model_parallel))
        from mindrlhf.backend.ceiling import matmul_ceiling, product_rate
        from mindrlhf.run.stop_signals import StopSignals
        from mindrlhf.trainer.build import build

        trainer = build(job, world, stack, StopSignals())
        rows, logs = [], []
        for step in range(1, args.steps + 1):
            row, log = one_step(trainer, step, work, args)
            rows.append(row)
            logs.append(log)
            if step == 1:
                first_step_s = seconds_since_start()
        own, reward_processes = peak_mib()
        wall = Moment.now().clock - begun.clock
        product_rate.cache_clear()  # the run has measured it at its start
        ceiling = matmul_ceiling("CPU", args.dtype)
        forecast = forecast_row(job, args.max_prompt)
    summary = summarise(rows, args.warmup, args.max_others)
    median = summary["median"]
    return {
        "versions": {**versions(), "threads": args.threads},
        "args": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "params": sum(parameter.size for parameter in policy_parameters(work)),
        "tokenizer_size": work.tokenizer.size,
        "model_vocab": work.model.vocab_size,
        "micro_batch": job.config.train.max_tokens_per_micro_batch,
        "updates_per_step": args.mini_batches * args.num_iterations,
        "per_step": rows,
        **summary,
        "wall_total_s": wall,
        "peak_rss_mib": own,
        "reward_processes_peak_mib": reward_processes,
        "start_to_first_step_s": first_step_s,
        "compile_total_s": sum(row["compile"] for row in rows),
        "ceiling_gflop_s": ceiling / 1e9,
        "share_of_ceiling": {
            phase: median[f"{phase}_gflop"] * 1e9 / median[phase] / ceiling if median[phase] else None
            for phase in (*PHASES, "step")
        },
        "forecast": forecast,
        "logs": logs,
    }


def forecast_row(job, prompt: int) -> Row:
    """Return the forecast of `mindrlhf plan` for a step."""
    from mindrlhf.memory.pictures import Lengths
    from mindrlhf.memory.step_time import measured_rates, step_seconds
    from mindrlhf.memory.work import Work

    work = Work.of(job.config, job.roles, job.yamls, Lengths(prompt))
    seconds = step_seconds(work, measured_rates(work))
    logprob = seconds.get("ref", 0.0) + seconds.get("old_log_prob", 0.0)
    row = dict.fromkeys(COLUMNS) | {"gen": seconds["gen"], "logprob": logprob, "train": seconds["update_actor"]}
    return row | {"step": sum(seconds.values())}


def one_step(trainer, step: int, work: Work, args: argparse.Namespace) -> tuple[Row, dict[str, float]]:
    """Run one step as the trainer's own loop does, without writing metrics; returns its row and what it learnt."""
    from mindrlhf.metrics.flops import group_lengths

    trainer.run.timers.collect()
    start = Moment.now()
    with trainer.run.timers("step"):
        experiences, figures = trainer.source.collect(step)
        result = trainer.train(experiences, step, figures)
        trainer.reshard()
    cores, others = Moment.now().cores_since(start)
    seconds = trainer.run.timers.collect()
    groups = [group_lengths(e) for e in experiences]
    optim = sum(update.optimizer_s for update in result.updates)
    row = step_row(seconds, optim, groups)
    updates = args.num_iterations * (2 if args.lora_rank else 3)  # passes; weights under adapters have no gradients
    row |= needed_operations(work, groups, updates, "ref" in seconds, "old_log_prob" in seconds)
    row |= {"cpu_util": cores, "others": others}
    log = {
        "reward": statistics.mean(float(reward) for e in experiences for reward in e.rewards),
        "loss": sum(update.loss for update in result.updates),
        "grad_norm": result.updates[-1].result.grad_norm,
    }
    return row, log


def step_row(seconds: Mapping[str, float], optim: float, groups: "Sequence[GroupLengths]") -> Row:
    """Return the trainer's phases under the benchmark's names, and tokens per second."""
    took = {name: seconds.get(name, 0.0) for name in ("gen", "ref", "old_log_prob", "reward", "adv", "update_actor")}
    compile_s = seconds.get("compile", 0.0)
    row: Row = {
        "step": seconds["step"] - compile_s,
        "gen": took["gen"],
        "logprob": took["ref"] + took["old_log_prob"],
        "reward": took["reward"],
        "other": took["adv"],
        "train": took["update_actor"] - optim,
        "train_fwd": None,  # forward and backward are one graph
        "optim": optim,
    }
    row["rest"] = row["step"] - sum(row[name] for name in ("gen", "logprob", "reward", "other", "train", "optim"))
    row["compile"] = compile_s
    row["completion_tokens"] = sum(sum(one.responses) for one in groups)
    row["prompt_tokens"] = sum(one.prompt * len(one.responses) for one in groups)
    row["gen_tok_s"] = row["completion_tokens"] / row["gen"] if row["gen"] else None
    row["tok_s"] = (row["completion_tokens"] + row["prompt_tokens"]) / row["step"]
    return row


def needed_operations(work: Work, groups: "Sequence[GroupLengths]", updates: int, reference: bool, old: bool) -> Row:
    """Count the least billions of operations of each phase; see `metrics.flops`."""
    from mindrlhf.metrics.flops import forward_flops

    forward = sum(forward_flops(work.model, *group) for group in groups) / 1e9
    row = {"gen_gflop": forward, "logprob_gflop": forward * (reference + old), "train_gflop": forward * updates}
    return row | {"step_gflop": sum(row.values())}


def summarise(rows: Sequence[Row], warmup: int, max_others: float) -> dict[str, Any]:
    """Summarise the undisturbed steps by mean, median and best; all measured steps if none was undisturbed."""
    measured = list(rows[warmup:] or rows)
    clean = [row for row in measured if row["others"] <= max_others and not row["compile"]]
    kept = clean or measured

    def over(choose: Callable[[str, list[float]], float]) -> Row:
        columns = {name: [row[name] for row in kept if row[name] is not None] for name in rows[0]}
        return {name: choose(name, values) if values else None for name, values in columns.items()}

    return {
        "mean": over(lambda _, values: statistics.mean(values)),
        "median": over(lambda _, values: statistics.median(values)),
        "best": over(lambda name, values: max(values) if name in RATES else min(values)),
        "measured_steps": len(measured),
        "clean_steps": len(clean),
        "compiling_steps": sum(bool(row["compile"]) for row in measured),
    }


def policy_parameters(work: Work):
    """List the model's parameters as the suite does."""
    from mindrlhf.models.parameters import parameter_table

    return parameter_table(work.model)


def table(result: Mapping[str, Any]) -> str:
    """Format one line per step, averages, memory and shares of the ceiling."""

    def cells(row: Row) -> str:
        return " ".join("        -" if row[name] is None else f"{row[name]:9.3f}" for name in COLUMNS)

    args = result["args"]
    lines = [
        " ".join(f"{name}={value}" for name, value in result["versions"].items()),
        f"{result['params'] / 1e6:.2f} M parameters, vocabulary {result['model_vocab']}; micro-batches of at most "
        f"{result['micro_batch']} tokens, {result['updates_per_step']} update(s) a step",
        "step  " + " ".join(f"{name[:9]:>9}" for name in COLUMNS),
    ]
    for number, row in enumerate(result["per_step"], 1):
        disturbed = "!" if row["others"] > args["max_others"] else "c" if row["compile"] else " "
        lines.append(f"{number:4d}{'*' if number <= args['warmup'] else disturbed} {cells(row)}")
    averages = (("mean", "mean"), ("med", "median"), ("plan", "forecast"))
    lines += [f"{label:5s} {cells(result[name])}" for label, name in averages]
    shares = ", ".join(
        f"{phase} {share:.0%}" for phase, share in result["share_of_ceiling"].items() if share and math.isfinite(share)
    )
    lines += [
        f"(* warm-up, ! others were busy, c a graph was built: {result['clean_steps']} of {result['measured_steps']} "
        "measured steps count; plan: the forecast, with optim within train)",
        f"start to first step {result['start_to_first_step_s']:.1f} s; all building of graphs "
        f"{result['compile_total_s']:.1f} s; peak memory {result['peak_rss_mib']:,.0f} MiB, reward processes "
        f"{result['reward_processes_peak_mib']:,.0f} MiB",
        f"{args['dtype']} products: {result['ceiling_gflop_s']:.0f} GFLOP/s; of these, median steps reach: {shares}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
