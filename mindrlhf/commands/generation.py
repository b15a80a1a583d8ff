"""Flags and generator of the commands that generate without training: `chat`, `eval` and `generate`."""

import argparse
from collections.abc import Sequence

from mindrlhf.commands.model_flags import add_model_flags
from mindrlhf.configs.grpo import RolloutSettings, SamplingSettings
from mindrlhf.configs.loading import load_settings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.rollout.generator import Generator

# Flag -> number of values.
CONVERSATION = {"environment": None, "tools": "+", "tool_format": None, "max_turns": None}
CONVERSATION |= {"tool_images": None, "sandbox": None}
LEAST = {"num_generations": 1, "limit": 1, "slots": 1, "seed": 0, "step": 0, "context": 2}  # flag -> smallest value


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the model and of the number of responses."""
    add = parser.add_argument
    add_model_flags(parser)
    add("--num_generations", type=int, default=1, help="responses to each prompt (default 1); pass@k needs several")
    add("--limit", type=int, help="take only this many prompts, the first ones")
    add("--slots", type=int, default=64, help="responses generated at once (default 64)")


def add_conversation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of environments and tools."""
    for name, values in CONVERSATION.items():
        described = RolloutSettings.model_fields[name].description
        parser.add_argument(f"--{name}", nargs=values, metavar="VALUE", help=described)


def rollout_settings(args: argparse.Namespace, overrides: Sequence[str]) -> RolloutSettings:
    """Load settings from the flags of environments and tools and from `key=value` overrides."""
    given = {name: getattr(args, name) for name in CONVERSATION}
    written = {name: f"[{', '.join(value)}]" if isinstance(value, list) else value for name, value in given.items()}
    flags = [f"{name}={value}" for name, value in written.items() if value is not None]
    return load_settings(RolloutSettings, overrides=[*overrides, *flags])


def check_generation(args: argparse.Namespace, sampling: SamplingSettings) -> None:
    """Raise UserError for flags out of range, and for settings that contradict each other."""
    for flag, value in vars(args).items():
        if flag in LEAST and value is not None and value < LEAST[flag]:
            raise UserError(f"--{flag} {value}: should be {LEAST[flag]} or more.")
    least, most = sampling.min_new_tokens, sampling.max_new_tokens
    if least > most:
        raise UserError(f"min_new_tokens is {least}, more than max_new_tokens {most}; set it to {most} or fewer.")
    if args.num_generations > 1 and sampling.temperature == 0:
        found = f"--num_generations {args.num_generations}: with temperature 0 the responses are all the same"
        raise UserError(f"{found}; set temperature above 0, or generate 1.")


def open_generator(
    args: argparse.Namespace,
    model: str,
    sampling: SamplingSettings,
    tokenizer: Tokenizer,
    where: str,
    shows: bool = False,
) -> Generator:
    """Open a generator with the flags' values.

    model: the path of --model, or of the model that it is compared with, which gets no --adapter. where: name of the
    prompts in messages. shows: tools may show images.
    """
    flags = {name: getattr(args, name) for name in ("slots", "seed", "device_target")}
    adapter = args.adapter if model == args.model else None
    return Generator(model, sampling, tokenizer=tokenizer, where=where, adapter=adapter, shows=shows, **flags)
