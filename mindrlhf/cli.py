"""Command line `mindrlhf COMMAND ...`, the one entry for everything.

The scripts of `examples/` and `tools/` call it too.
Exit codes: 0 done, 2 a user's mistake (one line on stderr), 1 an error of the suite itself (a traceback), two compared
runs that do not agree, or a reward function that failed on every row on which it was tried.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from mindrlhf.backend.process.ending import end_with
from mindrlhf.commands.arguments import Parser
from mindrlhf.errors import UserError
from mindrlhf.files.printable import printable
from mindrlhf.files.standard_streams import guard_streams
from mindrlhf.files.text import nearest
from mindrlhf.run.stop_signals import held_back
from mindrlhf.version import __version__

# Name -> (module under mindrlhf.commands, one line for --help). A module has add_arguments(parser) and run(args),
# which may return an exit code.
COMMANDS = {
    "data": ("data", "convert a task's JSONL to a prompt MindRecord"),
    "synthesize": ("synthesize", "generate a practice task and a small tokenizer"),
    "initialize": ("initialize", "a new model of random weights as a Hugging Face folder, for a warm start"),
    "sft": ("sft", "supervised fine-tuning on (prompt, answer) MindRecords: the warm start"),
    "train": ("train", "GRPO training"),
    "launch": ("launch", "the ranks of a training by msrun or on a Ray cluster, or a job file for Slurm or Kubernetes"),
    "plan": ("memory_plan", "what a training job would hold, compute and move, before it is started"),
    "dry-run": ("dry_run", "the graphs of one rank of a training job, compiled without the others"),
    "acceptance": ("acceptance", "a device against float64 answers, from operators to a run, and one report"),
    "eval": ("evaluate", "accuracy of a model on a prompt MindRecord"),
    "report": ("report", "runs as one HTML page, live or as a file; or whether two runs agree"),
    "show": ("show", "prompts, answers and rewards of a step, in the terminal"),
    "generate": ("generate", "responses of a model to prompts, typed or of a file"),
    "chat": ("chat", "a conversation with a model in the terminal, or through a pipe"),
    "plot": ("plot", "the learning curves of runs as a picture or a table"),
    "reward-check": ("reward_check", "try reward functions on dataset rows"),
    "export": ("export", "the model of a training checkpoint as a Hugging Face folder"),
    "convert": ("convert", "HF safetensors <-> MindSpore checkpoints"),
    "transform": ("transform", "checkpoints of any layout to any other, uncut ones included"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("mindrlhf", description="GRPO training for language models on MindSpore.")
    parser.add_argument("--version", action="version", version=f"mindrlhf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    guard_streams(lasting=argv[:1] in (["train"], ["sft"]))
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        near = nearest(argv[0], COMMANDS)
        right = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}."
        print(f"mindrlhf: unknown command {printable(argv[0])}; {right}", file=sys.stderr)
        return 2
    name = build_parser().parse_args(argv[:1]).command
    module_name, summary = COMMANDS[name]
    # Only the module of the command is imported: `mindrlhf data` never loads a model's graphs.
    module = importlib.import_module(f"mindrlhf.commands.{module_name}")
    parser = Parser(f"mindrlhf {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    module.add_arguments(parser)
    try:
        with held_back():  # an unknown name is looked up in tables that import NumPy, whose threads take signals
            args = parser.parse(argv[1:])
        return module.run(args) or 0
    except UserError as error:
        reason = error
    except OSError as error:
        if error.filename is None:
            raise
        reason = UserError(f"{error.filename}: cannot be read or written ({error.strerror}).")
    print(f"mindrlhf {name}: {reason}", file=sys.stderr)
    return 2


def run(*words: str) -> NoReturn:
    """Run a command line, and end the process.

    words: the command line; without any, this process's own.
    """
    end_with(lambda: main(words or None))


if __name__ == "__main__":
    run()
