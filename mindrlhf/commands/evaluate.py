"""`mindrlhf eval`: accuracy of a model on held-out prompts, and significant differences between models."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindrlhf.backend.process.launch import launch
from mindrlhf.checkpoint.open import open_tokenizer
from mindrlhf.commands.generation import add_generation_arguments, check_generation, open_generator
from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings, SamplingSettings
from mindrlhf.configs.loading import load_settings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.evaluation.pass_at_k import Answer, compare, evaluate, overall, read_answers
from mindrlhf.files.atomic import make_folder
from mindrlhf.rollout.generator import language_model

SAMPLING = {"max_new_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": 0}  # flag -> default: greedy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `mindrlhf eval`."""
    add_generation_arguments(parser)
    parser.add_argument("--data", required=True, help="prompt MindRecord")
    parser.add_argument(
        "--compare",
        help="a second model, or answers that --output wrote: how far --model is from it, with a paired test",
    )
    parser.add_argument(
        "--reward", help="reward function that says what is right (default: the one of the data's task)"
    )
    for name, default in SAMPLING.items():
        text = SamplingSettings.model_fields[name].description
        parser.add_argument(f"--{name}", default=default, metavar="N", help=f"{text} Default: {default}.")
    parser.add_argument("--output", type=Path, help="JSONL of every answer")


def run(args: argparse.Namespace) -> None:
    """Generate, score, and print one JSON object."""
    sampling = load_settings(SamplingSettings, overrides=[f"{name}={getattr(args, name)}" for name in SAMPLING])
    check_generation(args, sampling)
    models = [args.model] if args.compare is None or args.compare.endswith(".jsonl") else [args.model, args.compare]
    for path in models:
        language_model(path)
    tokenizers = [open_tokenizer(args, path) for path in models]
    earlier = read_answers(args.compare) if args.compare and len(models) == 1 else None
    if args.output:
        make_folder(args.output.parent)
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf eval"):
        from mindrlhf.evaluation.evaluator import write_answers

        answers = [_answers(args, sampling, *model) for model in zip(models, tokenizers, strict=True)]
    if args.output:
        write_answers(args.output, answers[0])
    result = _summary(answers[0])
    if args.compare:
        other = answers[1] if earlier is None else earlier
        result |= {"compared_with": {"model": args.compare, **_summary(other)}}
        result |= {"comparison": {k: _rounded(v) for k, v in asdict(compare(other, answers[0])).items()}}
    print(json.dumps(result))


def _answers(args: argparse.Namespace, sampling: SamplingSettings, path: str, tokenizer: Tokenizer) -> list[Answer]:
    """Generate one model's answers."""
    from mindrlhf.data.mindrecord import read_prompts
    from mindrlhf.evaluation.evaluator import Evaluator, reward_of
    from mindrlhf.metrics.progress import Progress
    from mindrlhf.rewards.runner import RewardRunner

    prompts = read_prompts(args.data, tokenizer)[: args.limit]
    generator = open_generator(args, path, sampling, tokenizer, args.data)
    name = args.reward or reward_of(prompts, args.data, "name one with --reward")
    engine = generator.engine(prompts, args.num_generations)
    with RewardRunner(RewardSettings(functions=(RewardFunctionSettings(name=name),))) as rewards:
        rewards.check_ground_truths(prompts, args.data)
        decode = _decoder(tokenizer)
        return Evaluator(engine, prompts, args.num_generations, rewards, decode, lambda own: own, Progress())()


def _decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def _summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Summarise all problems, and each source where there are several."""
    sources = evaluate(answers)
    names = [name for name in next(iter(sources.values())) if name.startswith(("pass@", "maj@")) and name != "pass@1"]
    shown = {"accuracy": "pass@1", **{n: n for n in names}, "mean_length": "length", "truncated": "truncated"}
    result: dict[str, Any] = {title: _rounded(overall(sources, name)) for title, name in shown.items()}
    result["problems"] = int(sum(values["problems"] for values in sources.values()))
    if len(sources) > 1:
        result["sources"] = {
            source: {name: _rounded(value) for name, value in values.items()} for source, values in sources.items()
        }
    return result


def _rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
