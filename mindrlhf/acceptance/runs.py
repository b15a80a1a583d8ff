"""Checks of whole commands: two GRPO steps of a record, and two learning curves."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mindrlhf.acceptance.checks import TOLERANCES, Check, Finding, Trial, compared, tolerance_of
from mindrlhf.acceptance.grpo64 import trained_weights
from mindrlhf.acceptance.record import (
    ADAM,
    BETA,
    LONGEST,
    RECORDED_PROMPTS,
    RECORDED_SAMPLES,
    STEPS,
    VOCABULARY,
    first_weights,
    recorded_steps,
    run_config,
    write_steps,
)
from mindrlhf.backend.device import Device
from mindrlhf.backend.process.start import ending, last_lines, module_command, running
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.hf_tensors import joined
from mindrlhf.checkpoint.safetensors_file import index_safetensors
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.metrics.compare import compare
from mindrlhf.metrics.writers import METRICS_FILE, read_metrics
from mindrlhf.models.parameters import parameter_table

LOG_LINES = 4

# Learning curves. The reward is dense, so that its mean over a step hardly depends on single tokens.
CURVES = "curves.json"
CURVE_STEPS = 20
GRPO = (
    "reward.functions=[{name: 'REWARD:share_of_digits'}]",
    *("data.prompts_per_step=16", "rollout.num_generations=8", "rollout.max_new_tokens=16", "rollout.max_slots=64"),
    *("optimizer.lr=1e-3", "optimizer.weight_decay=0", "algorithm.beta=0", "rollout.speculation=False"),
)
SFT = ("data.pairs_per_step=16", "optimizer.lr=2e-3", "optimizer.weight_decay=0")
KEPT = ("step", "critic/rewards/mean", "actor/loss", "train/loss")  # columns of the stored curves


def dtype_of(device: Device) -> str:
    """Return the default dtype of training on the device.

    It is float32 where none is set.
    """
    return device.default_dtypes.get("train", {}).get("compute_dtype", "float32")


def run_command(trial: Trial, folder: Path, log: str, *words: object, ranks: int = 1, faulty: bool = False) -> None:
    """Run `mindrlhf WORDS`; its ranks end with it.

    log: name of the log in the folder. faulty: inject the trial's fault. Raises RuntimeError with the last lines of its
    log if it fails, or takes longer than the trial's patience.
    """
    logs = folder / f"{log}_ranks"
    fault = trial.fault if faulty else None
    module = ["mindrlhf", *words] if fault is None else ["mindrlhf.acceptance.faults", fault, *words]
    path = folder / f"{log}.log"
    command = module_command(str(module[0]), module[1:], ranks, logs)
    with path.open("w") as out, running(command, out, folder) as process:
        try:
            code = process.wait(trial.patience_s)
            reason = ending(code)
        except subprocess.TimeoutExpired:
            code = None
            reason = f"did not end within {trial.patience_s:g} s and was stopped"
    if code != 0:
        raise RuntimeError(f"mindrlhf {words[0]} {reason}: {last_lines([logs / 'worker_0.log', path], LOG_LINES)}")


def open_task(trial: Trial) -> Path:
    """Write problems, a tokenizer and a model, once; returns their folder."""
    folder = trial.folder / "task"
    if (folder / "model").is_dir():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    sizes = "--train_size 256 --test_size 8 --max_number 20 --two_step_share 0 --careless_share 0.5"
    made = ("--output_dir", folder, *sizes.split(), f"tokenizer_vocab_size={VOCABULARY}")
    run_command(trial, folder, "synthesize", "synthesize", *made)
    for split in ("train", "demonstrations"):
        files = ("--file_path", folder / f"{split}.jsonl", "--output_path", folder / f"{split}.mindrecord")
        kind = ("--tokenizer_path", folder, "--dataset_type", "arithmetic", "--template", "plain")
        run_command(trial, folder, f"data_{split}", "data", *files, *kind)
    config = run_config()
    weights = first_weights()
    tensors = ((spec, weights[spec.name]) for spec in parameter_table(config))
    save_hf(folder / "model", config, tensors, tokenizer=Tokenizer.from_path(folder))
    return folder


def check_steps(label: str, layout: Sequence[str], ranks: int, trial: Trial) -> Iterator[Finding]:
    """Check two GRPO steps of a record: the change of each weight, against float64.

    label: of the run's folder. layout: further settings of the command.
    """
    task = open_task(trial)
    record = task / "record.mindrecord"
    if not record.exists():
        write_steps(record)
    folder = trial.folder / f"steps_{label}"
    folder.mkdir(parents=True)
    adam = (f"lr={ADAM.rate}", f"beta1={ADAM.beta1}", f"beta2={ADAM.beta2}", f"eps={ADAM.eps}")
    adam += (f"weight_decay={ADAM.decay}", f"max_grad_norm={ADAM.max_norm}")
    settings = [f"optimizer.{one}" for one in adam]
    settings += [f"algorithm.beta={BETA}", f"data.prompts_per_step={RECORDED_PROMPTS}", f"trainer.total_steps={STEPS}"]
    settings += [f"rollout.num_generations={RECORDED_SAMPLES}", f"rollout.max_new_tokens={LONGEST}", *layout]
    common = command_flags(task, folder, trial.device)
    run_command(trial, folder, "train", "train", *common, "--replay", record, *settings, ranks=ranks, faulty=True)
    weights = first_weights()
    expected = trained_weights(run_config(), weights, recorded_steps(), ADAM, BETA)
    found = read_weights(folder / "ckpt" / "hf" / "model.safetensors")
    tolerance = TOLERANCES[dtype_of(trial.device)]["model"]
    for name, answer in expected.items():
        change = found[name].astype(np.float64) - weights[name]
        yield compared(f"change of {name}", change, answer - weights[name], tolerance_of(name, tolerance))


def command_flags(task: Path, folder: Path, device: Device, role: str = "infer") -> list[object]:
    """List the flags of a run of the tiny model that writes below `folder`."""
    dtype = f"train_yaml.model.model_config.compute_dtype={dtype_of(device)}"
    dtypes = [dtype, dtype.replace("train_yaml", "infer_yaml")] if role == "infer" else [dtype]
    paths = [f"--load_sft_checkpoint_{role}", task / "model", "--save_ckpt_dir", folder / "ckpt"]
    return [*paths, "--device", device.name, *dtypes]


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the model of a run, by our names."""
    stored = {name: tensor.read() for name, tensor in index_safetensors(path).items()}
    return {spec.name: joined(spec, stored) for spec in parameter_table(run_config())}


