"""`mindrlhf generate`: responses to the prompts of a file."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindrlhf.backend.process.launch import launch
from mindrlhf.checkpoint.open import open_tokenizer
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.loading import load_settings
from mindrlhf.data.requests import Request, read_requests
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, make_folder
from mindrlhf.files.json import json_lines
from mindrlhf.metrics.progress import Progress
from mindrlhf.rollout.generator import Generator, language_model
from mindrlhf.types import Rollout, RolloutGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `mindrlhf generate`."""
    from mindrlhf.commands.train import add_model_arguments

    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"how tokens are drawn: {', '.join(SamplingSettings.model_fields)}",
    )
    parser.add_argument("--model", required=True, help="HF directory, or a training checkpoint (step_N, latest, best)")
    parser.add_argument(
        "--prompts",
        required=True,
        help="JSONL, JSON or parquet whose rows have prompt (text, or a list of messages) or messages, "
        "or a prompt MindRecord",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL: each row with its responses")
    add_model_arguments(parser)
    parser.add_argument("--num_generations", type=int, default=1, help="responses to each prompt (default 1)")
    parser.add_argument("--limit", type=int, help="first so many prompts only")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument(
        "--step",
        type=int,
        default=0,
        help="keys what is drawn together with the seed: a training step's number gives its responses (default 0)",
    )
    parser.add_argument("--slots", type=int, default=64, help="responses generated at once (default 64)")
    parser.add_argument("--log_probs", action="store_true", help="also write token ids and their log-probs")
    parser.add_argument("--device_target", default="CPU", choices=("CPU", "Ascend"))


def run(args: argparse.Namespace) -> None:
    """Generate, write the file, and print counts and times."""
    sampling = load_settings(SamplingSettings, overrides=args.overrides)
    _validate(args, sampling)
    language_model(args.model)  # a folder that is no model is said to be so before its tokenizer is missed
    tokenizer = open_tokenizer(args, args.model)
    make_folder(args.output.parent)
    if args.output.is_dir():
        raise UserError(f"--output {args.output}: is a folder; give the name of a file.")
    generator = Generator(
        args.model,
        sampling,
        tokenizer=tokenizer,
        slots=args.slots,
        seed=args.seed,
        device_target=args.device_target,
        where=args.prompts,
    )
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf generate"):
        _generate(args, generator)


def _generate(args: argparse.Namespace, generator: Generator) -> None:
    requests = read_requests(args.prompts, generator.tokenizer, args.limit)
    with Progress()("generate", len(requests) * args.num_generations, "responses") as advance:
        prompts = [request.prompt for request in requests]
        groups = generator.generate(prompts, args.num_generations, args.step, advance)
    with atomic_file(args.output) as temporary:
        rows = (
            _row(request, group, generator, args.log_probs) for request, group in zip(requests, groups, strict=True)
        )
        temporary.write_bytes(json_lines(rows))
    print(f"{args.output}: {_throughput(groups, generator)}")


def _row(request: Request, group: RolloutGroup, generator: Generator, log_probs: bool) -> dict[str, Any]:
    """Join the request's own fields with its responses, in order."""
    responses = [_response(rollout, generator.text(rollout), log_probs) for rollout in group.rollouts]
    return {"id": int(group.prompt.id), **request.row, "responses": responses}


def _response(rollout: Rollout, text: str, log_probs: bool) -> dict[str, Any]:
    """Format a response with its log-probs.

    `log_probs` are the policy's with temperature only, `behaviour_log_probs` those of the sampling distribution.
    """
    response = {"text": text, "tokens": len(rollout.response_ids), "finish_reason": rollout.finish_reason}
    if log_probs:
        response |= {
            "token_ids": rollout.response_ids.tolist(),
            "log_probs": rollout.policy_log_probs.tolist(),
            "behaviour_log_probs": rollout.behaviour_log_probs.tolist(),
        }
    return response


def _throughput(groups: Iterable[RolloutGroup], generator: Generator) -> str:
    """Compute the rate of generation, without the one-off compilation."""
    spent = generator.statistics
    seconds = spent.prefill_s + spent.decode_s
    responses = sum(len(group.rollouts) for group in groups)
    rate = f", {spent.tokens / seconds:,.0f} tokens/s" if seconds else ""
    return (
        f"{responses:,} responses, {spent.tokens:,} tokens in {seconds:.2f} s{rate} "
        f"(prefill {spent.prefill_s:.2f} s, decode {spent.decode_s:.2f} s in {spent.decode_steps:,} steps; "
        f"compiling took {spent.compile_s:.1f} s more)"
    )


def _validate(args: argparse.Namespace, sampling: SamplingSettings) -> None:
    for flag, least in (("num_generations", 1), ("limit", 1), ("slots", 1), ("seed", 0), ("step", 0)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise UserError(f"--{flag} {value}: should be {least} or more.")
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {sampling.min_new_tokens}, more than max_new_tokens {sampling.max_new_tokens}; "
            f"set it to {sampling.max_new_tokens} or fewer."
        )
    if args.num_generations > 1 and sampling.temperature == 0:
        raise UserError(
            f"--num_generations {args.num_generations}: with temperature 0 they are all the same; "
            "set temperature above 0, or generate 1."
        )
