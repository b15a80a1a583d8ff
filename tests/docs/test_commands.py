"""Every command in README.md and docs/ works. A new one is run, or fails until it is listed below with a reason.

They are run page by page, in order, in a folder of the names that they use (conftest.py): a tiny model in place of each
real one, a few problems in place of each dataset, and behind a command's own settings a few that make it small. By
default the quick ones are run; training, generating and evaluating are checked without computing anything (flags by the
real parser, settings by the checks that a run begins with, files by looking), and run with `--slow`. What needs more
than a CPU and two processes is checked only.
"""

import argparse
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import documentation
import jobs
import pytest
from documentation import SMALL, Command

from mindrlhf import cli
from mindrlhf.commands.arguments import Parser
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.loading import load_settings, load_sft_config
from mindrlhf.flags import TrainFlags
from mindrlhf.report.charts import COST, LEARNING
from mindrlhf.trainer import check as build

# Beginning of a command -> why it is not run here.
NOT_HERE = {
    "bash scripts/setup.sh": "installs 3 GB; .ci/run begins with it",
    "bash scripts/run_tests.sh": "runs these tests",
    "bash scripts/quickstart.sh": "takes minutes; tests/examples/test_quickstart.py runs it",
    "bash scripts/quickstart_tools.sh": "takes minutes; tests/examples/test_quickstart.py runs it",
    "for seed in 0 1 2; do bash scripts/quickstart_tools.sh": "as the line above",
    "bash scripts/quickstart_real.sh": "fetches a model and takes minutes; tests/examples/test_quickstart.py runs it",
    "for seed in 0 1 2; do bash scripts/quickstart.sh --seed $seed --out out/seed$seed; done": "as the line above",
    "for seed in 0 1 2; do bash scripts/quickstart.sh --model qwen3_moe_tiny": "as the line above",
    "bash scripts/quickstart_vision.sh": "minutes; tests/examples/test_quickstart_vision.py has its steps in small",
    "for seed in 0 1 2; do bash scripts/quickstart_vision.sh": "as the line above",
    "bash scripts/learning_curves.sh": "takes half an hour; tests/scripts/test_learning_curves.py runs it",
    "bash scripts/lora_grid.sh": "takes hours; tests/scripts/test_lora_grid.py runs it",
    "python benchmarks/curves.py": "hours, with the peer; tests/benchmarks/test_curves.py has what is made of curves",
    "bash scripts/claims.sh": "takes an hour; tests/benchmarks/test_claims.py runs it",
    "time OMP_NUM_THREADS=1 bash scripts/quickstart.sh": "as bash scripts/quickstart.sh",
    "msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=out/log examples/trl": "as test_trl_scripts.py",
    "vllm serve ": "needs vLLM",
    "mindrlhf generate --model Qwen2.5-VL": "the model in place of each real one has no images; as the next line",
    "mindrlhf eval --model Qwen2.5-VL": "tests/commands/test_seeing_commands.py runs it with a model that has",
    "mindrlhf train --load_sft_checkpoint_train Qwen2.5-VL": "as tests/trainer/test_seeing_policy.py",
    "mindrlhf train --grpo_config examples/recipes/geo3k.yaml": "as the line above",
    "mindrlhf launch --with ray": "needs Ray; tests/launchers/test_started_again.py runs it",
    "bash scripts/wheel.sh": "compiles for minutes; tests/backend/test_build.py runs it",
    "docker build": "needs a container engine; tests/docker checks the steps",
    "bash docker/run_ascend.sh": "needs a container engine and a device",
    "docker run": "needs a container engine; the next line has the script",
    "bash tools/ascend_dryrun.sh": "needs CANN; tests/scripts/test_ascend_dryrun.py runs it for CPUs",
    "mindrlhf acceptance": "takes minutes; tests/acceptance runs it",
    "source .venv/bin/activate": "the tests' environment is another one",
    "hf download ": "needs the network",
    "source /usr/local/Ascend/": "needs an Ascend machine",
    "npu-smi ": "needs an Ascend machine",
}
# Programs whose flags are checked, and which are not run: they end when somebody stops them.
UNTIL_STOPPED = ("mindrlhf report out/gsm8k --live", "mindrlhf chat --model out/gsm8k/ckpt/hf")

SCRIPTS = {
    "examples/qwen_grpo_tutorial/rlhf_data.py": "data",
    "examples/qwen_grpo_tutorial/grpo_one_stage.py": "train",
    "tools/convert_weight.py": "convert",
    "tools/transform_checkpoint.py": "transform",
    "examples/recipes/retool_prompts.py": "retool_prompts",
}
QUICK = (
    *("data", "synthesize", "plan", "show", "report", "plot", "reward-check", "export", "convert", "transform"),
    *("retool_prompts", "launch"),
)
LONG = ("train", "sft", "eval", "generate", "chat")

