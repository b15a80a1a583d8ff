"""Flags and generator of the commands that generate without training: `eval` and `generate`."""

import argparse

from mindrlhf.commands.train import add_model_arguments
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import refuse
from mindrlhf.rollout.generator import Generator

LEAST = {"num_generations": 1, "limit": 1, "slots": 1, "seed": 0, "step": 0}  # flag -> smallest value


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of model, tokenizer, amount and device."""
    add = parser.add_argument
    model = (
        "HF directory, adapter in PEFT's format (with its own base), or checkpoint of training (step_N, latest, best)"
    )
    add("--model", required=True, help=model)
    add("--adapter", help="adapter in PEFT's format, which --model is the base of")
    add_model_arguments(parser)
    add("--num_generations", type=int, default=1, help="responses to each prompt (default 1); pass@k needs several")
    add("--limit", type=int, help="take only this many prompts, the first ones")
    add("--seed", type=int, default=0, help="of the responses that are drawn (default 0)")
    add("--slots", type=int, default=64, help="responses generated at once (default 64)")
    add("--device_target", default="CPU", choices=("CPU", "Ascend"))


def check_generation(args: argparse.Namespace, sampling: SamplingSettings) -> None:
    """Raise UserError for flags out of range, and for settings that contradict each other."""
    given = {flag: value for flag, value in vars(args).items() if flag in LEAST and value is not None}
    least, most = sampling.min_new_tokens, sampling.max_new_tokens
    lengths = f"min_new_tokens is {least}, more than max_new_tokens {most}; set it to {most} or fewer."
    same = (
        f"--num_generations {args.num_generations}: with temperature 0 the responses are all the same; "
        "set temperature above 0, or generate 1."
    )
    ranges = {f"--{flag} {n}: should be {LEAST[flag]} or more.": n < LEAST[flag] for flag, n in given.items()}
    refuse(ranges | {lengths: least > most, same: args.num_generations > 1 and sampling.temperature == 0})


def open_generator(
    args: argparse.Namespace, model: str, sampling: SamplingSettings, tokenizer: Tokenizer, where: str
) -> Generator:
    """Open a generator with the flags' values.

    model: the path of --model, or of one that it is compared with, which has no adapter but its own. where: name of the
    prompts in messages.
    """
    flags = {name: getattr(args, name) for name in ("slots", "seed", "device_target")}
    adapter = args.adapter if model == args.model else None
    return Generator(model, sampling, tokenizer=tokenizer, where=where, adapter=adapter, **flags)
