"""A folder in which the documentation's commands mean something: what they name, tiny."""

import json
import shutil
from pathlib import Path

import documentation
import gguf_files
import jobs
import pytest
import yaml
from small_model import random_arrays, small_config

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.data.parquet import write_parquet
from mindrlhf.data.source import read_source
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.models.parameters import parameter_table

# In place of the numbers that a model YAML has; 8 tensor-parallel ranks divide them.
SHAPE = {"hidden_size": 128, "intermediate_size": 64, "num_heads": 8, "n_kv_heads": 4, "vocab_size": 512}
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")  # of the real vocabulary

# As verl's examples begin a training, and as MindRLHF's master sets one up.
VERL_SCRIPT = """set -x
train_path=$PWD/verl/train.parquet
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files=$train_path data.train_batch_size=64 \\
    data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8 $@
"""
GRPO_CONFIG = """rl_config: {num_rollouts: 2, chunk_size: 1, num_generations: 4, batch_size: 2, seq_length: 1024}
actor_config: {model_config: finetune_qwen2_5_0_5b}
generate_config: {model_config: predict_qwen2_5_0_5b_instruct, max_prompt_length: 512}
"""
VERL_REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """The folder: the project's own parts, with small model YAMLs, and every input that the documentation names."""
    folder = tmp_path_factory.mktemp("documentation")
    for name in ("examples", "tools", "scripts", "benchmarks"):
        (folder / name).symlink_to(jobs.ROOT / name)
    small_yamls(folder / "model_configs" / "qwen_grpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sizes = ("--train_size", "64", "--test_size", "16", "--max_number", "20", "--tokenizer_vocab_size", "512")
        done("synthesize", "--output_dir", "gsm8k", *sizes)
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(f"gsm8k/{name}", name)
        models()
        for split in ("train", "test"):
            rows = [row.values for row in read_source(f"gsm8k/{split}.jsonl")]
            write_parquet(f"openai/gsm8k/main/{split}-00000-of-00001.parquet", rows)
        for name, source in DATASETS.items():
            tokenizer = () if name.endswith(".parquet") else ("--tokenizer_path", "gsm8k")
            done("data", "--file_path", f"gsm8k/{source}.jsonl", "--output_path", name, *tokenizer)
    (folder / "my_problems.jsonl").write_text('{"problem": "What is 2 + 3?", "solution": "5"}\n')
    conversation = next(block.text for block in documentation.blocks("docs/fine_tuning.md") if block.text[0] == "{")
    rows = 20  # of which 5% are held out
    (folder / "conversations.jsonl").write_text((json.dumps(json.loads(conversation)) + "\n") * rows)
    retool(folder)
    llama = small_config(family="llama", attention_bias=False, vocab_size=264, max_position_embeddings=512)
    gguf_files.write_gguf(folder / "models/SmolLM2-135M-Instruct.Q4_1.gguf", llama, "F32")
    for role in ("sft", "grpo"):  # of the quick start
        (folder / "out/quickstart" / role).mkdir(parents=True)
        (folder / "out/quickstart" / role / "hf").symlink_to(folder / "models/Qwen2.5-0.5B-Instruct")
    (folder / "verl_reward.py").write_text(VERL_REWARD)
    (folder / "run_qwen2-7b.sh").write_text(VERL_SCRIPT)
    (folder / "grpo_config.yaml").write_text(GRPO_CONFIG)
    (folder / "my_rewards.py").write_text(python_file("docs/faq.md", "my_rewards.py"))
    return folder


# File -> the file of problems that it is made from.
DATASETS = {
    "data/gsm8k_train.mindrecord": "train",
    "data/gsm8k_test.mindrecord": "test",
    "data/gsm8k.mindrecord": "train",
    "data/gsm8k_64.mindrecord": "train",
    "test.mindrecord": "test",
    "verl/train.parquet": "train",
    "BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet": "train",
    "data/from_verl.mindrecord": "train",
    "data/countdown/train.mindrecord": "train",
    "data/dapo/train.mindrecord": "train",
    "out/quickstart/data/train.mindrecord": "train",
}
# Other names of the tutorial's run.
RUNS = (
    *(f"out/{kind}{seed}/grpo" for kind in ("seed", "tools", "vision", "experts") for seed in range(3)),
    *(f"out/{algorithm}_seed{seed}" for algorithm in ("grpo", "rloo") for seed in range(2)),
    *("out/a", "out/b", "out/c", "out/d"),
)


@pytest.fixture(scope="session")
def trained(prepared) -> Path:
    """The same folder with what 20 steps of the tutorial's own command leave, also under the other names of runs.

    And one step of the command with adapters.
    """
    command = next(c for c in documentation.commands("docs/tutorial.md") if c.begins("mindrlhf train "))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        reference = "algorithm.beta=0.04"  # whose metrics other pages name
        best = ("trainer.save_best_metric=critic/rewards/mean", "trainer.loggers=[console, jsonl]")
        held_out = ("data.val_dataset=data/gsm8k_test.mindrecord", "validation.limit=2", "validation.max_new_tokens=8")
        done(*command.words[1:], *documentation.SMALL, "trainer.total_steps=20", reference, *best, *held_out)
        for name in RUNS:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).symlink_to(prepared / "out" / "gsm8k")
        for role in ("sft", "grpo"):
            shutil.copy("out/gsm8k/metrics.jsonl", f"out/quickstart/{role}")
        shutil.copytree("out/gsm8k/ckpt", "out/ckpt")
        adapters = next(c for c in documentation.commands("docs/lora.md") if c.begins("mindrlhf train "))
        short = ("trainer.total_steps=1", "trainer.loggers=[jsonl]", "algorithm.beta=0")
        done(*adapters.words[1:], *documentation.SMALL, *short)
    return prepared


