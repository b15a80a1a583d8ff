"""`mindrlhf generate`: responses to typed prompts, or to the prompts of a file."""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindrlhf.backend.process.launch import launch
from mindrlhf.checkpoint.local import local_models
from mindrlhf.checkpoint.tokenizer import open_tokenizer
from mindrlhf.commands.generation import (
    add_conversation_arguments,
    add_generation_arguments,
    check_generation,
    open_generator,
    rollout_settings,
)
from mindrlhf.commands.model_flags import add_message_flags
from mindrlhf.configs.grpo import RolloutSettings, SamplingSettings
from mindrlhf.configs.loading import load_settings
from mindrlhf.configs.vision_checks import check_generating_images, check_tool_images
from mindrlhf.data.requests import Request, read_requests, typed_requests
from mindrlhf.data.templates import NAMES
from mindrlhf.environments.conversations import ConversationCounts
from mindrlhf.environments.open import open_conversations, sandbox_note
from mindrlhf.environments.pool import tool_schemas
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder
from mindrlhf.files.json import write_json_lines
from mindrlhf.files.printable import LAYOUT, printable
from mindrlhf.metrics.progress import Progress
from mindrlhf.records.rows import turns_of
from mindrlhf.rollout.generator import Generator, language_model
from mindrlhf.run.picture_prompts import PictureForm
from mindrlhf.run.picture_requests import read_picture_requests, typed_picture_requests
from mindrlhf.types import Rollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    drawn = f"how tokens are drawn: {', '.join(SamplingSettings.model_fields)}"
    add("overrides", nargs="*", metavar="key=value", help=drawn)
    add_generation_arguments(parser)
    add_conversation_arguments(parser)
    rows = "prompt MindRecord; or rows as `mindrlhf data` reads them, a hub's dataset too (openai/gsm8k:test)"
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a user's question; repeatable")
    prompts.add_argument("--prompts", help=rows)
    shown = "image file that each --prompt shows, where it has <image> or before its text; repeatable"
    add("--image", action="append", default=[], metavar="FILE", help=shown)
    add_message_flags(parser, f"of --prompt, as of `mindrlhf data`: {', '.join(NAMES)}, or a jinja2 file")
    add("--output", type=Path, help="JSONL: each row with its responses (default, with --prompt: the terminal)")
    add("--step", type=int, default=0, help="draw as in this training step, with the same seed (default 0)")
    add("--log_probs", action="store_true", help="also write token ids and their log-probs")


def run(args: argparse.Namespace) -> None:
    """Generate, write the file, and print counts and times."""
    load_settings(SamplingSettings, overrides=args.overrides)  # refuses all other keys
    settings = rollout_settings(args, args.overrides)
    check_generation(args, settings)
    args = local_models(args)
    # This refuses a folder that is no model, before its tokenizer is looked for.
    model = language_model(args.model, seeing=True)
    check_generating_images(model, args.model, args.image, args.prompts)
    check_tool_images(settings, model)
    tokenizer = open_tokenizer(args, args.model)
    if args.prompts and not args.output:
        raise UserError("--output is missing; give the name of a JSONL file for the responses.")
    if args.prompts and (args.template is not None or args.system_prompt is not None):
        raise UserError("--template and --system_prompt are for --prompt; the rows of --prompts are whole.")
    if args.output and args.output.is_dir():
        raise UserError(f"--output {args.output}: is a folder; give the name of a file.")
    if args.log_probs and not args.output:
        raise UserError("--log_probs are written to --output; give the name of a file.")
    if args.output:
        make_folder(args.output.parent)
    where = args.prompts or "--prompt"
    generator = open_generator(args, args.model, settings, tokenizer, where, settings.tool_images)
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf generate"):
        _generate(args, settings, generator)


