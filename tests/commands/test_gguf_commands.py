"""Commands with a GGUF file in place of a Hugging Face folder, and runs that are exported as GGUF files."""

import json

import gguf
import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.peft import read_adapter


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """The task's model as a GGUF file of F32."""
    path = tmp_path_factory.mktemp("gguf") / "task.gguf"
    assert jobs.call(["export", "--checkpoint", model, "--gguf", path, "--type", "f32"]) == 0
    return path


@pytest.fixture(scope="module")
def trained(task, file, tmp_path_factory):
    """A run with adapters that begins at the file, also as its reference, teacher of tokens and judge."""
    folder = tmp_path_factory.mktemp("trained")
    paths = {"load_sft_checkpoint_infer": file, "load_ref_checkpoint": file.parent}
    settings = ("lora.rank=4", "lora.alpha=8", "algorithm.beta=0.05", "trainer.total_steps=2", "trainer.save_freq=2")
    names = {"vocab_path": None, "merges_file_path": None, "tokenizer_path": file}
    assert jobs.call(task.train(folder, *settings, **paths, **names)) == 0
    return jobs.Run(folder)


@pytest.mark.slow
def test_a_run_is_that_of_the_folder(task, model, file, tmp_path):
    metrics = []
    for name, path in (("folder", model), ("file", file)):
        assert jobs.call(task.train(tmp_path / name, "algorithm.beta=0", load_sft_checkpoint_infer=path)) == 0
        rows = jobs.Run(tmp_path / name).metrics
        metrics.append([{key: row[key] for key in row if key.startswith(("actor/", "critic/"))} for row in rows])
    assert len(metrics[0]) == 3
    assert metrics[0] == metrics[1]
    first, second = (load_file(tmp_path / name / "ckpt/hf/model.safetensors") for name in ("folder", "file"))
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)


def test_its_answers_are_those_of_the_folder(model, file, tmp_path):
    answers = []
    for name, path in (("folder", model), ("file", file)):
        out = tmp_path / f"{name}.jsonl"
        common = ("--template", "plain", "--prompt", "How many?", "--output", out, "max_new_tokens=8", "temperature=0")
        assert jobs.call(["generate", "--model", path, *common]) == 0
        answers.append(json.loads(out.read_text())["responses"])
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_other_commands_read_it(task, model, file, tmp_path, capsys):
    for name, path in (("folder", model), ("file", file)):
        assert jobs.call(["transform", "--src_checkpoint", path, "--dst_checkpoint", tmp_path / f"{name}.ckpt"]) == 0
    data = ("--data", task.folder / "test.mindrecord", "--max_new_tokens", 4, "--limit", 4)
    assert jobs.call(["eval", "--model", model, "--compare", file, *data]) == 0
    assert jobs.call(["plan", "--load_sft_checkpoint_infer", file]) == 0
    assert (tmp_path / "file.ckpt").read_bytes() == (tmp_path / "folder.ckpt").read_bytes()
    rows = task.folder / "train.jsonl"
    made = ("--output_path", tmp_path / "rows.mindrecord", "--dataset_type", "arithmetic")
    assert jobs.call(["data", "--tokenizer_path", file, "--template", "plain", "--file_path", rows, *made]) == 0
    assert jobs.call(task.sft(tmp_path / "sft", load_sft_checkpoint_train=file, tokenizer_path=file)) == 0


@pytest.mark.slow
def test_a_run_with_adapters_becomes_files(trained, file, tmp_path, capsys):
    latest = trained.folder / "ckpt" / "latest"
    assert jobs.call(["export", "--checkpoint", latest, "--gguf", tmp_path / "adapter.gguf"]) == 0
    merged = tmp_path / "out" / "merged.gguf"
    assert jobs.call(["export", "--checkpoint", latest, "--gguf", merged, "--merge", "--type", "f32"]) == 0
    assert "the adapter, 14 tensors, f32" in capsys.readouterr().out
    assert jobs.call(["export", "--checkpoint", latest, "--output", tmp_path / "hf", "--merge"]) == 0
    back = load_file(f"{local_model(str(merged))}/model.safetensors")
    for name, array in load_file(tmp_path / "hf" / "model.safetensors").items():
        np.testing.assert_array_equal(back[name], array)
    assert len(gguf.GGUFReader(tmp_path / "adapter.gguf").tensors) == 14
    base = read_adapter(trained.folder / "ckpt" / "hf_adapter").base.name
    assert base == local_model(str(file))
