"""`mindrlhf eval`: accuracy of a model on held-out prompts, and significant differences between models."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
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
from mindrlhf.configs.grpo import GRPOSettings, RewardFunctionSettings, RewardSettings, RolloutSettings
from mindrlhf.configs.vision_checks import check_tool_images
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.environments.open import open_conversations, sandbox_note
from mindrlhf.evaluation.pass_at_k import Answer, compare, evaluate, overall, read_answers, turn_metrics
from mindrlhf.files.atomic import make_folder
from mindrlhf.metrics.experience import add_conversations
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.metrics.progress import Progress
from mindrlhf.rewards.runner import open_rewards
from mindrlhf.rollout.generator import language_model
from mindrlhf.run.training_data import read_problems

SAMPLING = {"max_new_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": 0}  # flag -> default: greedy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_generation_arguments(parser)
    rows = "prompt MindRecord; or rows as `mindrlhf data` reads them, a hub's dataset too (openai/gsm8k:test)"
    add("--data", required=True, help=rows)
    add("--compare", help="a second model, or answers of --output: its distance from --model, with a paired test")
    add("--reward", help="reward function that says what is right (default: the one of the data's task)")
    for name, default in SAMPLING.items():
        text = RolloutSettings.model_fields[name].description
        add(f"--{name}", default=default, metavar="N", help=f"{text} Default: {default}.")
    add_conversation_arguments(parser)
    add("--output", type=Path, help="JSONL of every answer")


def run(args: argparse.Namespace) -> None:
    """Generate, score, and print one JSON object."""
    settings = rollout_settings(args, [f"{name}={getattr(args, name)}" for name in SAMPLING])
    check_generation(args, settings)
    args = local_models(args)
    models = [args.model] if args.compare is None or args.compare.endswith(".jsonl") else [args.model, args.compare]
    for path in models:
        check_tool_images(settings, language_model(path, seeing=True))
    tokenizers = [open_tokenizer(args, path) for path in models]
    earlier = [read_answers(args.compare)] if args.compare and len(models) == 1 else []
    if args.output:
        make_folder(args.output.parent)
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf eval"):
        from mindrlhf.evaluation.evaluator import write_answers

        found = [_answers(args, settings, *model) for model in zip(models, tokenizers, strict=True)]
        answers = [own for own, _ in found]
    if args.output:
        write_answers(args.output, answers[0])
    result = _summary(answers[0]) | found[0][1]
    if args.compare:
        other = (answers + earlier)[1]
        result["compared_with"] = {"model": args.compare, **_summary(other)}
        result["comparison"] = asdict(compare(other, answers[0]))
    print(json.dumps(_rounded(result)))


def _answers(
    args: argparse.Namespace, settings: RolloutSettings, path: str, tokenizer: Tokenizer
) -> tuple[list[Answer], dict[str, float]]:
    """Generate one model's answers; conversations also give metrics."""
    from mindrlhf.evaluation.evaluator import Evaluator, reward_of

    generator = open_generator(args, path, settings, tokenizer, args.data, settings.tool_images)
    vision = generator.model.vision
    prompts = read_problems(args.data, tokenizer, GRPOSettings(rollout=settings), {}, limit=args.limit, vision=vision)
    name = args.reward or reward_of(prompts, args.data, "name one with --reward")
    metrics = MetricSet()
    with ExitStack() as stack:
        opened = settings, tokenizer, args.seed, stack, None, generator.model.vision
        partner = open_conversations(*opened) if settings.converses else None
        if note := sandbox_note(settings):
            print(note, file=sys.stderr)
        functions = (RewardFunctionSettings(name=name),)
        rewards = open_rewards(stack, RewardSettings(functions=functions), prompts, args.data)
        evaluator = Evaluator(
            engine=generator.engine(prompts, args.num_generations),
            prompts=prompts,
            num_generations=args.num_generations,
            rewards=rewards,
            decode=partial(tokenizer.decode, skip_special_tokens=True),
            gather=lambda own: own,
            progress=Progress(),
            partner=partner,
        )
        answers = evaluator()
        if partner:
            add_conversations(metrics, **vars(partner.statistics))
    return answers, metrics.results()


def _summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Summarise all problems, and each source if there are several."""
    sources = evaluate(answers)
    names = [name for name in next(iter(sources.values())) if name.startswith(("pass@", "maj@")) and name != "pass@1"]
    shown = {"accuracy": "pass@1", **{n: n for n in names}, "mean_length": "length", "truncated": "truncated"}
    result: dict[str, Any] = {title: overall(sources, name) for title, name in shown.items()}
    result["problems"] = int(sum(values["problems"] for values in sources.values()))
    return result | turn_metrics(answers) | ({"sources": sources} if len(sources) > 1 else {})


def _rounded(value: Any) -> Any:
    """Round numbers to four significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