def _generate(args: argparse.Namespace, settings: RolloutSettings, generator: Generator) -> None:
    tokenizer = generator.tokenizer
    variables = args.chat_template_kwargs
    requests = _requests(args, settings, generator)
    notes = sys.stdout if args.output else sys.stderr
    with ExitStack() as stack:
        opened = settings, tokenizer, args.seed, stack, variables, generator.model.vision
        partner = open_conversations(*opened) if settings.converses else None
        if note := sandbox_note(settings):
            print(note, file=notes)
        advance = stack.enter_context(Progress(stream=notes)("generate", 0, "tokens"))
        prompts = [prompt for prompt, _ in requests]
        groups = generator.generate(prompts, args.num_generations, args.step, advance, partner)
        rewards = iter(partner.rewards() if partner else [None] * (len(prompts) * args.num_generations))
    rows = []
    for (prompt, row), group in zip(requests, groups, strict=True):
        responses = [_response(rollout, generator, args.log_probs, next(rewards)) for rollout in group.rollouts]
        rows.append({"id": int(prompt.id), **row, "responses": responses})
    if args.output:
        write_json_lines(args.output, rows)
    else:
        _print(rows)
    if partner:
        print(_conversations(partner.statistics), file=notes)
    spent = generator.statistics
    count = sum(len(group.rollouts) for group in groups)
    rate = f", {spent.tokens / spent.seconds:,.0f} tokens/s" if spent.seconds else ""
    print(
        f"{args.output or 'in all'}: {count:,} responses, {spent.tokens:,} tokens in {spent.seconds:.2f} s{rate} "
        f"(prefill {spent.prefill_s:.2f} s, decode {spent.decode_s:.2f} s in {spent.decode_steps:,} steps; "
        f"compiling took {spent.compile_s:.1f} s more)",
        file=notes,
    )


def _requests(args: argparse.Namespace, settings: RolloutSettings, generator: Generator) -> list[Request]:
    """Read the prompts of a file, or write the typed ones."""
    tools = tool_schemas(None if isinstance(settings.environment, dict) else settings.environment, settings.tools)
    tokenizer = generator.tokenizer
    variables = args.chat_template_kwargs
    vision = generator.model.vision
    texts = args.prompt and args.prompt[: args.limit]
    if vision:
        form = PictureForm(template=args.template, system=args.system_prompt, tools=tools, variables=variables)
        if texts:
            return typed_picture_requests(texts, args.image, tokenizer, vision, form)
        return read_picture_requests(args.prompts, tokenizer, vision, form, args.limit)
    if texts:
        return typed_requests(texts, tokenizer, args.template, args.system_prompt, tools, variables)
    return read_requests(args.prompts, tokenizer, args.limit, tools, variables)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """Print responses; if there are several, below their prompts and numbers."""
    for number, row in enumerate(rows, 1):
        if len(rows) > 1:
            print(f"--- prompt {number} of {len(rows)}: {printable(row['prompt'])}")
        for index, response in enumerate(row["responses"], 1):
            if len(row["responses"]) > 1:
                print(f"--- response {index} of {len(row['responses'])}")
            print(printable(response["text"], keep=LAYOUT))


def _conversations(counts: ConversationCounts) -> str:
    turns = counts.turns / counts.conversations
    calls = counts.calls / counts.conversations
    failed = f"{counts.failures:,} of {counts.calls:,} calls failed, and {counts.lost:,} environments"
    return f"conversations: {turns:.2f} turns and {calls:.2f} calls each; {failed}"


def _response(rollout: Rollout, generator: Generator, log_probs: bool, reward: float | None) -> dict[str, Any]:
    """Format a response with its log-probs.

    `log_probs` are the policy's with temperature only, `behaviour_log_probs` the sampling distribution's. `tokens`
    counts the policy's tokens, and a conversation also has its turns. reward: its environment's, as `Partner.rewards`.
    """
    response: dict[str, Any] = {"text": generator.text(rollout), "tokens": int(rollout.sampled.sum())}
    response["finish_reason"] = rollout.finish_reason
    if reward is not None and not math.isnan(reward):
        response["environment_reward"] = reward
    conversation = not rollout.sampled.all()
    if conversation:
        response["turns"] = turns_of(rollout, generator.tokenizer.decode)
    if conversation and log_probs:
        response["sampled"] = rollout.sampled.tolist()
    if log_probs:
        response |= {
            "token_ids": rollout.response_ids.tolist(),
            "log_probs": rollout.row("policy_log_probs").tolist(),
            "behaviour_log_probs": rollout.row("behaviour_log_probs").tolist(),
        }
    return response
