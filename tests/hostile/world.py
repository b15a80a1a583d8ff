"""A folder with one sound file of every kind that users touch, and the commands that read them.

All paths are relative to the folder, so that a copy of it is as good.
"""

import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jobs
import run_folders
import sharded_files
from hostile.sandbox import Child, command

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
MODEL = tuple(f"hf/{name}" for name in ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER))
SMALL = ("data.prompts_per_step=2", "rollout.num_generations=2", "rollout.max_new_tokens=4", "trainer.save_freq=1")
REWARD = "reward.functions=[{name: 'reward.py:variety'}]"
YAMLS = ("--sft_path_train", "train.yaml", "--sft_path_infer", "infer.yaml")
TRAIN = (*YAMLS, "--tokenizer_path", "hf", "--mind_dataset_dir", "train.mindrecord", *SMALL, REWARD)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
DATA = ("data", "--output_path", "out/problems.mindrecord", "--tokenizer_path", "hf", "--file_path")
STEP = "run/ckpt/step_000002"
STATE = (f"{STEP}/state.json", f"{STEP}/manifest.json", "run/ckpt/latest", f"{STEP}/rank_0/model.safetensors")
COMPANIONS = tuple(f"{STEP}/hf/{name}" for name in ("config.json", *TOKENIZER))
ANSWERS = ("--max_new_tokens", "2", "--limit", "2")


@dataclass(frozen=True)
class Use:
    """A command and the files that it reads.

    weight: how often it comes, compared with the others. code: exit code where nothing is wrong with the files.
    """

    argv: tuple[str, ...]
    files: tuple[str, ...]
    weight: int = 2
    code: int = 0


def _use(*argv: str, files: Sequence[str], weight: int = 2, code: int = 0) -> Use:
    return Use(argv, tuple(files), weight, code)


def _transform(*argv: str, files: Sequence[str], weight: int = 2) -> Use:
    return _use("transform", *argv, files=files, weight=weight)


