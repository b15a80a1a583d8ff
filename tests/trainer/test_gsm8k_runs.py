"""GRPO on real GSM8K with Qwen2.5's vocabulary: alone, and under msrun with one and two workers.

The script and the flags are those that MindRLHF's users come with.
"""

import re

import jobs
import numpy as np
import pytest
from workers import run_msrun

from mindrlhf.data.mindrecord import read_prompts

STEPS, PROMPTS, SAMPLES = 2, 2, 4


@pytest.fixture(scope="module")
def gsm8k(shared, tmp_path_factory) -> jobs.Task:
    """The first 64 problems, the published tokenizer, and a model of one layer with its 151,936 rows."""
    folder = tmp_path_factory.mktemp("gsm8k")
    with (shared / "data" / "gsm8k" / "train.jsonl").open(encoding="utf-8") as file:
        (folder / "train.jsonl").write_text("".join(next(file) for _ in range(64)), encoding="utf-8")
    tokenizer = shared / "data" / "qwen2_5_tokenizer"
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).symlink_to((tokenizer / name).resolve())
    flags = ("--vocab_path", folder / "vocab.json", "--merges_file_path", folder / "merges.txt")
    paths = ("--file_path", folder / "train.jsonl", "--output_path", folder / "train.mindrecord")
    result = jobs.start([*flags, *paths], script=jobs.ONE_STAGE.with_name("rlhf_data.py"))
    assert result.returncode == 0, result.stderr
    jobs.write_yamls(folder, 151936, layers=1)
    (folder / "reward.py").write_text(jobs.REWARD)
    return jobs.Task(folder)


def arguments(task: jobs.Task, folder, workers: int, *settings: str, **flags) -> list[str]:
    """Every flag that has a meaning without a checkpoint."""
    ranks = [f"{name}_yaml.parallel_config.data_parallel={workers or 1}" for name in ("train", "infer")]
    given = {
        "use_parallel": str(workers > 0),
        "enable_compile_cache": "False",
        "only_save_strategy": "False",
        "pre_num_generations": "1",
        "pre_store_data": "16",
    }
    size = ("rollout.max_new_tokens=8", f"data.prompts_per_step={PROMPTS}", "algorithm.beta=0")
    one_shape = ("data.shuffle=False", "train.length_bucket=50")  # the first prompts have 51 to 100 tokens
    run = (f"trainer.total_steps={STEPS}", "optimizer.lr=1e-3")
    return task.train(folder, *ranks, *size, *one_shape, *run, *settings, **given | flags)[1:]


def printed(text: str, step: int) -> bool:
    """Whether the console's line of a step is there."""
    return re.search(rf"^ *{step}/{STEPS} ", text, re.MULTILINE) is not None


def check(run: jobs.Run, task: jobs.Task) -> None:
    """What every run must leave behind."""
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    for row in run.metrics:
        assert all(np.isfinite(value) for value in row.values()), row
        assert row["actor/grad_norm"] > 0
        assert row["response_length/max"] <= 8
        assert row["rollout_corr/log_prob_diff/max"] < 1e-3
    prompts = {prompt.id: prompt for prompt in read_prompts(task.folder / "train.mindrecord")}
    assert [step for step, _ in run.rollouts] == list(range(1, STEPS + 1))
    for _, experiences in run.rollouts:
        assert [len(experience.group.rollouts) for experience in experiences] == [SAMPLES] * PROMPTS
        for experience in experiences:
            prompt = experience.group.prompt
            assert prompt.token_ids.tolist() == prompts[prompt.id].token_ids.tolist()
            assert prompt.fields == prompts[prompt.id].fields
            assert experience.rewards.tolist() == experience.rewards_by_function["variety"].tolist()
    order = [(prompt_id, sample) for prompt_id in range(STEPS * PROMPTS) for sample in range(SAMPLES)]
    assert [(prompt_id, sample) for _, prompt_id, sample, _ in run.responses] == order
    assert list((run.folder / "tensorboard").iterdir())
    assert run.weights["model.embed_tokens.weight"].shape == (151936, 32)
    assert all(np.isfinite(tensor).all() for tensor in run.weights.values())


@pytest.fixture(scope="module")
def alone(gsm8k, tmp_path_factory) -> jobs.Run:
    folder = tmp_path_factory.mktemp("alone")
    result = jobs.start(arguments(gsm8k, folder, 0), script=jobs.ONE_STAGE)
    assert result.returncode == 0, result.stderr
    assert all(printed(result.stdout, step) for step in range(1, STEPS + 1))
    return jobs.Run(folder)


def test_alone(gsm8k, alone):
    check(alone, gsm8k)


@pytest.mark.msrun
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_under_msrun(gsm8k, alone, tmp_path, workers):
    """Rank 0 alone writes; the rollouts are those of one process."""
    result = run_msrun(workers, [jobs.ONE_STAGE, *arguments(gsm8k, tmp_path, workers)])
    assert result.returncode == 0, result.logs
    run = jobs.Run(tmp_path)
    check(run, gsm8k)
    for rank, log in result.logs.items():
        assert [printed(log, step) for step in range(1, STEPS + 1)] == [rank == 0] * STEPS
    assert run.responses == alone.responses
    assert run.metrics[0]["perf/total_num_tokens"] == alone.metrics[0]["perf/total_num_tokens"]


@pytest.mark.slow
def test_a_checkpoint_loads_again(gsm8k, alone, tmp_path):
    """Weights and tokenizer from the HF directory, and one step at rate 0 writes the same weights again."""
    trained = alone.folder / "ckpt" / "hf"
    flags = {"load_sft_checkpoint_infer": trained, "vocab_path": None, "merges_file_path": None}
    argv = arguments(gsm8k, tmp_path, 0, "trainer.total_steps=1", "optimizer.lr=0", **flags)
    assert jobs.call(["train", *argv]) == 0
    run = jobs.Run(tmp_path)
    assert run.weights.keys() == alone.weights.keys()
    for name, tensor in alone.weights.items():
        assert run.weights[name].tobytes() == tensor.tobytes(), name
    assert run.responses[0][-1] != alone.responses[0][-1]  # it generated with what it loaded
