"""Runs our GRPO step and the peer's on the same weights and prompts in turn, and judges the ratios.

python benchmarks/compare.py --peer-python ENV/bin/python --peer-script peer_grpo_bench.py \
    --job reference --job long-prompt --output out/compare

--peer-python may be given several times (environments with different versions): the faster one counts for time. The
first of them also builds each job's model and prompts. A round is one run of every side; between rounds the order is
reversed. A round in which other processes used more than --max-others cores during a run, or in which a run has too few
undisturbed steps, is not judged but repeated. What counts is, for each side, the median over rounds of a run's medians.

With --bfloat16 it is ours with bfloat16 products that is judged, alongside ours in float32 and the peer in each of its
dtypes: its fastest counts.

Written to --output: `results.json` (jobs of earlier calls stay), `table.md`, `bars.png`, and with the growth jobs
`growth.png`. Exit code 1 when a goal is missed, 3 when the machine was too busy to judge.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chart import bars, growth
from comparison_jobs import FAMILIES, JOBS, ComparedJob
from comparison_table import FLOAT32, OURS, Outcome, as_outcome, markdown
from machine import Moment
from vision_model import write_model
from work import PROMPTS_FILE, loaded_prompts

from mindrlhf.errors import UserError

PEER_DTYPES = ("fp32", "bf16", "bf16-autocast")
WARMUP, LEAST_STEPS = 2, 5
MODEL_MARK = "built_with.json"
ENDING_PROMPTS = 64  # number of prompts after which the end token is made likely
DESCRIPTIONS = ("compile_total_s", "start_to_first_step_s", "share_of_ceiling")

Result = dict[str, Any]


class BusyError(Exception):
    """Other processes kept the machine busy."""


@dataclass(frozen=True)
class Side:
    """One compared program: a name, and the command that runs a job and writes its JSON to a path."""

    name: str
    command: Callable[[Path], list[str]]


@dataclass(frozen=True)
class Run:
    """A run's JSON, and the number of cores that other processes used meanwhile."""

    result: Result
    others: float


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", action="append", required=True, help="interpreter of the peer's environment")
    parser.add_argument("--peer-script", type=Path, required=True, help="the peer's benchmark")
    parser.add_argument("--job", action="append", choices=JOBS, help="may be given several times (default: all)")
    parser.add_argument("--load", type=Path, help="model and prompts of the jobs that need no others (64 tokens)")
    parser.add_argument("--output", type=Path, default=Path("out/compare"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--tries", type=int, default=9, help="rounds at most, with those not judged (default: 9)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-others", type=float, default=0.15, help="cores that other processes may use")
    parser.add_argument(
        "--ours", action="append", default=[], metavar="group.key=value", help="a setting of our runs; may be repeated"
    )
    parser.add_argument(
        "--bfloat16",
        choices=("train", "bfloat16", "int8"),
        metavar="WEIGHTS",
        help="ours with bfloat16 products and this as rollout.weights: train, bfloat16 or int8",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    stored = args.output / "results.json"
    try:
        for name in args.job or JOBS:
            job = JOBS[name]
            sides = sides_of(args, job, model_of(args, name, job))
            outcome = as_outcome(name, judged(args, job, sides))
            keep(stored, name, outcome)
    except UserError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except BusyError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 3
    outcomes = [Outcome(**values) for values in json.loads(stored.read_text()).values()]
    text = markdown(outcomes)
    (args.output / "table.md").write_text(text)
    bars(outcomes, args.output / "bars.png")
    growth(outcomes, args.output / "growth.png")
    print(text)
    return 0 if all(outcome.reached for outcome in outcomes) else 1


def judged(
    args: argparse.Namespace,
    job: ComparedJob,
    sides: Sequence[Side],
    run: Callable[[Side, Path], Run] | None = None,
) -> dict[str, Result]:
    """Map each side to its median over `quiet_rounds`. run: runs one side; by default as a process."""

    def in_turn(order: Sequence[Side], path: Path) -> dict[str, Run]:
        return {side.name: (run or run_side)(side, path) for side in order}

    rounds = quiet_rounds(args, job, sides, in_turn)
    return {side.name: middle([made[side.name].result for made in rounds]) for side in sides}


def quiet_rounds(
    args: argparse.Namespace,
    job: ComparedJob,
    sides: Sequence[Side],
    run: Callable[[Sequence[Side], Path], dict[str, Run]],
) -> list[dict[str, Run]]:
    """Run all sides, in alternating order, until `rounds` rounds were quiet.

    run: runs the sides of a round. Raises BusyError if `tries` rounds have fewer quiet ones.
    """
    rounds: list[dict[str, Run]] = []
    reasons: list[str] = []
    while len(rounds) < args.rounds:
        if len(rounds) + len(reasons) == args.tries:
            raise BusyError(
                f"only {len(rounds)} of {args.tries} rounds were quiet, and {args.rounds} are needed ({reasons[-1]}); "
                "run it again when nothing else runs."
            )
        made = run(list(sides)[:: 1 if len(rounds) % 2 == 0 else -1], args.output / "run.json")
        reason = disturbance(made, args.max_others, min(LEAST_STEPS, job.steps - WARMUP))
        if reason:
            reasons.append(reason)
            print(f"round not judged: {reason}", flush=True)
        else:
            rounds.append(made)
            print(f"round {len(rounds)}: " + brief(made), flush=True)
    return rounds


def disturbance(made: Mapping[str, Run], max_others: float, least_steps: int) -> str | None:
    """Explain why a round does not count; None if it does."""
    for name, run in made.items():
        if run.others > max_others:
            return f"{name}: other processes used {run.others:.2f} cores"
        if run.result["clean_steps"] < least_steps:
            return f"{name}: {run.result['clean_steps']} undisturbed steps, fewer than {least_steps}"
    return None


def run_side(side: Side, path: Path) -> Run:
    """Run one side in a process. Raises UserError when the command fails."""
    path.unlink(missing_ok=True)
    start = Moment.now()
    done = subprocess.run(side.command(path), capture_output=True, text=True)
    _, others = Moment.now().cores_since(start)
    if done.returncode or not path.is_file():
        raise failed(side.name, done.returncode, done.stderr.strip() or done.stdout)
    return Run(json.loads(path.read_text()), others)


def failed(name: str, code: int, output: str) -> UserError:
    """Make the error of a side that failed, with its last line."""
    return UserError(f"{name} ended with exit code {code}: {(output.strip() or 'no output').splitlines()[-1]}")


def middle(results: Sequence[Result]) -> Result:
    """Take the median over runs of each compared number; descriptions come from the first run."""
    medians = [result["median"] for result in results]
    names = [name for name, value in medians[0].items() if value is not None]
    numbers = {name: statistics.median(median[name] for median in medians) for name in names}
    memory = [result["peak_rss_mib"] + result.get("reward_processes_peak_mib", 0.0) for result in results]
    first = results[0]
    told = {
        name: first[name] for name in ("compile_total_s", "start_to_first_step_s", "share_of_ceiling") if name in first
    }
    return {**numbers, "memory": statistics.median(memory), "versions": first["versions"], **told}


def brief(made: Mapping[str, Run]) -> str:
    return ", ".join(f"{name} {run.result['median']['step']:.3f} s" for name, run in made.items())


def sides_of(args: argparse.Namespace, job: ComparedJob, model: Path) -> list[Side]:
    """List our side, and the peer in each of its environments and micro-batch sizes."""
    work = ["--load", str(model), "--steps", str(job.steps), "--warmup", str(WARMUP), "--quiet"]
    work += ["--threads", str(args.threads), "--max-others", str(args.max_others), *_flags(job.work)]
    work += ["--fixed-length"] if job.fixed_length else []
    script = Path(__file__).with_name("grpo_step.py")
    ours = [sys.executable, str(script), *work, "--micro-batch", str(job.tokens)]

    def side(name: str, flags: Sequence[str] = (), settings: Sequence[str] = ()) -> Side:
        return Side(name, lambda path: [*ours, *flags, "--json", str(path), *args.ours, *settings])

    sides = [side(OURS)]
    if args.bfloat16:
        sides = [side(OURS, ("--dtype", "bfloat16"), [f"rollout.weights={args.bfloat16}"]), side(FLOAT32)]
    name = "peer_lora.py" if "--lora-rank" in job.work else "peer_vision.py" if job.sees else None
    wrapper = [str(Path(__file__).with_name(name))] if name else []
    for number, python in enumerate(args.peer_python, 1):
        for micro, dtype in itertools.product(job.micro_batches, PEER_DTYPES if args.bfloat16 else ("",)):
            peer = [python, *wrapper, str(args.peer_script), *work, *job.peer, "--tuned-malloc"]
            peer += ["--micro-batch", str(micro), *(["--dtype", dtype] if dtype else [])]
            name = f"peer {number}, micro-batch {micro}{dtype and ', ' + dtype}"
            sides.append(Side(name, lambda path, peer=peer: [*peer, "--json", str(path)]))
    return sides


def model_of(args: argparse.Namespace, name: str, job: ComparedJob) -> Path:
    """Return the folder with the job's model and prompts.

    The peer's script builds it once, unless --load has it; a model that sees is ours.
    """
    if job.sees:
        folder = args.output / "models" / name
        if not (folder / PROMPTS_FILE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            write_model(folder)
        return folder
    wanted = {**job.model, **job.length_flags}
    folder = args.load
    if folder is None or wanted:
        folder = args.output / "models" / name
        if not (folder / MODEL_MARK).is_file() or json.loads((folder / MODEL_MARK).read_text()) != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            few = ["--steps", "1", "--warmup", "0", "--prompts", "1", "--num-generations", "2", "--quiet"]
            command = [args.peer_python[0], str(args.peer_script), "--export", str(folder), *few, *_flags(wanted)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip() or "no output").splitlines()[-1]
                raise UserError(f"the peer's script could not write the model of {name}: {last}")
            (folder / MODEL_MARK).write_text(json.dumps(wanted))
    folder = in_family(folder, job.family) if job.family != "qwen2" else folder
    return ending_earlier(folder, job.end_probability) if job.end_probability else folder


def in_family(folder: Path, family: str) -> Path:
    """Copy a Qwen2 model folder to another family of `FAMILIES`.

    What it lacks is drawn: norms around 1, matrices as transformers does.
    """
    from mindrlhf.checkpoint.hf import read_hf_config
    from mindrlhf.checkpoint.weight_source import open_weights
    from mindrlhf.models.parameters import parameter_table

    before = read_hf_config(folder)
    config = before.model_copy(update={"family": family, **FAMILIES[family]})
    weights = open_weights(str(folder), before)
    known = {spec.name for spec in parameter_table(before)}
    rng = np.random.default_rng(0)

    def drawn(spec):
        mean, deviation = (1.0, 0.1) if spec.kind == "norm" else (0.0, 0.02)
        return (mean + deviation * rng.standard_normal(spec.shape)).astype(np.float32)

    table = parameter_table(config)
    arrays = (weights.read(spec.name) if spec.name in known else drawn(spec) for spec in table)
    return copied(folder, folder.with_name(f"{folder.name}-{family}"), config, zip(table, arrays, strict=True))


def ending_earlier(folder: Path, probability: float) -> Path:
    """Copy a model folder, with another row for the end token in the tied embedding.

    The row has the direction of the mean final hidden state after the folder's prompts, and the wanted mean chance
    there: with random weights hidden states stay close to it. Raises UserError for a model with a head of its own.
    """
    from mindrlhf.checkpoint.hf import read_hf_config
    from mindrlhf.checkpoint.weight_source import open_weights
    from mindrlhf.data.tokenizer import Tokenizer
    from mindrlhf.models.parameters import parameter_table

    model = read_hf_config(folder)
    if not model.tie_word_embeddings:
        raise UserError(f"{folder}: has a head of its own, and a tied embedding is needed here.")
    weights = open_weights(str(folder), model)
    table = parameter_table(model)
    arrays = {spec.name: weights.read(spec.name) for spec in table}
    (embedding,) = (spec.name for spec in table if spec.kind == "embedding")
    ends = list(model.eos_token_ids)
    prompts = [row["ids"] for row in loaded_prompts(folder, Tokenizer.from_path(folder))[:ENDING_PROMPTS]]
    shortest = min(map(len, prompts))
    hidden = hidden_behind([ids[-shortest:] for ids in prompts], model, table, arrays).astype(np.float64)
    others = np.delete(hidden @ arrays[embedding].T.astype(np.float64), ends, 1)
    logit = np.log(np.exp(others).sum(1)).mean() + np.log(probability / (1 - probability))
    direction = hidden.mean(0)
    arrays[embedding] = arrays[embedding].copy()
    arrays[embedding][ends] = (logit / (direction @ direction) * direction).astype(np.float32)
    copy = folder.with_name(f"{folder.name}-ends-{probability:g}")
    return copied(folder, copy, model, ((spec, arrays[spec.name]) for spec in table))


def copied(folder: Path, copy: Path, config, tensors: Iterable[tuple]) -> Path:
    """Copy a folder of a model and its prompts, with another configuration and other weights; returns the copy."""
    from mindrlhf.checkpoint.hf import CONFIG_FILE, save_hf

    shutil.rmtree(copy, ignore_errors=True)
    save_hf(copy, config, tensors)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*", CONFIG_FILE), dirs_exist_ok=True)
    return copy


def hidden_behind(prompts: Sequence[Sequence[int]], model, table, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """float32[positions, hidden]: final hidden states where random tokens, which is what random weights write, follow
    prompts of equal length.
    """
    import mindspore
    from mindspore import Tensor

    from mindrlhf.backend.compile.graph import Graph
    from mindrlhf.backend.cpu import CPU
    from mindrlhf.models.decoder import Decoder
    from mindrlhf.models.initialize import build_parameters

    class Hidden(Graph):
        def __init__(self, decoder: Decoder):
            super().__init__("hidden")
            self.decoder = decoder

        def construct(self, *arrays):
            return self.decoder.completions(arrays)

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    written = np.random.default_rng(0).integers(model.vocab_size, size=(len(prompts), len(prompts[0])))
    ids = np.concatenate((prompts, written), 1).astype(np.int32)
    first = len(prompts[0]) - 1  # the position of the prompt's last token
    lengths = (np.full(len(ids), count, np.int32) for count in (first, ids.shape[1] - first))
    order = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    positions = np.concatenate((order[:, :first].reshape(-1), order[:, first:].reshape(-1)))
    inputs = (ids[:, :first].copy(), next(lengths), ids[:, first:].copy(), next(lengths), positions)
    decoder = Decoder(model, build_parameters(table, lambda spec: arrays[spec.name]), CPU.operators(), ids.shape[1])
    return Hidden(decoder)(*map(Tensor, inputs)).asnumpy()


def keep(stored: Path, name: str, outcome: Outcome) -> None:
    """Add a job's outcome to the outcomes of earlier calls."""
    outcomes = json.loads(stored.read_text()) if stored.is_file() else {}
    outcomes[name] = vars(outcome)
    ordered = {job: outcomes[job] for job in JOBS if job in outcomes}
    stored.write_text(json.dumps(ordered, indent=1))


def _flags(given: Mapping[str, str]) -> Iterable[str]:
    return [part for pair in given.items() for part in pair]


if __name__ == "__main__":
    sys.exit(main())
