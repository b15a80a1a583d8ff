"""The benchmark of a step: what it counts, and that it runs the real thing on given work."""

import json
import sys

import jobs
import numpy as np
import pytest
from small_model import random_arrays, small_config
from workers import ROOT

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.metrics.flops import GroupLengths
from mindrlhf.models.parameters import parameter_table

sys.path.insert(0, str(ROOT / "benchmarks"))

from grpo_step import arguments, step_row, summarise
from work import prepare

# What the peer's script writes for a step.
PEER_KEYS = {
    *("step", "gen", "logprob", "reward", "other", "train", "train_fwd", "optim", "rest"),
    *("completion_tokens", "prompt_tokens", "gen_tok_s", "tok_s", "cpu_util", "others"),
}
SCRIPT = ROOT / "benchmarks" / "grpo_step.py"
SMALL = "--hidden 32 --layers 1 --intermediate 48 --bpe-vocab 300 --dataset-size 8 --prompts 2 --num-generations 2"
SHORT = f"{SMALL} --max-prompt 9 --max-completion 6 --max-others 99"


def test_phases_add_up_to_the_step_without_building_graphs():
    seconds = {"step": 10.0, "compile": 2.0, "gen": 3.0, "ref": 1.0, "old_log_prob": 0.5, "reward": 0.25}
    groups = [GroupLengths(4, [2, 3]), GroupLengths(6, [1, 4])]
    row = step_row(seconds | {"adv": 0.125, "update_actor": 2.0, "reshard": 0.5}, 0.5, groups)
    assert (row["step"], row["gen"], row["logprob"], row["train"], row["optim"]) == (8.0, 3.0, 1.5, 1.5, 0.5)
    assert row["rest"] == pytest.approx(8.0 - 3.0 - 1.5 - 0.25 - 0.125 - 2.0)
    assert (row["completion_tokens"], row["prompt_tokens"]) == (10, 20)
    assert row["gen_tok_s"] == pytest.approx(10 / 3)
    assert row["tok_s"] == pytest.approx(30 / 8)


def test_disturbed_steps_and_those_that_build_graphs_do_not_count():
    def row(step, others=0.0, compile_s=0.0):
        return {"step": step, "tok_s": 1 / step, "train_fwd": None, "others": others, "compile": compile_s}

    rows = [row(90.0), row(1.0), row(50.0, others=0.2), row(3.0), row(60.0, compile_s=0.1), row(2.0, others=0.15)]
    summary = summarise(rows, warmup=1, max_others=0.15)
    assert (summary["measured_steps"], summary["clean_steps"], summary["compiling_steps"]) == (5, 3, 1)
    assert (summary["median"]["step"], summary["mean"]["step"], summary["best"]["step"]) == (2.0, 2.0, 1.0)
    assert summary["best"]["tok_s"] == 1.0
    assert summary["median"]["train_fwd"] is None
    disturbed = summarise([row(1.0), row(4.0, others=1.0), row(6.0, others=1.0)], 1, 0.15)
    assert (disturbed["clean_steps"], disturbed["median"]["step"]) == (0, 5.0)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "out.json"
    flags = f"{SHORT} --fixed-length --steps 3 --num-iterations 2 --micro-batch 64 --json {path}"
    run = jobs.start([*flags.split(), "optimizer.max_grad_norm=0.5"], script=SCRIPT)
    assert run.returncode == 0, run.stderr
    assert "start to first step" in run.stdout
    return json.loads(path.read_text())


def test_the_result_has_the_peer_s_keys(result):
    assert len(result["per_step"]) == 3
    for row in (*result["per_step"], result["mean"], result["median"], result["best"]):
        assert set(row) >= PEER_KEYS
    for key in ("versions", "args", "params", "tokenizer_size", "model_vocab", "micro_batch", "updates_per_step"):
        assert key in result
    for key in ("measured_steps", "clean_steps", "wall_total_s", "peak_rss_mib", "logs"):
        assert key in result


def test_the_work_is_what_was_asked_for(result):
    assert (result["updates_per_step"], result["micro_batch"]) == (2, 64)
    for row in result["per_step"]:
        assert (row["completion_tokens"], row["prompt_tokens"]) == (2 * 2 * 6, 2 * 2 * 9)
        parts = [row[name] for name in ("gen", "logprob", "reward", "other", "train", "optim", "rest")]
        assert row["step"] == pytest.approx(sum(parts))
        assert row["train_gflop"] == pytest.approx(6 * row["gen_gflop"])
        assert row["logprob_gflop"] == pytest.approx(row["gen_gflop"])  # of the reference
        assert min(part for name, part in row.items() if name in ("gen", "logprob", "train", "optim")) >= 0
    assert result["per_step"][0]["compile"] > 0
    assert result["per_step"][2]["compile"] == 0
    assert result["compile_total_s"] == pytest.approx(sum(row["compile"] for row in result["per_step"]))
    assert result["start_to_first_step_s"] > result["per_step"][0]["compile"]
    assert result["peak_rss_mib"] > 100
    assert result["reward_processes_peak_mib"] > 1
    assert 0 < result["share_of_ceiling"]["step"] < 1
    assert all(np.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in result["logs"])


def test_rows_are_split_where_a_model_trains_and_not_where_it_generates(tmp_path):
    flags = prepare(arguments([*SHORT.split(), "--model-parallel", "2", "--seq-parallel"]), tmp_path).train
    infer, train = (load_model_yaml(flags[flags.index(f"--sft_path_{name}") + 1]) for name in ("infer", "train"))
    assert (infer.parallel.model_parallel, infer.parallel.use_seq_parallel) == (2, False)
    assert (train.parallel.model_parallel, train.parallel.use_seq_parallel) == (2, True)


@pytest.mark.slow
def test_given_models_and_prompts(tmp_path):
    """A folder as the peer's script writes it: an HF directory with prompts beside it."""
    folder, texts = tmp_path / "given", ["Add 3 and 4.", "How much is it?"]
    tokenizer = train_tokenizer(texts, 300)
    config = small_config(num_layers=1, vocab_size=tokenizer.size, tie_word_embeddings=True)
    arrays = random_arrays(config)
    save_hf(folder, config, ((spec, arrays[spec.name]) for spec in parameter_table(config)), tokenizer=tokenizer)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": t, "answer": "7"}) + "\n" for t in texts))
    path = tmp_path / "out.json"
    flags = (
        f"--load {folder} --prompts 2 --num-generations 2 --max-completion 5 --steps 1 --beta 0 --quiet --json {path}"
    )
    run = jobs.start(flags.split(), script=SCRIPT)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    row = json.loads(path.read_text())["per_step"][0]
    assert row["logprob"] == row["logprob_gflop"] == 0
    assert row["completion_tokens"] <= 20
    (folder / "prompts.jsonl").write_text('{"prompt": ""}\n')
    run = jobs.start(flags.split(), script=SCRIPT)
    assert run.returncode == 2
    assert run.stderr == f"grpo_step: {folder}/prompts.jsonl, line 1: should have a text as its prompt.\n"
