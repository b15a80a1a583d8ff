"""`mindrlhf eval`: accuracy of a model on a prompt MindRecord."""

import argparse
import json
from pathlib import Path

from mindrlhf.backend.launch import launch
from mindrlhf.checkpoint.atomic import atomic_file
from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings, SamplingSettings
from mindrlhf.data.tasks import TASKS
from mindrlhf.errors import UserError
from mindrlhf.metrics.files import json_line, make_folder
from mindrlhf.trainer.roles import Weights, check_token_ids, open_tokenizer, stop_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mindrlhf.commands.train import add_model_arguments

    parser.add_argument("--model", required=True, help="HF directory")
    parser.add_argument("--data", required=True, help="prompt MindRecord")
    add_model_arguments(parser)
    parser.add_argument(
        "--reward", help="reward function that says what is right (default: the one of the data's task)"
    )
    parser.add_argument("--limit", type=int, help="first so many problems only")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--slots", type=int, default=64, help="answers generated at once")
    parser.add_argument("--device_target", default="CPU", choices=("CPU", "Ascend"))
    parser.add_argument("--output", type=Path, help="JSONL of every answer")


def run(args: argparse.Namespace) -> None:
    _validate(args)
    model = read_hf_config(args.model)
    tokenizer = open_tokenizer(args, args.model)
    if args.output:
        make_folder(args.output.parent)
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf eval"):
        from mindrlhf import backend
        from mindrlhf.data.mindrecord import read_prompts
        from mindrlhf.metrics.progress import Progress
        from mindrlhf.models.transformer import Decoder
        from mindrlhf.rewards.runner import RewardRunner
        from mindrlhf.rollout.engine import Engine
        from mindrlhf.trainer.evaluate import evaluate

        prompts = read_prompts(args.data, tokenizer)[: args.limit]
        check_token_ids(tokenizer, model, max(int(p.token_ids.max()) for p in prompts), args.data)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = model.max_position_embeddings - longest
        if args.max_new_tokens > room:
            raise UserError(
                f"{args.data}: prompts of up to {longest} tokens with --max_new_tokens {args.max_new_tokens} are "
                f"longer than the model's {model.max_position_embeddings} positions; "
                + (f"set --max_new_tokens to {room} or fewer." if room > 0 else "use shorter prompts.")
            )
        name = args.reward or _reward_of(prompts[0].fields["task"], args.data)
        positions = longest + args.max_new_tokens + 64
        decoder = Decoder(
            model, Weights(args.model, model, 0).parameters(), backend.kernels(args.device_target), positions
        )
        sampling = SamplingSettings(max_new_tokens=args.max_new_tokens, temperature=0.0)
        slots = min(args.slots, len(prompts))
        engine = Engine(model, decoder, sampling, slots, longest, stop_ids(tokenizer, model), seed=0)
        with RewardRunner(RewardSettings(functions=(RewardFunctionSettings(name=name),))) as rewards:
            result = evaluate(engine, prompts, rewards, tokenizer, Progress())
    if args.output:
        with atomic_file(args.output) as temporary:
            temporary.write_text("".join(json_line(row) for row in rows(result)), encoding="utf-8")
    print(
        json.dumps(
            {
                "accuracy": round(result.accuracy, 4),
                "problems": len(result.scores),
                "mean_length": round(float(result.lengths.mean()), 2),
                "truncated": round(float(result.truncated.mean()), 4),
            }
        )
    )


def _validate(args: argparse.Namespace) -> None:
    for flag in ("limit", "max_new_tokens", "slots"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag} {value}: should be 1 or more.")


def _reward_of(task: str, data: str) -> str:
    """The reward function that fits a dataset's task."""
    if task not in TASKS:
        raise UserError(f"{data}: its task {task!r} has no reward function of its own; name one with --reward.")
    return TASKS[task].reward


def rows(result) -> list[dict]:
    """One plain dict an answer."""
    return [
        {
            "id": int(prompt.id),
            "question": prompt.fields.get("question"),
            "ground_truth": prompt.fields.get("ground_truth"),
            "answer": answer,
            "score": float(score),
            "length": int(length),
            "truncated": bool(truncated),
        }
        for prompt, answer, score, length, truncated in zip(
            result.prompts, result.answers, result.scores, result.lengths, result.truncated, strict=True
        )
    ]
