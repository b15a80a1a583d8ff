"""MindRLHF's GRPO settings: its files of master and 0.4.0, its names on the command line, and what is refused."""

import json

import pytest

from mindrlhf.cli import main
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_yaml import ParallelSettings
from mindrlhf.errors import UserError
from mindrlhf.migration.mindrlhf.translation import is_mindrlhfs, is_mindrlhfs_name, translate

MASTER = """
rl_config: {seed: 3, epochs: 2, batch_size: 1, num_rollouts: 4, chunk_size: 1, num_generations: 8, beta: 0.02,
  epsilon_low: 0.1, epsilon_high: 0.3, num_iterations: 2, seq_length: 2048, packing: True, pack_num: 1,
  reshard_mem_opt_level: 1, save_ckpt_interval: 5, tensorboard: False, save_data_file: "", dataset_file: rows.jsonl}
monitor_config: {host_monitor_interval: -1.0, host_monitor_steps: [], host_memory_protection: False}
actor_config:
  load: ""
  model_config: finetune_qwen2_5_7b
  parallel_config: {data_parallel: 1, model_parallel: 4, pipeline_stage: 2, micro_batch_num: 2, context_parallel: 1}
  recompute_config: {recompute: True, select_recompute: False}
  enable_parallel_optimizer: True
  optimizer: {type: adamw, adam_beta1: 0.9, adam_beta2: 0.98, eps: 1.0e-8, weight_decay: 0.01, opt_offload: False}
  lr_schedule: {lr_decay_style: cosine, lr: 5.0e-7, min_lr: 1.0e-10, warmup_step: 10, decay_steps: 200000}
ref_config: {model_config: x.yaml, sync_ref_model: True, ref_model_sync_steps: 7, parallel_config: {data_parallel: 2}}
reward_config: {verifier_function: [accuracy_reward, format_reward], verifier_weight: [1.0, 0.5]}
generate_config:
  model_config: predict_qwen2_5_7b_instruct
  parallel_config: {data_parallel: 2, model_parallel: 4, pipeline_stage: 1}
  use_vllm: 1
  max_prompt_length: 512
  sampling_config: {max_tokens: 256, min_tokens: 2, temperature: 0.8, top_p: 0.8, top_k: -1, eos_token_id: [1, 2]}
context: {mode: 0, device_target: Ascend, max_device_memory: 58GB, jit_config: {jit_level: O0}}
profiler_config: {profile: false, stage: all}
"""
FLAT = """
beta: 0.01
num_generations: 4
grpo_epochs: 2
num_rollouts: 4
chunk_size: 2
gamma: 1.0
batch_size: 2
beta1: 0.9
start_lr: 5.0e-7
end_lr: 1.0e-10
warmup_step: 10
decay_steps: 200
opt_offload: True
mind_dataset_dir: "/path/train.mindrecord"
use_vllm: 0
sync_ref_model: False
ref_model_sync_steps: 50
reshard_mem_opt_level: 0
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "grpo_config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_masters_file(file):
    assert is_mindrlhfs(file(MASTER))
    found = translate(file(MASTER), ())
    own = [text for text in found.overrides if not text.startswith(("train_yaml.", "infer_yaml."))]
    config = load_grpo_config(overrides=own)
    algorithm, optimizer, rollout = config.algorithm, config.optimizer, config.rollout
    assert (config.seed, config.trainer.epochs, config.trainer.save_freq, config.memory.swap) == (3, 2, 5, True)
    assert (algorithm.beta, algorithm.epsilon_low, algorithm.epsilon_high) == (0.02, 0.1, 0.3)
    assert (algorithm.num_iterations, algorithm.reference_sync_steps) == (2, 7)
    assert (optimizer.lr, optimizer.min_lr, optimizer.warmup_steps, optimizer.beta2) == (5e-7, 1e-10, 10, 0.98)
    assert optimizer.lr_decay == "constant", "a run is a small part of 200000 steps"
    assert (rollout.max_new_tokens, rollout.min_new_tokens, rollout.temperature, rollout.top_k) == (256, 2, 0.8, 0)
    assert config.data.max_prompt_length == 512
    assert [(one.name, one.weight) for one in config.reward.functions] == [("math", 1.0), ("format", 0.5)]
    assert found.flags == {
        "mind_dataset_dir": "rows.jsonl",
        "sft_path_train": "finetune_qwen2_5_7b",
        "sft_path_infer": "predict_qwen2_5_7b_instruct",
    }
    for text in (
        "train_yaml.parallel_config.pipeline_stage=2",
        "infer_yaml.parallel_config.data_parallel=2",
        "train_yaml.recompute_config.recompute=true",
        "infer_yaml.context.max_device_memory=58GB",
    ):
        assert text in found.overrides
    assert {"rl_config.packing", "generate_config.use_vllm", "profiler_config.stage"} <= found.needless.keys()
    places = [found.used, found.needless]
    assert all(sum(key in place for place in places) == 1 for key in found.given)


def test_the_flat_file(file):
    assert is_mindrlhfs(file(FLAT))
    found = translate(file(FLAT), ())
    config = load_grpo_config(overrides=found.overrides)
    assert (config.rollout.num_generations, config.optimizer.lr, config.memory.swap) == (4, 5e-7, True)
    assert config.optimizer.lr_decay == "cosine"
    assert config.algorithm.reference_sync_steps == 0
    assert found.flags == {"mind_dataset_dir": "/path/train.mindrecord"}
    assert found.needless["rl_config.gamma"] == "it does nothing in MindRLHF either"


@pytest.mark.parametrize(
    ("keys", "train", "infer", "wanted"),
    [
        ((), {}, {"data_parallel": 2}, (8, 8)),  # 64 answers in updates of 1: as many as there are groups
        (("rl_config.batch_size=16",), {}, {"data_parallel": 2}, (8, 4)),
        (("batch_size=16", "chunk_size=2"), {"data_parallel": 2}, {"data_parallel": 2}, (16, 4)),
        (("batch_size=8", "pack_num=2"), {"pipeline_stage": 2, "micro_batch_num": 2}, {}, (4, 1)),
        (("num_rollouts=3", "batch_size=12"), {}, {}, (3, 1)),  # 2 updates do not divide 3 groups
    ],
)
def test_prompts_and_updates_of_a_step(file, keys, train, infer, wanted):
    found = translate(file(MASTER), keys)
    prompts, updates = wanted
    assert found.batch(ParallelSettings(**train), ParallelSettings(**infer)) == [
        f"data.prompts_per_step={prompts}",
        f"algorithm.updates_per_iteration={updates}",
    ]


def test_names_on_the_command_line():
    assert [name for name in ("chunk_size=4", "rl_config.beta=0.1", "start_lr=1e-6") if is_mindrlhfs_name(name)]
    for other in ("seed=3", "data.prompts_per_step=4", "learning_rate=1e-6", "train_yaml.context.mode=0"):
        assert not is_mindrlhfs_name(other)
    assert translate(None, ["start_lr=1e-6"]).overrides == ["optimizer.lr=1.0e-06"]


def test_flags_of_its_main(file):
    """They go over the file, as there."""
    named = [
        "dataset_file=d.mindrecord",
        "tokenizer_dir=t",
        "actor_checkpoint_path=a",
        "ref_checkpoint_path=r",
        "generate_checkpoint_path=g",
        "save_checkpoint_dir=s",
        "verifier_function=qwen_accuracy_reward,own.py:f",
        "verifier_weight=1.0,2.0",
        "vllm_test=True",
    ]
    assert all(map(is_mindrlhfs_name, named))
    found = translate(file(MASTER.replace('load: ""', "load: x")), named)
    assert {name: found.flags[name] for name in found.flags if "yaml" not in name and "sft_path" not in name} == {
        "mind_dataset_dir": "d.mindrecord",
        "tokenizer_path": "t",
        "load_sft_checkpoint_train": "a",
        "load_ref_checkpoint": "r",
        "load_sft_checkpoint_infer": "g",
        "save_ckpt_dir": "s",
    }
    functions = load_grpo_config(overrides=[text for text in found.overrides if "reward" in text]).reward.functions
    assert [(one.name, one.weight) for one in functions] == [("math", 1.0), ("own.py:f", 2.0)]
    assert "rl_config.vllm_test" in found.needless


@pytest.mark.parametrize("form", [["--config", "x.yaml"], ["--config=x.yaml"], ["config=x.yaml"]])
def test_its_flag_of_the_file_is_answered(form, capsys):
    assert main(["train", *form]) == 2
    assert "--config is MindRLHF's flag; here it is --grpo_config." in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["actor_checkpoint_path", "ref_checkpoint_path", "generate_checkpoint_path", "save_checkpoint_dir"]
)
def test_its_flags_stand_for_ours_on_the_command_line(flag, capsys):
    assert main(["plan", f"--{flag}", "/no/model", "--prompt_tokens", "64"]) == 2
    words = capsys.readouterr()
    assert "unknown flag" not in words.err
    assert "from MindRLHF:" in words.out or "/no/model" in words.err or "no model is given" in words.err


def test_names_that_it_ignores_itself_are_not_taken_for_its_own():
    """`lr=1e-6` would train with another rate."""
    for name in ("lr", "weight_decay", "gamma", "total_steps"):
        assert not is_mindrlhfs_name(f"{name}=1")
    with pytest.raises(UserError, match=r"unknown key lr; did you mean optimizer.lr\?"):
        load_grpo_config(overrides=["lr=1e-6"])


@pytest.mark.parametrize("place", ["beside the file", "in the working directory", "in neither"])
def test_the_folder_of_a_model_yaml(tmp_path, monkeypatch, place):
    config, work = tmp_path / "config", tmp_path / "work"
    for folder in (config, work):
        folder.mkdir()
    monkeypatch.chdir(work)
    (config / "grpo.yaml").write_text("actor_config: {model_config: sub/m.yaml}\nrl_config: {seed: 1}\n")
    if place != "in neither":
        folder = config if place == "beside the file" else work
        (folder / "sub").mkdir()
        (folder / "sub" / "m.yaml").write_text("")
    found = translate(str(config / "grpo.yaml"), ()).flags["sft_path_train"]
    assert found == (str(config / "sub/m.yaml") if place == "beside the file" else "sub/m.yaml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("chunk_size", "chunk_sise"),
            "unknown key rl_config.chunk_sise of MindRLHF's settings; did you mean rl_config",
        ),
        (("type: adamw", "type: lamb"), "actor_config.optimizer.type is 'lamb', and the optimizer here is AdamW"),
        (("accuracy_reward", "my_reward"), "verifier_function has 'my_reward', which is not known here"),
        (("[1.0, 0.5]", "[1.0]"), "has 2 functions, and reward_config.verifier_weight 1"),
        (("host_memory_protection: False", "host_memory_protection: True"), "give trainer.max_host_memory_gb"),
        (("use_vllm: 1", "new_group: {a: 1}"), "unknown key generate_config.new_group.a of MindRLHF's settings"),
    ],
)
def test_what_is_refused(file, change, words):
    with pytest.raises(UserError) as refused:
        translate(file(MASTER.replace(*change)), ())
    assert words in str(refused.value)
    assert "grpo_config.yaml:" in str(refused.value)


def test_our_own_files_are_no_translation(file):
    assert not is_mindrlhfs(file("algorithm: {beta: 0.1}\nseed: 3\n"))
    assert not is_mindrlhfs("preset:dapo")
    assert not is_mindrlhfs(None)


def test_plan_takes_the_file_with_its_layouts(file, capsys):
    text = MASTER.replace("dataset_file: rows.jsonl", 'dataset_file: ""')
    code = main(["plan", "--grpo_config", file(text), "--prompt_tokens", "64", "chunk_size=4", "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (figures["train"]["pipeline_stage"], figures["infer"]["data_parallel"]) == (2, 2)
    assert figures["prompt_tokens"] == 32 * 64
    dtypes = [f"{role}_yaml.model.model_config.compute_dtype=float32" for role in ("train", "infer")]
    assert main(["plan", "--grpo_config", file(text), "--device", "CPU", "--prompt_tokens", "64", *dtypes]) in (0, 1)
    assert "8 x CPU" in capsys.readouterr().out, "flags go over the file"