USES = (
    _use(*DATA, "gsm8k.jsonl", files=["gsm8k.jsonl", *(f"hf/{name}" for name in TOKENIZER)], weight=4),
    _use(*DATA, "arithmetic.jsonl", "--dataset_type", "arithmetic", files=["arithmetic.jsonl"]),
    _use(*DATA, "countdown.jsonl", "--dataset_type", "countdown", files=["countdown.jsonl"], weight=3),
    _use(*DATA, "array.json", files=["array.json"]),
    _use(
        *DATA, "fields.jsonl", "--dataset_type", "fields",
        "--fields", "question=problem", "ground_truth=solution.final",
        files=["fields.jsonl"], weight=3,
    ),
    _use(*DATA, "gsm8k.jsonl", "--template", "template.jinja", files=["template.jinja"]),
    _use(*DATA, "verl.parquet", "--dataset_type", "verl", files=["verl.parquet"]),
    _use(
        "data", "--output_path", "out/problems.mindrecord", "--vocab_path", "vocab/vocab.json", "--merges_file_path",
        "vocab/merges.txt", "--file_path", "gsm8k.jsonl", files=["vocab/vocab.json", "vocab/merges.txt"], weight=3,
    ),
    _use("show", "run", files=["run/rollouts/step_000002.jsonl"], weight=5),
    _use("report", "run", "--output", "out/report.html",
         files=["run/metrics.jsonl", "run/settings.json", "run/rollouts/step_000001.jsonl"], weight=6),
    _use("report", "run", "other", "--compare", files=["run/metrics.jsonl", "other/settings.json"], weight=3, code=1),
    _use("plot", "run", "--output", "out/curves.png", files=["run/metrics.jsonl"], weight=4),
    _use("plot", "run", "other", "--metric", "actor/*", "--output", "out/curves.png", files=["run/metrics.jsonl"]),
    _use("plan", *TRAIN, files=["train.yaml", "infer.yaml"], weight=6),
    _use("plan", *TRAIN, "--grpo_config", "grpo.yaml", files=["grpo.yaml"], weight=5),
    _use("plan", *TRAIN, files=["train.mindrecord", "train.mindrecord.db"], weight=4),
    _use("plan", *TRAIN, "--load_sft_checkpoint_infer", "hf", files=MODEL),
    _use("train", *TRAIN, "--load_sft_checkpoint_infer", "hf", "--save_ckpt_dir", "out/ckpt", "trainer.total_steps=1",
         files=[*MODEL, "reward.py"], weight=3),
    _use("train", *TRAIN, "--load_sft_checkpoint_infer", "sharded", "--save_ckpt_dir", "out/ckpt",
         "trainer.total_steps=1",
         files=["sharded/model.safetensors.index.json", "sharded/model-00001-of-00002.safetensors"]),
    _use("train", *TRAIN, "--replay", "run/rollouts.mindrecord", "--save_ckpt_dir", "out/ckpt",
         files=["run/rollouts.mindrecord", "run/rollouts.mindrecord.db"], weight=5),
    _use("train", *TRAIN, "--replay", "records.jsonl", "--save_ckpt_dir", "out/ckpt",
         files=["records.jsonl"], weight=1, code=2),
    _use("train", *TRAIN, "--save_ckpt_dir", "run/ckpt", "--save_data_file", "run/rollouts.mindrecord",
         "--resume_training", "auto", "trainer.total_steps=3",
         files=[*STATE, *COMPANIONS, "run/metrics.jsonl", "run/rollouts.mindrecord"], weight=8),
    _use("train", *TRAIN, "--save_ckpt_dir", "out/ckpt", "--resume_training", STEP, "trainer.total_steps=3",
         files=[*STATE, *COMPANIONS, f"{STEP}/rank_0/exp_avg.safetensors"], weight=5),
    _use("sft", "--sft_path_train", "train.yaml", "--tokenizer_path", "hf", "--mind_dataset_dir", "train.mindrecord",
         "--sft_config", "sft.yaml", "--save_ckpt_dir", "out/sft", files=["sft.yaml"], weight=3),
    _use("eval", "--model", "hf", "--data", "test.mindrecord", *ANSWERS, "--reward", "reward.py:variety",
         files=["test.mindrecord", "test.mindrecord.db", *MODEL], weight=4),
    _use("eval", "--model", "hf", "--data", "test.mindrecord", *ANSWERS, "--compare", "answers.jsonl",
         files=["answers.jsonl"], weight=3),
    _use("generate", "--model", "hf", "--prompts", "prompts.jsonl", "--output", "out/responses.jsonl",
         "max_new_tokens=2", files=["prompts.jsonl", "hf/tokenizer_config.json", "hf/chat_template.jinja"], weight=4),
    _use("convert", "--torch_ckpt_dir", "hf", "--mindspore_ckpt_path", "out/model.ckpt", files=MODEL[:3], weight=4),
    _use("convert", "--torch_ckpt_dir", "out/hf", "--mindspore_ckpt_path", "model.ckpt", "--reverse", "--config_path",
         "hf", files=["model.ckpt"], weight=4),
    _use("convert", "--torch_ckpt_dir", "sharded", "--mindspore_ckpt_path", "out/model.safetensors",
         files=["sharded/model.safetensors.index.json", "sharded/model-00002-of-00002.safetensors"], weight=3),
    _transform("--src_checkpoint", "cut", "--src_strategy", "strategy", "--dst_checkpoint", "out/whole.ckpt",
               files=["strategy/ckpt_strategy_rank_1.ckpt", "cut/rank_1/old_1.ckpt"], weight=6),
    _transform("--src_checkpoint", "cut", "--src_strategy", "cut.yaml", "--dst_checkpoint", "out/ranks",
               "--dst_strategy", "strategy", files=["cut.yaml", "strategy/ckpt_strategy_rank_0.ckpt"], weight=3),
    _use("export", "--checkpoint", "run/ckpt", "--output", "out/exported", files=[*STATE, *COMPANIONS], weight=6),
    _use("reward-check", "--reward", "math", "--data", "gsm8k.jsonl", files=["gsm8k.jsonl"]),
    _use("reward-check", "--reward", "countdown", "--data", "countdown.jsonl", "--dataset_type", "countdown",
         files=["countdown.jsonl"]),
    _use("reward-check", "--reward", "reward.py:variety", "--data", "test.mindrecord", "--tokenizer_path", "hf",
         "--completions", "run/rollouts/step_000001.jsonl", "--completions", "completions.jsonl",
         files=["completions.jsonl", "reward.py", "test.mindrecord"]),
)  # fmt: skip


if importlib.util.find_spec("pyarrow") is None:
    USES = tuple(use for use in USES if "verl.parquet" not in use.files)


