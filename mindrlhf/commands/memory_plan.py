"""`mindrlhf plan`: memory, work and messages of a training job, from its flags.

No weights are loaded.
"""

import argparse
import json
import sys

import psutil

from mindrlhf.checkpoint.open import checkpoint_config, open_tokenizer
from mindrlhf.commands import train
from mindrlhf.commands.plan_tables import Report, show
from mindrlhf.configs.validate import check_generating_layout, check_grpo, check_lengths
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.errors import UserError
from mindrlhf.memory.estimate import Lengths, Work, device_limit
from mindrlhf.reshard.plan import plan
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.trainer.check import read_settings
from mindrlhf.units import GIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train.add_arguments(parser)
    parser.add_argument(
        "--prompt_tokens", type=int, help="the longest prompt; default: the dataset's, or what seq_length leaves for it"
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object instead of tables")
    parser.add_argument("--every_transfer", action="store_true", help="also list each transfer of the online reshard")


def run(args: argparse.Namespace) -> None:
    args, work, source = read_work(args)
    report = Report(work, plan(*work.layouts), source, *memory_limit(work))
    if args.json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        print()
        return
    show(report)
    if args.every_transfer:
        print(report.reshard.describe(every_transfer=True))


def read_work(args: argparse.Namespace) -> tuple[argparse.Namespace, Work, str]:
    """Parse the flags into a job, its sizes, and the longest prompt's origin.

    Raises UserError as `train` does.
    """
    args, config, train_yaml, infer_yaml = read_settings(args)
    checkpoint = args.load_sft_checkpoint_train or args.load_sft_checkpoint_infer
    hf = checkpoint_config(checkpoint)
    models = [yaml.architecture(hf, checkpoint or "") for yaml in (train_yaml, infer_yaml)]
    check_generating_layout(infer_yaml)
    if train_yaml.parallel.workers != infer_yaml.parallel.workers:
        raise UserError(
            f"{infer_yaml.path}: parallel_config is of {infer_yaml.parallel.workers} workers, and that of "
            f"{train_yaml.path} of {train_yaml.parallel.workers}; both run on the same workers, so give equal products."
        )
    check_grpo(config, train_yaml, infer_yaml, *models, train_yaml.parallel.workers)
    if not args.replay:
        with RewardRunner(config.reward.model_copy(update={"workers": 1})):
            pass  # it has found the functions, and they take their arguments
    lengths, source = read_lengths(args, config, [train_yaml, infer_yaml], models[0], checkpoint)
    return args, Work.of(config, models[0], train_yaml, infer_yaml, lengths), source


def read_lengths(args, config, yamls, model, checkpoint) -> tuple[Lengths, str]:
    """Read the data's sizes, and the longest prompt's origin in words."""
    tokenizer = None
    if args.tokenizer_path or args.vocab_path or checkpoint:
        tokenizer = open_tokenizer(args, checkpoint)
    longest = [yaml.model.seq_length for yaml in yamls if yaml.model.seq_length]
    left = min([model.max_position_embeddings, *longest]) - config.rollout.max_new_tokens
    prompt, source = left, "what seq_length leaves; else --prompt_tokens"
    if args.prompt_tokens is not None:
        prompt, source = args.prompt_tokens, "--prompt_tokens"
    elif args.mind_dataset_dir:
        prompts = read_prompts(args.mind_dataset_dir, tokenizer)
        prompt, source = max(len(prompt.token_ids) for prompt in prompts), str(args.mind_dataset_dir)
    if prompt < 1:
        raise UserError(
            f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, which leaves no room for a prompt; lower it, "
            "or raise seq_length."
        )
    for yaml in yamls:
        check_lengths(config, yaml, model, prompt)
    problems = read_prompts(config.data.val_dataset, tokenizer) if config.data.val_dataset else []
    problems = problems[: config.validation.limit]
    held_out = max((len(problem.token_ids) for problem in problems), default=0)
    return Lengths(prompt, len(problems), held_out), source


def memory_limit(work: Work) -> tuple[int | None, str]:
    """Find the bytes that one process may have, and the limit's origin in words.

    None without a limit.
    On CPU it is this machine's free memory, shared by all processes.
    """
    context = work.train.context
    if context.device_target == "CPU":
        free = psutil.virtual_memory().available
        workers = len(work.ranks)
        shared = f" for each of {workers} processes on this machine" if workers > 1 else " are free on this machine"
        return free // workers, f"{free / workers / GIB:.1f} GiB{shared}"
    limit = device_limit(work.train)
    if limit is None:
        return None, "context.max_device_memory is not set"
    return limit, f"context.max_device_memory is {context.max_device_memory}"
