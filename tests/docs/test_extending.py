"""docs/extending.md: its functions work from a user's folder, its files and changes in a copy of the package."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import documentation
import numpy as np
import pytest
import reference_model
from mindspore import Tensor
from small_model import SmallModel, small_config
from whole_sequences import compiled_logits

from mindrlhf.algorithms.advantages import RewardBatch, compute_advantages
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.models import layer, parameters
from mindrlhf.models.families import FAMILIES
from mindrlhf.rewards.registry import resolve

PAGE = "docs/extending.md"
SCREEN = 50  # lines
AIM = """
calls = []
class Run:
    def __init__(self, **given):
        calls.append(["Run", given])
    def __setitem__(self, key, value):
        calls.append([key, value])
    def track(self, value, **given):
        calls.append(["track", value, given])
    def close(self):
        calls.append(["close"])
"""
USE = """
import json
from pathlib import Path
import aim
from mindrlhf import cli
from mindrlhf.backend import find_device
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.data.chat import render_conversations
from mindrlhf.data.parquet import read_parquet
from mindrlhf.memory.limit import memory_limit
from mindrlhf.metrics.writers import open_writers
from mindrlhf.models.families import CHATS
from mindrlhf.models.parameters import parameter_table

status = cli.main(["data", "--dataset_type", "letters", "--file_path", "rows.jsonl", "--output_path", "rows.parquet"])
writers = open_writers(Path("run"), TrackingSettings(loggers=("aim",), experiment_name="first"), 2)
writers.write(1, {"val-core/pass@4": 0.5})
writers.close()
shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}
model = ModelConfig.from_hf({"model_type": "seed_oss", "tie_word_embeddings": False, **shape}, "config.json")
written = model.to_hf()
yaml = ModelYaml(path="train.yaml", context={"device_target": "GPU"})
operators = yaml.context.device.operators("bfloat16")
found = {
    "status": status,
    "rows": list(read_parquet("rows.parquet")),
    "calls": aim.calls,
    "architectures": written["architectures"],
    "device": [memory_limit(yaml, 8)[1], operators.activations, "gpu_operators" in operators.swiglu.__module__],
    "adamw": operators.adamw is find_device("CPU").operators().composed.adamw,
    "same": ModelConfig.from_hf(written, "config.json") == model,
    "shapes": {spec.hf_name: spec.shape for spec in parameter_table(model)},
    "prompt": render_conversations([([{"role": "user", "content": "Q"}], "row 1")], None, CHATS["seed"])[0],
}
Path("found.json").write_text(json.dumps(found))
"""


def files(language: str = "python") -> dict[str, str]:
    """The page's files: name -> content."""
    return {
        block.text.split("\n")[0].removeprefix("# "): block.text
        for block in documentation.blocks(PAGE)
        if block.language == language
    }


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A user's folder with the files that are not the package's."""
    for name, text in files().items():
        if "/" not in name:
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(group: str):
    block = next(b for b in documentation.blocks(PAGE) if b.language == "yaml" and f" {group}:" in b.text)
    Path("settings.yaml").write_text(block.text)
    return load_grpo_config("settings.yaml")


def test_everything_is_one_screen():
    for block in documentation.blocks(PAGE):
        assert block.text.count("\n") < SCREEN, f"{PAGE}:{block.line}"


def test_reward(own):
    (function,) = settings("functions").reward.functions
    reward = resolve(function.name, function.args)
    assert reward("", "the answer is 7", {"ground_truth": "7"}) == {"score": 2.0, "short": 1.0}
    assert reward("", "7" + "." * 100, {"ground_truth": "7"}) == {"score": 1.0, "short": 0.0}


def test_advantage(own):
    algorithm = settings("advantage").algorithm
    batch = RewardBatch([np.array([0.0, 1.0, 9.0]), np.array([np.nan, 1.0, 3.0]), np.array([np.nan])])
    found = compute_advantages(algorithm.advantage, batch, **algorithm.options_of(algorithm.method))
    assert [list(group) for group in found] == [[-1.0, 0.0, 2.0], [0.0, -1.0, 1.0], [0.0]]
    assert algorithm.method.compares


def test_policy_loss(own):
    loss = settings("policy_loss").algorithm.loss()
    log_probs, old = np.array([[-1.0, -2.0, 5.0]], np.float32), np.array([[-1.0, -2.5, np.nan]], np.float32)
    advantages, mask = np.array([[2.0, -1.0, np.nan]], np.float32), np.array([[1.0, 1.0, 0.0]], np.float32)
    values, metrics = loss.losses(*map(Tensor, (log_probs, old, advantages, mask)))
    ratio = np.exp(0.5)
    np.testing.assert_allclose(values.asnumpy(), [[-2.0, (ratio - 1) ** 2 / 0.2 + ratio, 0.0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["policy_kl"].asnumpy(), [[0.0, -0.5, 0.0]], rtol=1e-5)
    assert loss.aggregation == "token-mean"


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> dict:
    """Findings in a copy of the package with the page's files and changes."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(documentation.ROOT / "mindrlhf", folder / "mindrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files().items():
        if "/" in name:
            assert not (folder / name).exists(), f"{name} is in the package"
            (folder / name).write_text(text)
    for block in documentation.blocks(PAGE):
        if block.language == "diff":
            apply_diff(block.text, folder)
    (folder / "aim.py").write_text(AIM)
    (folder / "rows.jsonl").write_text('{"word": "letter", "letter": "t"}\n')
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=folder, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def apply_diff(text: str, folder: Path) -> None:
    for change in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        name, _, hunks = change.partition("\n")
        content = (folder / name).read_text()
        for hunk in hunks.split("@@\n"):
            lines = hunk.rstrip("\n").split("\n")
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
            assert content.count(before) == 1, f"{name} has changed: {before}"
            content = content.replace(before, after)
        (folder / name).write_text(content)