def build(folder: Path) -> None:
    """Make the folder."""
    folder.mkdir(parents=True)
    for argv in _PREPARED[:3]:
        _run(folder, argv)
    jobs.write_yamls(folder, 300)
    _settings(folder)
    for argv in _PREPARED[3:]:
        _run(folder, argv)
    shutil.copytree(folder / "first/ckpt/hf", folder / "hf")
    (folder / "hf/chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "vocab").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.move(folder / name, folder / "vocab")
    run_folders.make_run(folder / "other", steps=6)
    for argv in _WITH_MODEL:
        _run(folder, argv)
    _weights(folder)
    _text_files(folder)
    for name in ("problems.mindrecord", "responses.jsonl", "report.html", "curves.png", "answers.jsonl"):
        (folder / "out").mkdir(exist_ok=True)
        (folder / "out" / name).write_text(f"{name} of an earlier run\n")


_PREPARED = (
    "synthesize --output_dir . --train_size 24 --test_size 4 --max_number 20 --two_step_share 0 "
    "--tokenizer_vocab_size 300",
    "synthesize --output_dir numbers --task countdown --train_size 4 --test_size 1 --max_number 20",
    "data --file_path train.jsonl --output_path train.mindrecord --tokenizer_path . --dataset_type arithmetic "
    "--template plain",
    "data --file_path test.jsonl --output_path test.mindrecord --tokenizer_path . --dataset_type arithmetic "
    "--template plain",
    f"train {' '.join(YAMLS)} --tokenizer_path . --mind_dataset_dir train.mindrecord --save_ckpt_dir first/ckpt "
    f"{' '.join(SMALL)} trainer.total_steps=1 reward.functions=[{{name:'reward.py:variety'}}]",
)
_WITH_MODEL = (
    f"train {' '.join((*YAMLS, *SMALL))} --tokenizer_path hf --mind_dataset_dir train.mindrecord --save_ckpt_dir "
    "run/ckpt --save_data_file run/rollouts.mindrecord trainer.total_steps=2 trainer.save_rollouts=True "
    "reward.functions=[{name:'reward.py:variety'}]",
    f"eval --model hf --data test.mindrecord {' '.join(ANSWERS)} --output answers.jsonl",
)


def _run(folder: Path, argv: str) -> None:
    parts = [part.replace("{name:", "{name: ") for part in argv.split()]
    outcome = Child(command(parts), folder, folder.parent / "preparation").wait()
    assert outcome.code == 0, (argv, outcome)


def _settings(folder: Path) -> None:
    (folder / "reward.py").write_text(jobs.REWARD)
    grpo = {
        "data": {"prompts_per_step": 2},
        "rollout": {"num_generations": 2, "max_new_tokens": 4, "temperature": 1.0, "stop_strings": ["###"]},
        "reward": {"functions": [{"name": "gsm8k", "weight": 1.0}]},
        "optimizer": {"lr": 1e-6},
        "algorithm": {"beta": 0.01, "epsilon_high": 0.28},
        "trainer": {"total_steps": 1},
    }
    (folder / "grpo.yaml").write_text(json.dumps(grpo))
    sft = {"data": {"pairs_per_step": 2}, "trainer": {"total_steps": 1}, "optimizer": {"lr": 1e-3}}
    (folder / "sft.yaml").write_text(json.dumps(sft))


def _weights(folder: Path) -> None:
    def model() -> int:
        from safetensors.numpy import load_file, save_file

        from mindrlhf.reshard.strategy import save_strategies

        arrays = load_file("hf/model.safetensors")
        Path("sharded").mkdir()
        names, files = sorted(arrays), [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        for file, part in zip(files, (names[::2], names[1::2]), strict=True):
            save_file({name: arrays[name] for name in part}, f"sharded/{file}")
        weight_map = {name: files[index % 2] for index, name in enumerate(names)}
        Path("sharded/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        shutil.copy("hf/config.json", "sharded")
        layout = sharded_files.layout_of(tp=2)
        sharded_files.write_shards(Path("cut"), layout, file_format="ckpt")
        save_strategies(Path("strategy"), layout)
        sharded_files.write_yaml(Path("cut.yaml"), tp=2)
        return 0

    outcome = Child(model, folder, folder.parent / "preparation").wait()
    assert outcome.code == 0, outcome
    _run(folder, "convert --torch_ckpt_dir hf --mindspore_ckpt_path model.ckpt")


def _text_files(folder: Path) -> None:
    gsm8k = [
        {
            "question": f"Nat has {n} apples and buys {n} more. How many are there?",
            "answer": f"{n}+{n}={2 * n}\n#### {2 * n}",
        }
        for n in range(1, 5)
    ]
    fields = [
        {"problem": row["question"], "solution": {"final": 2 * n}, "tags": ["a"]} for n, row in enumerate(gsm8k, 1)
    ]
    prompts = [
        {"prompt": "2+2=", "note": {"n": 1}},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+3?"}]},
    ]
    completions = [{"completion": "#### 4"}] * 4
    for name, rows in {"gsm8k": gsm8k, "fields": fields, "prompts": prompts, "completions": completions}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "array.json").write_text(json.dumps(gsm8k, indent=1))
    shutil.move(folder / "train.jsonl", folder / "arithmetic.jsonl")
    shutil.move(folder / "numbers/train.jsonl", folder / "countdown.jsonl")
    shutil.copy(folder / "run/rollouts/step_000002.jsonl", folder / "records.jsonl")
    (folder / "template.jinja").write_text("{{ system }}{{ question }} {{ instruction }}\n")
    if importlib.util.find_spec("pyarrow"):
        _run(folder, "data --file_path gsm8k.jsonl --output_path verl.parquet")
