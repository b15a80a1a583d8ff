"""verl's GSM8K command, from its parquet files to the trained model."""

import json

import jobs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
# The keys and values of verl's run_qwen2-7b.sh, but for the sizes below.
SCRIPT = """set -x

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$DATA/gsm8k/train.parquet \\
    data.val_files=$DATA/gsm8k/test.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=$DATA/model \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console"]' \\
    trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='qwen2_7b_function_rm' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""


def row(index: int, split: str) -> dict:
    """A problem as verl's preprocessing of GSM8K writes it."""
    question, solution = f"Tom has {index} apples and buys 2. How many has he?", f"{index + 2}"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": f"{index} + 2 = {solution}\n#### {solution}",
            "question": question,
        },
    }


@pytest.mark.slow
def test_verls_gsm8k_command_runs_from_parquet_to_the_end(task, tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    for split, count in (("train", 8), ("test", 2)):
        rows = [row(index, split) for index in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "gsm8k" / f"{split}.parquet")
    jobs.write_model(task, tmp_path / "model")
    (tmp_path / "run.sh").write_text(SCRIPT)
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sizes = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=2 data.max_response_length=8"
    command = f"{tmp_path}/run.sh {sizes} trainer.total_epochs=1 trainer.save_freq=2 trainer.test_freq=2"
    assert jobs.call(["train", "--from-verl", command, "--device", "CPU", "--enable_compile_cache", "True"]) == 0
    folder = tmp_path / "checkpoints" / "verl_grpo_example_gsm8k" / "qwen2_7b_function_rm"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "critic/rewards/mean" in row] == [1, 2]
    assert any(key.startswith("val-core/") for row in metrics for key in row)
    assert (folder / "hf" / "model.safetensors").is_file()
    assert (folder / "step_000002").is_dir()
    settings = json.loads((folder / "settings.json").read_text())["grpo"]
    assert settings["memory"]["swap"] is True
    assert settings["rollout"]["num_generations"] == 5