def curve_rows(kind: str, trial: Trial) -> list[dict[str, Any]]:
    """Run GRPO ("grpo") or fine-tuning ("sft") for some steps; returns its metrics."""
    task = open_task(trial)
    folder = trial.folder / kind
    folder.mkdir(parents=True)
    steps = f"trainer.total_steps={CURVE_STEPS}"
    if kind == "grpo":
        reward = str(Path(__file__).with_name("digit_share.py"))
        settings = [one.replace("REWARD", reward) for one in GRPO]
        flags = [*command_flags(task, folder, trial.device), "--mind_dataset_dir", task / "train.mindrecord"]
        run_command(trial, folder, kind, "train", *flags, *settings, steps, faulty=True)
    else:
        flags = [*command_flags(task, folder, trial.device, "train")]
        flags += ["--mind_dataset_dir", task / "demonstrations.mindrecord"]
        run_command(trial, folder, kind, "sft", *flags, *SFT, steps, faulty=True)
    return read_metrics(folder / METRICS_FILE)


def stored_curves() -> Mapping[str, list[dict[str, float]]]:
    """Read the stored curves of the CPU, by kind."""
    return json.loads((resources.files(__package__) / "answers" / CURVES).read_text("utf-8"))


def check_curve(kind: str, trial: Trial) -> Iterator[Finding]:
    """Check a learning curve against the stored one.

    By the acceptance rules for ports (`metrics.compare`).
    """
    rows = curve_rows(kind, trial)
    found = compare(stored_curves()[kind], rows)
    speed = [row["perf/throughput"] for row in rows if "perf/throughput" in row]
    memory = [row["perf/max_memory_allocated_gb"] for row in rows if "perf/max_memory_allocated_gb" in row]
    for one in found.agreements:
        words = [f"over {one.steps} steps"]
        if speed:
            words.append(f"{median(speed):,.0f} tokens/s")
        if memory:
            words.append(f"peak {max(memory):.2f} GiB")
        error = 0.0 if one.rounding else one.relative
        yield Finding(f"mean absolute error of {one.metric}", error, one.limit, ", ".join(words))
    yield Finding("steps", float(CURVE_STEPS - len(rows)), 0.0)


def run_checks(ranks: int) -> Iterator[Check]:
    """List the checks of whole commands."""

    def steps(label: str, count: int, *layout: str) -> Callable[[Trial], Iterator[Finding]]:
        return lambda trial: check_steps(label, layout, count, trial)

    def curve(kind: str) -> Callable[[Trial], Iterator[Finding]]:
        return lambda trial: check_curve(kind, trial)

    name = "two GRPO steps of a record"
    yield Check(f"{name}, with swap", "step", steps("swap", 1, "memory.swap=True"), alone=True)
    if ranks == 2:
        layouts = {"tp 2": ("--tensor_parallel=2", "--infer_tensor_parallel=1"), "pp 2": ("--pipeline_parallel=2",)}
        for axis, flags in layouts.items():
            run = steps(axis.replace(" ", ""), ranks, *flags)
            yield Check(f"{name}, trained on {axis}", "step", run, ranks=ranks, alone=True)
    yield Check("learning curve of GRPO", "run", curve("grpo"), alone=True)
    yield Check("learning curve of fine-tuning", "run", curve("sft"), alone=True)