def retool(folder: Path) -> None:
    """Demonstrations as ReTool's are published, and the model that is fine-tuned on them: here the first one."""
    said = "Let me see. <code>\nprint(6 * 7)\n</code>\n<interpreter>\n42\n</interpreter>\nIt is \\boxed{42}."
    answer = {"role": "assistant", "content": said}
    rows = [
        {"messages": [{"role": "user", "content": f"Use Python.\n{question}"}, answer]}
        for question in ("What is 6 * 7?", "And 7 * 6?")
    ]
    for name in ("JoeYing/ReTool-SFT", "data/retool", "out/retool_sft/ckpt"):
        (folder / name).mkdir(parents=True)
    write_parquet(folder / "JoeYing/ReTool-SFT/train_2000.parquet", rows)
    (folder / "out/retool_sft/ckpt/hf").symlink_to(folder / "models/Qwen2.5-0.5B-Instruct")


def done(*argv: str) -> None:
    assert jobs.call(argv) == 0, argv


def small_yamls(folder: Path) -> None:
    """Every model YAML of the project with numbers of a tiny model; layouts and everything else as they are."""
    folder.mkdir(parents=True)
    for path in (jobs.ROOT / "model_configs" / "qwen_grpo").glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        model = content["model"]["model_config"]
        if "hidden_size" in model:
            model |= SHAPE | {"num_layers": 1 if "0_5b" in path.name else 4}  # stages
        for key in TOKENS:
            model.pop(key, None)
        (folder / path.name).write_text(yaml.safe_dump(content))
    for role, stem in (("train", "finetune_qwen2_5_7b"), ("infer", "predict_qwen2_5_7b_instruct")):
        (folder.parents[1] / f"{role}.yaml").write_text((folder / f"{stem}.yaml").read_text())


def models() -> None:
    """Hugging Face directories with random weights under the real models' names, in the working folder."""
    for size, stem in (("0.5B", "0_5b"), ("1.5B", "0_5b"), ("7B", "7b"), ("32B", "32b")):
        config = load_model_yaml(f"model_configs/qwen_grpo/finetune_qwen2_5_{stem}.yaml").architecture()
        write_model(Path("models") / f"Qwen2.5-{size}-Instruct", config)
    Path("Qwen").symlink_to(Path("models").absolute())  # a folder goes before a hub's model of that name
    Path("Qwen2.5-7B-Instruct").symlink_to(Path("models/Qwen2.5-7B-Instruct").absolute())


def write_model(folder: Path, config: ModelConfig) -> None:
    arrays = random_arrays(config)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder, config, tensors, tokenizer=Tokenizer.from_path("gsm8k"))


def python_file(page: str, name: str) -> str:
    """The Python block of a page whose first line is a comment with the file's name."""
    return next(block.text for block in documentation.blocks(page) if block.text.startswith(f"# {name}\n"))
