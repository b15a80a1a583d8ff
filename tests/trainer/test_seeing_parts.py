"""Fine-tuning parts of a model that sees, and adapters of it: what changes, checkpoints, files for PEFT, refusals."""

import json
import shutil

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file
from seeing_task import make_seeing_task

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.peft import read_adapter
from mindrlhf.checkpoint.weight_source import index_weights
from mindrlhf.checkpoint.weights import Weights
from mindrlhf.models.parameters import parameter_table

MERGER = "visual.merger."
PARTS = {
    "vision": lambda name: name.startswith("visual.") and not name.startswith(MERGER),
    "merger": lambda name: name.startswith(MERGER),
    "text": lambda name: not name.startswith("visual."),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


def tuning(seeing, output, *settings):
    flags = ("--load_sft_checkpoint_train", seeing.model, "--mind_dataset_dir", seeing.rows)
    small = ("data.pairs_per_step=6", "optimizer.lr=1e-2", "trainer.total_steps=2", "trainer.save_freq=1")
    return ["sft", *flags, "--save_ckpt_dir", output / "ckpt", "--enable_compile_cache", "True", *small, *settings]


@pytest.mark.slow
@pytest.mark.parametrize(
    "freeze",
    [("vision", "merger"), ("text",), ("vision", "text")],
    ids="-".join,
)
def test_frozen_parts_stay_and_the_run_is_resumed(seeing, tmp_path, freeze, capfd):
    setting = f"train.freeze=[{', '.join(freeze)}]"
    assert jobs.call(tuning(seeing, tmp_path / "whole", setting)) == 0
    capfd.readouterr()
    before = load_file(seeing.model / "model.safetensors")
    after = load_file(tmp_path / "whole" / "ckpt" / "hf" / "model.safetensors")
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if any(PARTS[part](name) for part in freeze)}
    step = tmp_path / "whole" / "ckpt" / "step_000002"
    assert len(index_weights(step / "rank_0" / "model.safetensors")) == len(before)
    assert len(index_weights(step / "rank_0" / "exp_avg.safetensors")) == len(before) - len(same)
    assert jobs.call(["export", "--checkpoint", step, "--output", tmp_path / "exported"]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(np.array_equal(exported[name], after[name]) for name in after)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for name in ("step_000002", "hf"):
        shutil.rmtree(tmp_path / "stopped" / "ckpt" / name)
    argv = [*tuning(seeing, tmp_path / "stopped", setting), "--resume_training", "auto"]
    assert jobs.call(argv) == 0
    again = (tmp_path / "stopped" / "ckpt" / "hf" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "whole" / "ckpt" / "hf" / "model.safetensors").read_bytes()
    capfd.readouterr()
    assert jobs.call([*tuning(seeing, tmp_path / "stopped"), "--resume_training", "auto"]) == 2
    assert "is a checkpoint of a model with frozen" in capfd.readouterr().err


@pytest.fixture(scope="module")
def adapted(seeing, tmp_path_factory):
    """A run with adapters of the text and of the tower's attention."""
    folder = tmp_path_factory.mktemp("adapted")
    modules = "lora.target_modules=[q_proj, down_proj, qkv, merger.mlp.0]"
    assert jobs.call(tuning(seeing, folder, "lora.rank=2", "lora.alpha=4", modules)) == 0
    return folder / "ckpt"


def test_adapters_are_named_as_in_memory(seeing, adapted):
    stored = load_file(adapted / "hf_adapter" / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored}
    assert modules == {
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.mlp.down_proj",
        "model.visual.merger.mlp.0",
        "model.language_model.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.mlp.down_proj",
    }
    assert all(array.any() for array in stored.values())


def test_the_adapter_on_its_base_is_the_merged_model(seeing, adapted, tmp_path):
    config, merged = read_hf_config(seeing.model, seeing=True), load_file(adapted / "hf" / "model.safetensors")
    read = Weights(str(adapted / "hf_adapter"), config, 0).reader()
    for spec in parameter_table(config):
        np.testing.assert_allclose(read(spec), merged[spec.hf_name], rtol=1e-6, atol=1e-7)
    assert jobs.call(["export", "--checkpoint", adapted / "latest", "--output", tmp_path / "adapter"]) == 0
    ours, theirs = (read_adapter(one) for one in (tmp_path / "adapter", adapted / "hf_adapter"))
    assert (ours.adapter, ours.base) == (theirs.adapter, theirs.base)
    assert all(np.array_equal(ours.arrays[name], theirs.arrays[name]) for name in theirs.arrays)


def test_released_names_and_regular_expressions_of_either_are_read(adapted, tmp_path):
    """PEFT's folders of other versions: modules as in released checkpoints, and a pattern of paths in memory."""
    from safetensors.numpy import save_file

    known = read_adapter(adapted / "hf_adapter")
    raw = json.loads((adapted / "hf_adapter" / "adapter_config.json").read_text())
    arrays = load_file(adapted / "hf_adapter" / "adapter_model.safetensors")
    older = {f"base_model.model.{name}": array for name, array in known.arrays.items()}
    pattern = r"model\.(language_model\.layers|visual)\..*(q_proj|down_proj|qkv|mlp\.0)"
    for name, kept, modules in (("older", older, raw["target_modules"]), ("pattern", arrays, pattern)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(kept, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(raw | {"target_modules": modules}))
        found = read_adapter(folder)
        assert found.arrays.keys() == known.arrays.keys()
        assert all(np.array_equal(found.arrays[key], known.arrays[key]) for key in known.arrays)
        assert all(found.adapter.of(key.rpartition(".lora_")[0]) == (2, 2.0) for key in found.arrays)


@pytest.mark.slow
def test_all_linear_is_written_as_paths_of_the_text(seeing, tmp_path):
    """The tower's modules have the same last names."""
    assert jobs.call(tuning(seeing, tmp_path, "lora.rank=2", "trainer.total_steps=1")) == 0
    raw = json.loads((tmp_path / "ckpt" / "hf_adapter" / "adapter_config.json").read_text())
    assert len(raw["target_modules"]) == 7
    assert all(name.startswith("model.language_model.layers.0.") for name in raw["target_modules"])
    read_adapter(tmp_path / "ckpt" / "hf_adapter").check_fits(read_hf_config(seeing.model, seeing=True), "it")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.freeze=[vision, merger, text]",), "train.freeze is [vision, merger, text], and nothing else would"),
        (("train.freeze=[tower]",), "train.freeze"),
        (("train.freeze=[text]", "lora.rank=2"), "train.freeze is [text], and with lora only adapters train"),
        (("lora.rank=2", "lora.dropout=0.1", "lora.target_modules=[qkv]"), "adapters of the vision tower have none"),
        (("lora.rank=2", "lora.target_modules=[proj]"), "name visual.patch_embed.proj, a convolution"),
    ],
)
def test_what_cannot_be_done_is_refused(seeing, tmp_path, capfd, settings, message):
    assert jobs.call(tuning(seeing, tmp_path, *settings)) == 2
    assert message in capfd.readouterr().err


def test_a_model_that_does_not_see_has_no_such_parts(task, tmp_path, capfd):
    assert jobs.call(task.train(tmp_path, "train.freeze=[vision]")) == 2
    assert "train.freeze is [vision], and a model of the family qwen2 has no such parts" in capfd.readouterr().err
