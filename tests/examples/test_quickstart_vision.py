"""The quick start with images: its settings are understood, and its steps work together in small (slow)."""

import json
import re

import jobs
import pytest

from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.evaluation.pass_at_k import read_answers
from mindrlhf.files.json import read_json_lines
from mindrlhf.report.answers import AnswerReader
from mindrlhf.report.html import report_data
from mindrlhf.report.run import read_run

EXAMPLE = jobs.ROOT / "examples" / "qwen_grpo_tutorial"


def test_settings_and_script_agree():
    grpo = load_grpo_config(EXAMPLE / "quickstart_vision_grpo.yaml", ())
    load_sft_config(EXAMPLE / "quickstart_vision_sft.yaml")
    script = (jobs.ROOT / "scripts" / "quickstart_vision.sh").read_text()
    assert set(re.findall(r"--max_new_tokens (\d+)", script)) == {str(grpo.rollout.max_new_tokens)}
    assert grpo.rollout.temperature == 1.0, "ratios are of the distribution that was sampled"


@pytest.mark.slow
def test_its_steps_work_together(tmp_path, capfd):
    """Synthesize, initialize, imitate, evaluate, train, and look at the report."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install scikit-learn")
    data, model, tuned = tmp_path / "data", tmp_path / "random", tmp_path / "sft" / "hf"
    sizes = ("--train_size", 64, "--test_size", 8, "--careless_share", 0.5, "--tokenizer_vocab_size", 330)
    assert jobs.call(["synthesize", "--task", "digits", "--output_dir", data, *sizes]) == 0
    for name, count in {"train": 64, "test": 8, "unseen": 8, "demonstrations": 64}.items():
        assert len(list(read_json_lines(data / f"{name}.jsonl"))) == count
    assert Tokenizer.from_path(data).token_to_id("<|image_pad|>")
    shape = jobs.ROOT / "model_configs" / "qwen_grpo" / "qwen2_5_vl_tiny"
    assert jobs.call(["initialize", "--config", shape, "--tokenizer_path", data, "--output", model]) == 0
    folders = ("--save_ckpt_dir", tmp_path / "sft", "--output_dir", tmp_path / "sft")
    tuning = ("--sft_config", EXAMPLE / "quickstart_vision_sft.yaml", *folders, "trainer.total_steps=30")
    demonstrations = ("--mind_dataset_dir", data / "demonstrations.jsonl")
    assert jobs.call(["sft", "--load_sft_checkpoint_train", model, *demonstrations, *tuning]) == 0
    run = tmp_path / "grpo"
    folders = ("--save_ckpt_dir", run, "--output_dir", run, "--save_data_file", run / "rollouts.mindrecord")
    settings = (*folders, "trainer.total_steps=1", "data.prompts_per_step=4", "rollout.max_new_tokens=12")
    config = ("--grpo_config", EXAMPLE / "quickstart_vision_grpo.yaml", "--mind_dataset_dir", data / "train.jsonl")
    assert jobs.call(["train", "--load_sft_checkpoint_infer", tuned, *config, *settings]) == 0
    answers = tmp_path / "eval.jsonl"
    asked = ("--data", data / "unseen.jsonl", "--max_new_tokens", 12, "--output", answers)
    assert jobs.call(["eval", "--model", run / "hf", *asked]) == 0
    assert len(read_answers(answers)) == 8
    capfd.readouterr()
    assert jobs.call(["show", run, "--prompts", 1]) == 0
    assert len(re.findall(r"picture: ", capfd.readouterr().out)) == 1
    (shown,) = report_data([read_run(run, "a", AnswerReader())])["runs"]
    assert shown["answers"]["steps"] == [1]
    rollouts = list(map(json.loads, (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()))
    names = {name for row in rollouts for name in row["images"]}
    assert {path.stem for path in (run / "rollouts" / "images").iterdir()} == names