def test_task(extended):
    assert extended["status"] == 0
    (row,) = extended["rows"]
    assert row["data_source"] == "letters"
    assert row["reward_model"]["ground_truth"] == "2"
    assert row["prompt"][-1]["content"].startswith("How often is t in letter?")


def test_tracker(extended):
    begun, *rest = extended["calls"]
    assert begun == ["Run", {"repo": "run/aim", "experiment": "mindrlhf"}]
    assert rest == [["settings", {}], ["track", 0.5, {"name": "val-core/pass@4", "step": 1}], ["close"]]


def test_layer_rows(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    llama = replace(FAMILIES["llama"], layer_rows=importlib.import_module("renamed").layer_rows)
    monkeypatch.setattr(parameters, "FAMILIES", {"llama": llama})
    config = small_config(family="llama", attention_bias=False, num_layers=2)
    names = {spec.name: spec.hf_name for spec in parameters.parameter_table(config)}
    assert names["model.layers.1.ffn_norm.weight"] == "model.layers.1.pre_feedforward_layernorm.weight"
    assert names["model.layers.1.attention_norm.weight"] == "model.layers.1.input_layernorm.weight"


def test_half(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    half = importlib.import_module("geglu").GegluHalf
    choose = lambda model, number: ("attention", "geglu") if number == 1 else ("attention", "feed_forward")  # noqa: E731
    monkeypatch.setattr(layer, "HALVES", {**layer.HALVES, "geglu": half})
    monkeypatch.setattr(layer, "FAMILIES", {"qwen2": replace(FAMILIES["qwen2"], halves=choose)})
    model = SmallModel.random(num_layers=2)
    ids = np.arange(1, 12)
    swish, calls = reference_model.activated, []

    def activated(gate):
        calls.append(gate)
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + np.tanh(inner)) if len(calls) == 2 else swish(gate)

    found, plain = compiled_logits(model)(ids[None])[0], model.logits(ids)
    monkeypatch.setattr(reference_model, "activated", activated)
    expected = model.logits(ids)
    assert np.abs(expected - plain).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_family(extended):
    assert extended["architectures"] == ["SeedOssForCausalLM"]
    assert extended["same"]
    assert extended["shapes"]["model.layers.0.self_attn.q_proj.bias"] == [512]
    assert "model.layers.0.self_attn.q_norm.weight" not in extended["shapes"]
    assert extended["prompt"] == "<seed:bos>user\nQ<seed:eos><seed:bos>assistant\n"


def test_device(extended):
    memory, activations, has_swiglu = extended["device"]
    assert memory == "76.7 GiB are usable of a A100 (`mindrlhf plan --chip` names another)"
    assert activations == "bfloat16"
    assert has_swiglu
    assert extended["adamw"]