# `...` in a command of `train` stands for what every such command has.
REST = [
    *("--load_sft_checkpoint_infer", "Qwen/Qwen2.5-0.5B-Instruct"),
    *("--mind_dataset_dir", "data/gsm8k_train.mindrecord"),
]
# Behind what a command has itself. A training writes to a folder of its own.
SHORTER = {
    "synthesize": ("--train_size", "40", "--test_size", "8"),
    "eval": ("--max_new_tokens", "4", "--limit", "2"),
    "generate": ("max_new_tokens=4", "--limit", "2"),
    "sft": ("data.pairs_per_step=1", "trainer.total_steps=2", "--save_ckpt_dir", "own/ckpt"),
    "train": (
        *SMALL,
        *("reward.overlong_buffer=8", "algorithm.updates_per_iteration=1"),  # what so few tokens and prompts allow
        *("trainer.total_steps=2", "dynamic_sampling.max_rounds=1", "trainer.loggers=[jsonl]"),
        *("--save_ckpt_dir", "own/ckpt", "--save_data_file", "own/rollouts.mindrecord"),
    ),
}

# Beginning of a metric -> what it takes besides one run with default settings.
OTHER_RUNS = {
    "val-core/": "held-out problems",
    "val-aux/": "held-out problems",
    "val/reward": "held-out problems",
    "val/loss": "fine-tuning with held-out rows",
    "train/loss": "fine-tuning",
    "actor/expert_": "experts",
    "sample/": "answers of older weights",
    "critic/vf_loss": "a critic",
    "critic/value": "a critic",
    "reshard/": "two layouts",
    "timing_s/reshard": "two layouts",
    "timing_s/reward_model": "reward models",
    "timing_s/wait": "ranks that only train and ranks that only generate",
    "(trainer|generator)/idle_ratio": "ranks that only train and ranks that only generate",
    "perf/weight_sync_s": "two layouts",
    "timing_s/old_log_prob": "several updates of one batch, or an algorithm that reads the policy",
    "sampling/": "dynamic sampling",
    "swap/": "memory.swap",
    "tools/": "tools",
    "perf/mfu/": "a step that builds no graph",
    "perf/max_memory_reserved_gb": "verl",
    "reward/format/": "another reward function",
    "reward/countdown/": "another reward function",
}
GROUPS = "actor|critic|reward|group|[a-z]+_length|timing_s|timing_per_token_ms|perf|training|rollout_corr|val-core"

PAGES = [page for page in documentation.pages() if documentation.commands(page)]


class Line:
    """A command that starts our program. name: of `mindrlhf NAME`. argv: its arguments. workers: that msrun starts."""

    def __init__(self, command: Command):
        words = [re.sub(r"^(BEFORE|AFTER)\d$", "0.5", word) for word in command.words]
        self.where, self.words, self.workers = command.where, words, 0
        if words[0] == "msrun":
            script = next(i for i, word in enumerate(words) if word.endswith(".py"))
            options = msrun_options(words[:script])
            assert options.local_worker_num <= options.worker_num, self.where
            assert 0 <= max(0, options.node_rank) < options.worker_num // options.local_worker_num, self.where
            self.workers, words = options.worker_num, words[script:]
        elif words[0] == "python":
            words = words[1:]
        if words[0] == "mindrlhf":
            words = words[1:]
            assert words[0] in cli.COMMANDS, f"{self.where}: there is no mindrlhf {words[0]}"
        else:
            assert words[0] in SCRIPTS, f"{self.where}: {command.text} is neither run here nor listed in NOT_HERE"
            words = [SCRIPTS[words[0]], *words[1:]]
        self.name = words[0]
        self.argv = [part for word in words[1:] for part in (REST if word == "..." else [word])]

    def parse(self, *more: str) -> argparse.Namespace:
        module = importlib.import_module(f"mindrlhf.commands.{cli.COMMANDS[self.name][0]}")
        parser = Parser(f"mindrlhf {self.name}")
        module.add_arguments(parser)
        return parser.parse([*self.argv, *more])


def msrun_options(words: list[str]) -> argparse.Namespace:
    """What msrun's own parser makes of them."""
    from mindspore.parallel.cluster.run import get_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words, "script.py"])
        return get_args()


def copied(source: str, target: str) -> None:
    """Copy a file, or link weights and records of 50 MB: what is saved is put in their place and changes none."""
    (os.link if source.endswith((".safetensors", ".mindrecord")) else shutil.copy2)(source, target)


