"""Small jobs for end-to-end tests: a practice task with its tokenizer and models, command lines, and what a run left.

A new process takes 5 s to start and each compiled graph 1-3 s, so tests share runs and graphs, and the models are
tiny. `call` runs a command in this process, `start` in one of its own, and `workers.run_ranks` in several.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import numpy as np
import warm
from safetensors.numpy import load_file
from small_model import random_arrays
from workers import run_ranks

from mindrlhf import cli
from mindrlhf.backend.compile import graph_cache
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.metrics.writers import read_metrics
from mindrlhf.models.parameters import parameter_table
from mindrlhf.records.formats import read_record

ROOT = Path(__file__).resolve().parents[2]
ONE_STAGE = ROOT / "examples" / "qwen_grpo_tutorial" / "grpo_one_stage.py"

# Random weights never solve a problem; this reward differs between any two answers, so that every group teaches.
REWARD = "def variety(prompt, completion, fields):\n    return len(set(completion)) / 10\n"


def write_yamls(folder: Path, vocab_size: int, layers: int = 2) -> None:
    """`train.yaml` and `infer.yaml`: a Qwen2 of width 32 for one CPU process."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": layers, "num_heads": 4, "n_kv_heads": 2}
    kind = {"type": "LlamaConfig", "qkv_has_bias": True, "tie_word_embeddings": True, "seq_length": 2048}
    numbers = {"vocab_size": vocab_size, "max_position_embedding": 2048, "rms_norm_eps": 1e-6, "theta": 1e6}
    model = {"model_config": kind | sizes | numbers}
    for name in ("train", "infer"):
        (folder / f"{name}.yaml").write_text(json.dumps({"model": model, "context": {"device_target": "CPU"}}))


# Prompts, and answers, of all lengths are padded to one: each further shape of a graph is compiled for seconds.
ONE_SHAPE = "train.length_bucket=48"

# Settings of a model of one layer, and of one that pipeline stages can share.
ONE_LAYER = tuple(f"{role}_yaml.model.model_config.num_layers=1" for role in ("train", "infer"))
TWO_LAYERS = tuple(f"{role}_yaml.model.model_config.num_layers=2" for role in ("train", "infer"))

AXES = {"dp": "data_parallel", "ep": "expert_parallel", "tp": "model_parallel", "pp": "pipeline_stage"}


def layout(role: str, text: str) -> list[str]:
    """Overrides of a model YAML for `dp2tp2` and the like.

    `sp` is sequence parallelism; with `zero3` data-parallel ranks share weights, gradients and moments.
    """
    sizes = {name: int(text[text.index(name) + 2]) for name in AXES if name in text}
    settings = [f"{role}_yaml.parallel_config.{AXES[name]}={size}" for name, size in sizes.items()]
    if "pp" in sizes:
        settings.append(f"{role}_yaml.parallel_config.micro_batch_num={sizes['pp']}")
    if "sp" in text:
        settings.append(f"{role}_yaml.parallel_config.use_seq_parallel=True")
    if "zero3" in text:
        settings.append(f"{role}_yaml.parallel.enable_parallel_optimizer=True")
        settings.append(f"{role}_yaml.parallel.parallel_optimizer_config.optimizer_level=level3")
    return settings


@dataclass(frozen=True)
class Task:
    """A folder with `vocab.json`, `merges.txt`, `train.mindrecord`, `train.yaml`, `infer.yaml` and `reward.py`."""

    folder: Path

    def train(self, output: Path, *settings: str, **flags: str | Path | None) -> list[str]:
        """Arguments of `mindrlhf train` that write everything below `output`; a flag that is None is left out."""
        given = {
            "sft_path_infer": self.folder / "infer.yaml",
            "sft_path_train": self.folder / "train.yaml",
            "vocab_path": self.folder / "vocab.json",
            "merges_file_path": self.folder / "merges.txt",
            "mind_dataset_dir": self.folder / "train.mindrecord",
            "save_ckpt_dir": output / "ckpt",
            "save_data_file": output / "rollouts.mindrecord",
            "enable_compile_cache": "True",
        }
        small = ("data.prompts_per_step=4", "rollout.num_generations=4", "rollout.max_new_tokens=16", ONE_SHAPE)
        common = (f"reward.functions=[{{name: '{self.folder}/reward.py:variety'}}]", "trainer.total_steps=3")
        return ["train", *_flags(given | flags), *small, *common, *settings]

    def sft(self, output: Path, *settings: str, **flags: str | Path | None) -> list[str]:
        """Arguments of `mindrlhf sft`, as `train`."""
        given = {
            "sft_path_train": self.folder / "train.yaml",
            "tokenizer_path": self.folder,
            "mind_dataset_dir": self.folder / "train.mindrecord",
            "save_ckpt_dir": output / "ckpt",
            "enable_compile_cache": "True",
        }
        small = ("data.pairs_per_step=8", "trainer.total_steps=3", "optimizer.lr=1e-2", ONE_SHAPE)
        return ["sft", *_flags(given | flags), *small, *settings]


