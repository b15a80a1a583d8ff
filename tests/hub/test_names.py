"""Ids of a hub, told from paths."""

import pytest

from mindrlhf.hub.names import id_of, is_id


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k", "meta-llama/Llama-3.1-8B", "a_b/c.d"])
def test_an_id(text, folder):
    assert is_id(text)
    (folder / text).mkdir(parents=True)
    assert not is_id(text), "a local folder of that name goes first"


@pytest.mark.parametrize(
    "text",
    [
        *("Qwen2.5-0.5B", "./Qwen/Qwen2.5", "../a/b", "/a/b", "a/b/c", "a/b/", "", "~/model", "a b/c"),
        *("data/train.jsonl", "data/train.mindrecord", "out/model.safetensors", "models/a.ckpt", "a/tokenizer.json"),
        *("examples/recipes", "model_configs/qwen_grpo"),  # shipped
    ],
)
def test_a_path(text):
    assert not is_id(text)


def test_the_id_of_a_cached_snapshot():
    snapshot = "snapshots/0123456789abcdef"
    assert id_of(f"/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/{snapshot}") == "Qwen/Qwen2.5-0.5B"
    assert id_of(f"/home/me/.cache/modelscope/models/Qwen--Qwen2.5-0.5B/{snapshot}") == "Qwen/Qwen2.5-0.5B"
    for other in ("models/Qwen2.5-0.5B", "a--b/model", ""):
        assert id_of(other) is None