@pytest.fixture
def place(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the prepared folder as the working folder."""
    folder = tmp_path / "place"
    shutil.copytree(trained, folder, symlinks=True, copy_function=copied)
    monkeypatch.chdir(folder)
    return folder


def test_reasons_are_of_commands_that_are_there():
    texts = [command.text for page in PAGES for command in documentation.commands(page)]
    for start in (*NOT_HERE, *UNTIL_STOPPED):
        assert any(text.startswith(start) for text in texts), f"no page has {start!r} any more"


@pytest.mark.parametrize("page", PAGES)
def test_commands(page, place, monkeypatch, capfd):
    for command in documentation.commands(page):
        if not_here(command):
            continue
        line = Line(command)
        assert line.name in QUICK + LONG, f"{line.where}: say whether mindrlhf {line.name} is QUICK or LONG"
        if line.name in LONG or command.text in UNTIL_STOPPED:
            check(line, monkeypatch)
        else:
            run(line)
        capfd.readouterr()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_long_commands(page, place, capfd):
    for command in documentation.commands(page):
        if not not_here(command) and command.text not in UNTIL_STOPPED:
            line = Line(command)
            if line.name == "train" and (line.workers > 2 or re.search(r"_(7b|32b)\w*\.yaml", command.text)):
                continue  # on Ascend
            shutil.rmtree("own", ignore_errors=True)
            run(line)
            capfd.readouterr()


def not_here(command: Command) -> bool:
    listed = any(command.begins(start) for start in NOT_HERE)
    if listed and command.words[0] == "bash":
        assert Path(documentation.ROOT, command.words[1]).is_file(), command.where
    return listed


def run(line: Line) -> None:
    """As it stands in the page, in this process where that is possible."""
    more = SHORTER.get(line.name, ())
    if line.words[0] == "msrun":
        command = [*line.words, *more]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(jobs.ROOT)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        code, output = result.returncode, result.stdout + result.stderr
    elif line.words[0] == "python":
        code, output = run_script(line.words[1], [*line.argv, *more]), ""
    else:
        code, output = jobs.call([line.name, *line.argv, *more]), ""
    assert code == 0, f"{line.where}: {' '.join(line.words)}\n{output[-3000:]}"


def run_script(script: str, argv: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *argv])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(script, run_name="__main__")
    return stopped.value.code


def check(line: Line, monkeypatch) -> None:
    """Flags, settings and files of a command that is not run."""
    args = line.parse()
    if line.name == "train":
        with monkeypatch.context() as patch:
            if line.workers:
                for name, value in {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": line.workers, "RANK_ID": 0}.items():
                    patch.setenv(name, str(value))
            build.check(TrainFlags.of(args))
        there = [args.mind_dataset_dir] if args.mind_dataset_dir else []  # a translated command names its own
    elif line.name == "sft":
        load_sft_config(args.sft_config, args.overrides)
        there = [args.mind_dataset_dir, args.load_sft_checkpoint_train]
    elif line.name == "eval":
        there = [args.data, args.model, *([args.compare] if args.compare and not args.compare.endswith("l") else [])]
    elif line.name in ("generate", "chat"):
        load_settings(SamplingSettings, overrides=args.overrides)
        there = [args.model, *([args.prompts] if vars(args).get("prompts") else [])]
    else:
        there = args.runs
    for path in there:
        assert Path(str(path).partition(":")[0]).exists(), f"{line.where}: {path}"  # of a dataset without its split


@pytest.fixture(scope="module")
def written(trained) -> set[str]:
    """The metrics of a run with default settings."""
    lines = (trained / "out" / "gsm8k" / "metrics.jsonl").read_text().splitlines()
    return {name for line in lines for name in json.loads(line)}


def test_charts(written):
    """Every pattern of a report's charts is that of a metric which some run writes."""
    # `mindrlhf sft`, algorithm.kl_in_reward, algorithm.dual_clip, rollout.tools, algorithm.teacher
    elsewhere = (
        "train/",
        "actor/reward_kl_penalty",
        "actor/pg_clipfrac_lower",
        "tools/",
        "conversation/",
        "distillation/",
    )
    for chart in (*LEARNING, *COST):
        assert isinstance(chart.metrics, tuple), chart.title
        for pattern in chart.metrics:
            other = pattern.startswith((*OTHER_RUNS, *elsewhere))
            assert other or any(re.fullmatch(pattern, name) for name in written), f"{chart.title}: {pattern}"


def test_metrics(written):
    """What the pages call a metric is what a run has written."""
    seen = set()
    for page in documentation.pages():
        for text in documentation.named(page):
            if re.fullmatch(rf"(?:{GROUPS})/.+", text) and not text.endswith(("*", ".py")):
                name = text.replace("<function>", "gsm8k")
                seen.add(name)
                other = any(name.startswith(start) for start in OTHER_RUNS)
                assert name in written or other, f"{page}: no run writes `{text}`"
    assert len(seen) > 30
