"""Work of a benchmark as a real job: a model, prompts, and their `mindrlhf train` command line."""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from comparison_jobs import EXPERTS, FAMILIES

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_names import SHAPE_FIELDS
from mindrlhf.data.mindrecord import PROMPT_SCHEMA, write_columns
from mindrlhf.data.source import read_source
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.shapes import round_up

REWARD = Path(__file__).with_name("digit_reward.py")
PROMPTS_FILE = "prompts.jsonl"
KINDS = {"qwen2": {"type": "LlamaConfig"}, "qwen3": {"type": "Qwen3Config"}, "qwen3_moe": {"model_type": "qwen3_moe"}}
NAMES = ("Anna", "Boris", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana")
THINGS = ("eggs", "stamps", "candles", "tickets", "ropes", "bottles", "bricks", "letters")


@dataclass(frozen=True)
class Work:
    """A job. model, tokenizer: for both roles. train: arguments of `mindrlhf train`; its files are in one folder."""

    model: ModelConfig
    tokenizer: Tokenizer
    train: list[str]


def prepare(args: argparse.Namespace, folder: Path) -> Work:
    """Write the job's input files to `folder`. Raises UserError for an unusable --load."""
    source = folder / "prompts.mindrecord"
    if args.load:
        model, tokenizer = read_hf_config(args.load, seeing=True), Tokenizer.from_path(args.load)
        if model.vision:
            return Work(model, tokenizer, _of_images(args, Path(args.load, PROMPTS_FILE), folder))
        rows = loaded_prompts(Path(args.load), tokenizer)
        weights = ["--load_sft_checkpoint_infer", str(args.load), "--tokenizer_path", str(args.load)]
    else:
        texts = [problem(random.Random(i)) for i in range(2000)]
        tokenizer = train_tokenizer([f"{question}\n#### {answer}" for question, answer in texts], args.bpe_vocab)
        tokenizer.save(folder / "tokenizer")
        model = _model(args, tokenizer)
        rows = _built_prompts(args, tokenizer)
        weights = ["--tokenizer_path", str(folder / "tokenizer")]
    for name, seq_parallel in (("infer", False), ("train", args.seq_parallel)):
        _write_yaml(folder / f"{name}.yaml", model, args, seq_parallel)
    _write_prompts(source, rows)
    flags = {
        "sft_path_infer": folder / "infer.yaml",
        "sft_path_train": folder / "train.yaml",
        "mind_dataset_dir": source,
        "save_ckpt_dir": folder / "out" / "ckpt",
        "enable_compile_cache": args.compile_cache,
    }
    named = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return Work(model, tokenizer, [*named, *weights, *_settings(args), *args.overrides])


def _of_images(args: argparse.Namespace, source: Path, folder: Path) -> list[str]:
    """List the arguments of a model that sees, whose shape is its checkpoint's."""
    flags = {
        "load_sft_checkpoint_infer": args.load,
        "mind_dataset_dir": source,
        "save_ckpt_dir": folder / "out" / "ckpt",
        "enable_compile_cache": args.compile_cache,
    }
    dtypes = [f"{role}_yaml.model.model_config.compute_dtype={args.dtype}" for role in ("train", "infer")]
    return [*(part for name, value in flags.items() for part in (f"--{name}", str(value))), *_settings(args), *dtypes]


def _settings(args: argparse.Namespace) -> list[str]:
    """Turn the flags into settings of a GRPO run, with the paper's loss."""
    least = args.max_completion if args.fixed_length else 0
    settings = {
        "seed": args.seed,
        "data.prompts_per_step": args.prompts,
        "rollout.num_generations": args.num_generations,
        "rollout.max_new_tokens": args.max_completion,
        "rollout.min_new_tokens": least,
        "rollout.temperature": args.temperature,
        "rollout.top_p": args.top_p,
        "rollout.top_k": args.top_k,
        "algorithm.aggregation": "seq-mean-token-mean",
        "algorithm.beta": args.beta,
        "algorithm.num_iterations": args.num_iterations,
        "algorithm.updates_per_iteration": args.mini_batches,
        "optimizer.lr": args.lr,
        "trainer.total_steps": args.steps,
        "trainer.loggers": "[jsonl]",
        "trainer.progress": False,
        "reward.functions": json.dumps([{"name": f"{REWARD}:digits"}]),
    }
    if args.lora_rank:
        settings |= {"lora.rank": args.lora_rank, "lora.alpha": 2 * args.lora_rank}
    if args.micro_batch:
        settings["train.max_tokens_per_micro_batch"] = args.micro_batch
    return [f"{name}={value}" for name, value in settings.items()]


def _model(args: argparse.Namespace, tokenizer: Tokenizer) -> ModelConfig:
    """Build a configuration of a family's shape, for random weights."""
    return ModelConfig(
        family=args.family,
        **FAMILIES[args.family],
        vocab_size=args.model_vocab or round_up(tokenizer.size, 64),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        rope_theta=10000.0,
        max_position_embeddings=max(512, args.max_prompt + args.max_completion),
        tie_word_embeddings=not args.untie,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


def problem(rng: random.Random) -> tuple[str, str]:
    first, second, thing = rng.randint(2, 99), rng.randint(2, 99), rng.choice(THINGS)
    question = (
        f"{rng.choice(NAMES)} has {first} {thing} and gets {second} more from {rng.choice(NAMES)}. "
        f"How many {thing} is that? Write the steps down, and the result after ####."
    )
    return question, str(first + second)


def _built_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[dict]:
    """Build prompts of exactly --max-prompt tokens: a series of problems; the answer is the last one's."""
    rng, rows = random.Random(args.seed), []
    for _ in range(args.dataset_size):
        question, answer = problem(rng)
        ids = tokenizer.encode(question)
        while len(ids) < args.max_prompt:
            ids = tokenizer.encode(problem(rng)[0] + " ") + ids
        rows.append({"ids": ids[-args.max_prompt :], "question": question, "answer": answer})
    return rows


def loaded_prompts(folder: Path, tokenizer: Tokenizer) -> list[dict]:
    """Read the prompts next to a model: JSONL with `prompt` and `answer`."""
    rows = []
    for row in read_source(folder / PROMPTS_FILE):
        text = row.values.get("prompt")
        ids = tokenizer.encode(text) if isinstance(text, str) else []
        if not ids:
            raise UserError(f"{row.where}: should have a text as its prompt.")
        rows.append({"ids": ids, "question": text, "answer": str(row.values.get("answer", ""))})
    return rows


def _write_prompts(path: Path, rows: list[dict]) -> None:
    none = np.zeros(1, np.int64)
    write_columns(
        path,
        PROMPT_SCHEMA,
        (
            {
                "row_index": index,
                "prompt_ids": np.array(row["ids"], np.int64),
                "pretrain_ids": none,
                "loss_mask": none,
                "prompt_length": len(row["ids"]),
                "task": "benchmark",
                "question": row["question"],
                "ground_truth": row["answer"],
                "extra": "{}",
            }
            for index, row in enumerate(rows)
        ),
    )


def _write_yaml(path: Path, model: ModelConfig, args: argparse.Namespace, seq_parallel: bool) -> None:
    """Write a model YAML, which is JSON here."""
    shape = {key: getattr(model, field) for key, field in SHAPE_FIELDS.items()}
    shape |= {
        **KINDS.get(model.family, KINDS["qwen2"]),
        "max_position_embedding": model.max_position_embeddings,
        "eos_token_id": list(model.eos_token_ids),
        "compute_dtype": args.dtype,
    }
    shape |= {name: getattr(model, name) for name in EXPERTS if model.num_experts}
    layout = {"data_parallel": args.data_parallel, "model_parallel": args.model_parallel}
    layout["use_seq_parallel"] = seq_parallel
    content = {"model": {"model_config": shape}, "parallel_config": layout, "context": {"device_target": "CPU"}}
    path.write_text(json.dumps(content))