def make_task(folder: Path, vocab_size: int = 300, layers: int = 2, template: str = "plain") -> Task:
    """64 one-step problems (`train.mindrecord`), 16 held out (`test.mindrecord`), a tokenizer of `vocab_size` ids.

    layers: of the model; the graphs of one are compiled in two thirds of the time. template: of the prompts.
    """
    sizes = f"--train_size 64 --test_size 16 --max_number 20 --two_step_share 0 --tokenizer_vocab_size {vocab_size}"
    assert cli.main(["synthesize", "--output_dir", str(folder), *sizes.split()]) == 0
    for name in ("train", "test"):
        files = ("--file_path", f"{folder}/{name}.jsonl", "--output_path", f"{folder}/{name}.mindrecord")
        kind = ("--tokenizer_path", str(folder), "--dataset_type", "arithmetic", "--template", template)
        assert cli.main(["data", *files, *kind]) == 0
    write_yamls(folder, vocab_size, layers)
    (folder / "reward.py").write_text(REWARD)
    return Task(folder)


def write_model(task: Task, folder: Path, **changes: int) -> Path:
    """An HF directory with random weights and the tokenizer of the task; returns it."""
    config = load_model_yaml(task.folder / "train.yaml").architecture().model_copy(update=changes)
    arrays = random_arrays(config)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder, config, tensors, tokenizer=Tokenizer.from_path(task.folder))
    return folder


@dataclass(frozen=True)
class Run:
    """What a run left below its folder."""

    folder: Path

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """One dict a step."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def kept_metrics(self) -> list[dict[str, float]]:
        """What is measured, without times and memory."""
        timed = ("timing", "perf", "reshard/seconds", "reshard/bytes_per_s")
        return [{name: row[name] for name in row if not name.startswith(timed)} for row in self.metrics]

    def column(self, name: str) -> np.ndarray:
        """One metric over the steps, float64[steps]."""
        return np.array([row[name] for row in self.metrics])

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """HF name -> array of the saved model."""
        return load_file(self.folder / "ckpt" / "hf" / "model.safetensors")

    @cached_property
    def rollouts(self) -> list:
        """(step, experiences) as recorded by --save_data_file."""
        return read_record(self.folder / "rollouts.mindrecord")

    @property
    def responses(self) -> list[tuple[int, int, int, list[int]]]:
        """(step, prompt id, sample index, token ids) of every recorded response, in order."""
        return [
            (step, rollout.prompt_id, rollout.sample_index, rollout.response_ids.tolist())
            for step, experiences in self.rollouts
            for experience in experiences
            for rollout in experience.group.rollouts
        ]


def call(argv: Sequence[str]) -> int:
    """The exit code of a command in this process."""
    with tests_are_no_users():
        return cli.main([str(part) for part in argv])


@contextmanager
def tests_are_no_users() -> Iterator[None]:
    """Graphs of runs in the body are those of `start`: a digest of the code has modules of users, and no others.

    Users' modules are those that the body loads from outside of this project: neither tests and benchmarks, nor what an
    earlier test has loaded from its folder.
    """
    before = {id(module) for module in sys.modules.values()}

    def loaded() -> Iterator[Path]:
        for module in list(sys.modules.values()):
            path = Path(getattr(module, "__file__", None) or "-")
            if id(module) not in before and _is_a_users(path) and path.is_file():
                yield path

    with patch.object(graph_cache, "_user_modules", loaded):
        yield


@functools.cache
def _is_a_users(path: Path) -> bool:
    installed = (Path(folder).resolve() for folder in (ROOT, sys.prefix, sys.base_prefix))
    return path.suffix == ".py" and not any(path.resolve().is_relative_to(folder) for folder in installed)


def start(
    argv: Sequence[str],
    script: Path | None = None,
    timeout: float = 300,
    cwd: Path | None = None,
    new: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess:
    """A command in a process of its own, on one thread.

    script: run this instead of `mindrlhf`; argv is then without the command's name. cwd: its working directory. new: it
    imports everything itself, which takes seconds (see `warm`).
    """
    command = ["-m", "mindrlhf"] if script is None else [script]
    run = warm.run_new if new else warm.run
    return run([*command, *argv], os.environ | warm.FIXED | environment, timeout, cwd)


def train_apart(argv: Sequence[str], workers: int = 0, timeout: float = 120, new: bool = False) -> str:
    """Train in processes that must end well: one alone, or ranks. Returns what the one alone complained of.

    timeout: seconds for ranks. new: see `start`.
    """
    if not workers:
        result = start(argv, new=new)
        assert result.returncode == 0, result.stderr
        return result.stderr
    result = run_ranks(workers, [ONE_STAGE, *argv[1:]], timeout=timeout)
    assert result.returncode == 0, result.logs
    return ""


def files(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder with its content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _flags(given: dict[str, str | Path | None]) -> list[str]:
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
