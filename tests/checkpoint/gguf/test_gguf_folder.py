"""GGUF files as folders in the user's cache: which paths mean one, made once, and safe with several processes."""

import shutil
import subprocess
import sys
from collections import namedtuple

import gguf_files
import jobs
import numpy as np
import pytest
from small_model import small_config

from mindrlhf.checkpoint.gguf import folder as gguf_folder
from mindrlhf.checkpoint.gguf.folder import cached_folder
from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.local import gguf_file, local_model, local_models
from mindrlhf.checkpoint.weight_source import index_weights, open_weights
from mindrlhf.commands.generate import add_arguments as generate_arguments
from mindrlhf.configs.model import Llama3Scaling
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError

CONFIG = small_config(family="llama", attention_bias=False, vocab_size=264)
PROGRAM = "import sys; from mindrlhf.checkpoint.local import local_model; print(local_model(sys.argv[1]))"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A model's file, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    path = tmp_path / "model" / "tiny Q8.gguf"
    path.parent.mkdir()
    gguf_files.write_gguf(path, CONFIG, "F32")
    return path


def convert(*more) -> int:
    return jobs.call(["convert", *more])


def test_paths_that_mean_a_file(file):
    assert gguf_file(file) == file
    assert gguf_file(file.parent) == file
    (file.parent / "Modelfile").write_text("FROM ./tiny")
    (file.parent / "config.json").write_text("{}")
    assert gguf_file(file.parent) == file
    assert gguf_file(file.with_name("none.gguf")) is None
    (file.parent / "model.safetensors").write_text("")
    assert gguf_file(file.parent) is None
    (file.parent / "model.safetensors").unlink()
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(UserError, match="has 2 GGUF files; name the one that you mean"):
        gguf_file(file.parent)
    (file.parent / "step_3").mkdir()
    assert gguf_file(file.parent) is None


def test_a_file_is_converted_once(file, capsys):
    first = local_model(str(file))
    assert f"written as float32 to {first}" in capsys.readouterr().err
    assert first.endswith("/tiny_Q8")
    written = (gguf_folder.Path(first) / "model.safetensors").stat().st_mtime_ns
    assert str(cached_folder(file)) == first
    assert (gguf_folder.Path(first) / "model.safetensors").stat().st_mtime_ns == written
    assert capsys.readouterr().err == ""
    gguf_files.write_gguf(file, CONFIG, "F32", seed=1)
    assert str(cached_folder(file)) != first


def test_flags_of_commands_name_folders(file):
    import argparse

    parser = argparse.ArgumentParser()
    generate_arguments(parser)
    args = local_models(parser.parse_args(["--model", str(file.parent), "--prompt", "he"]))
    assert read_hf_config(args.model).family == "llama"
    assert Tokenizer.from_path(args.model).encode("he he") == [256, 257]


def test_processes_at_once_convert_once(file):
    command = [sys.executable, "-c", PROGRAM, str(file)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=jobs.ROOT)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=100) for process in started]
    assert len({out for out, _ in outputs}) == 1, outputs
    assert [process.returncode for process in started] == [0] * 4
    assert sum("written as float32" in error for _, error in outputs) == 1


def test_a_full_disk_and_leftovers(file, monkeypatch):
    place = cached_folder(file).parent
    shutil.rmtree(place)
    place.mkdir()
    (place / ".tiny_Q8.0123abcd.tmp").mkdir()
    usage = namedtuple("usage", ["total", "used", "free"])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
        with pytest.raises(UserError, match=r"MiB are free; free some space, or set XDG_CACHE_HOME"):
            cached_folder(file)
    assert sorted(path.name for path in cached_folder(file).parent.iterdir()) == ["lock", "tiny_Q8"]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float32"), ("BF16", "float32"), ("Q4_0", "float32")]
)
def test_norms_that_do_not_fit_keep_float32(file, kind, dtype):
    arrays = gguf_files.write_gguf(
        file, small_config(family="llama", attention_bias=False, vocab_size=264, intermediate_size=64), kind
    )
    stored = open_weights(cached_folder(file), read_hf_config(cached_folder(file)))
    assert stored.dtype == dtype
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored.read(name), array)


def test_convert_writes_a_folder(file, tmp_path, capsys):
    out = tmp_path / "hf"
    assert convert("--gguf", file, "--torch_ckpt_dir", out, "--dtype", "bf16") == 0
    assert "bfloat16 of F32" in capsys.readouterr().out
    assert {tensor.dtype for tensor in index_weights(out).values()} == {"bfloat16"}
    assert Tokenizer.from_path(out).chat_template is not None
    assert convert("--torch_ckpt_dir", file, "--mindspore_ckpt_path", tmp_path / "m.ckpt") == 0
    assert (tmp_path / "m.ckpt").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gguf", "none.gguf"], "--gguf none.gguf: there is no such file"),
        (["--gguf", "FILE", "--reverse"], "--reverse does not go with --gguf"),
        (["--gguf", "FILE", "--mindspore_ckpt_path", "m.ckpt"], "--mindspore_ckpt_path does not go with --gguf"),
        ([], "--mindspore_ckpt_path is missing"),
    ],
)
def test_what_convert_refuses(file, tmp_path, capsys, more, message):
    given = [str(file) if one == "FILE" else one for one in more]
    assert convert(*given, "--torch_ckpt_dir", tmp_path / "hf") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_damaged_file_is_one_sentence(file, tmp_path, capsys):
    file.write_bytes(file.read_bytes()[:-100])
    for command in (["plan"], ["generate", "--prompt", "he"]):
        flag = "--load_sft_checkpoint_train" if command == ["plan"] else "--model"
        assert jobs.call([*command, flag, file]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "it is truncated); get it again." in line
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_scaling_of_llama_3_is_found(file):
    import gguf

    scaling = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
    config = CONFIG.model_copy(update={"rope_scaling": scaling, "rope_theta": 5e5})
    gguf_files.write_gguf(file, config, "F32")
    reader = gguf.GGUFReader(file)
    assert "rope_freqs.weight" in {tensor.name for tensor in reader.tensors}
    assert read_hf_config(cached_folder(file)).rope_scaling == scaling
