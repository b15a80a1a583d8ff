"""`mindrlhf generate`: responses to the prompts of a file."""

import argparse
from pathlib import Path
from typing import Any

from mindrlhf.backend.process.launch import launch
from mindrlhf.checkpoint.open import open_tokenizer
from mindrlhf.commands.generation import add_generation_arguments, check_generation, open_generator
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.loading import load_settings
from mindrlhf.data.requests import read_requests
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder
from mindrlhf.files.json import write_json_lines
from mindrlhf.metrics.progress import Progress
from mindrlhf.rollout.generator import Generator, language_model
from mindrlhf.types import Rollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    drawn = f"how tokens are drawn: {', '.join(SamplingSettings.model_fields)}"
    add("overrides", nargs="*", metavar="key=value", help=drawn)
    add_generation_arguments(parser)
    rows = "JSONL, JSON or parquet with prompt (text or messages) or messages, or a prompt MindRecord"
    add("--prompts", required=True, help=rows)
    add("--output", type=Path, required=True, help="JSONL: each row with its responses")
    add("--step", type=int, default=0, help="draw as in this training step, with the same seed (default 0)")
    add("--log_probs", action="store_true", help="also write token ids and their log-probs")


def run(args: argparse.Namespace) -> None:
    """Generate, write the file, and print counts and times."""
    sampling = load_settings(SamplingSettings, overrides=args.overrides)
    check_generation(args, sampling)
    language_model(args.model)  # a folder that is no model is said to be so before its tokenizer is missed
    tokenizer = open_tokenizer(args, args.model)
    make_folder(args.output.parent)
    if args.output.is_dir():
        raise UserError(f"--output {args.output}: is a folder; give the name of a file.")
    generator = open_generator(args, args.model, sampling, tokenizer, args.prompts)
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf generate"):
        _generate(args, generator)


def _generate(args: argparse.Namespace, generator: Generator) -> None:
    requests = read_requests(args.prompts, generator.tokenizer, args.limit)
    with Progress()("generate", len(requests) * args.num_generations, "responses") as advance:
        prompts = [prompt for prompt, _ in requests]
        groups = generator.generate(prompts, args.num_generations, args.step, advance)
    rows = []
    for (prompt, row), group in zip(requests, groups, strict=True):
        responses = [_response(rollout, generator.text(rollout), args.log_probs) for rollout in group.rollouts]
        rows.append({"id": int(prompt.id), **row, "responses": responses})
    write_json_lines(args.output, rows)
    spent, count = generator.statistics, sum(len(group.rollouts) for group in groups)
    rate = f", {spent.tokens / spent.seconds:,.0f} tokens/s" if spent.seconds else ""
    print(
        f"{args.output}: {count:,} responses, {spent.tokens:,} tokens in {spent.seconds:.2f} s{rate} "
        f"(prefill {spent.prefill_s:.2f} s, decode {spent.decode_s:.2f} s in {spent.decode_steps:,} steps; "
        f"compiling took {spent.compile_s:.1f} s more)"
    )


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
