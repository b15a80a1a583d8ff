"""Model paths that are adapters: merged into their base, as first adapters of a run, and refused on another base."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from training_states import save, stores

from mindrlhf.checkpoint.adapted import checkpoint_adapter, split_adapter, with_adapters
from mindrlhf.checkpoint.hf import companion_files, read_hf_config
from mindrlhf.checkpoint.peft import read_adapter, write_adapter
from mindrlhf.checkpoint.peft_config import PEFT_CONFIG_FILE
from mindrlhf.checkpoint.resume import newest
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState
from mindrlhf.checkpoint.weights import Weights, checkpoint_config, hf_folder
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import model_layout
from mindrlhf.parallel.mesh import Mesh

BASE = "qwen3_tiny"  # its adapter has patterns of ranks and alphas, and rslora


class NoTokenizer:
    """Saves nothing."""

    def save(self, directory):
        pass


@pytest.fixture(scope="module")
def golden(shared):
    """The golden base, PEFT's adapter of it, and PEFT's merged model."""
    folder = shared / "golden" / f"{BASE}_lora"
    return shared / "golden" / BASE, folder, load_file(folder / "merged" / "model.safetensors")


@pytest.fixture(scope="module")
def own(golden, tmp_path_factory):
    """PEFT's adapter as a run writes it: with the path and the fingerprint of its base."""
    base, folder, _ = golden
    stored = read_adapter(folder)
    first = Weights(str(base), read_hf_config(base), 0).base()
    target = tmp_path_factory.mktemp("own") / "hf_adapter"
    write_adapter(target, stored.adapter, stored.arrays, first)
    return target


@pytest.fixture(scope="module")
def trained(golden, tmp_path_factory):
    """The adapter as a training checkpoint of 2 x 2 ranks, which holds nothing else."""
    base, folder, _ = golden
    stored = read_adapter(folder)
    config = read_hf_config(base).model_copy(update={"adapter": stored.adapter})
    rows = [spec for spec in parameter_table(config) if spec.trains]
    layout = model_layout(config, Mesh(pp=2, tp=2), offset=0).only(spec.name for spec in rows)
    arrays = {spec.name: stored.arrays[spec.hf_name] for spec in rows}
    files = {f"hf/{n}": text for n, text in companion_files(config, NoTokenizer()).items()}
    first = Weights(str(base), config, 7).base()
    run = {
        "model": config.model_dump(mode="json"),
        "base": {"path": first.name, "seed": 7, "fingerprint": first.fingerprint},
    }
    out = tmp_path_factory.mktemp("trained")
    states = [
        TrainingState(
            3, {"model": ShardGroup(layout, {n: arrays[n][part] for n, part in layout.shards(rank)})}, {}, run, files
        )
        for rank in range(layout.size)
    ]
    save(stores(out, layout.size), states)
    return out


def check_merged(weights, expected):
    read = weights.reader()
    for spec in parameter_table(weights.model):
        np.testing.assert_allclose(read(spec), expected[spec.hf_name], rtol=1e-6, atol=1e-6)


def test_an_adapter_over_a_base_is_merged(golden):
    base, folder, expected = golden
    check_merged(Weights(str(base), read_hf_config(base), 0, str(folder)), expected)


def test_a_folder_that_names_its_base_is_a_model(golden, own):
    base, _, expected = golden
    assert hf_folder(own) == base.resolve()
    assert checkpoint_config(str(own)) == read_hf_config(base)
    check_merged(Weights(str(own), read_hf_config(base), 0), expected)


def test_a_checkpoint_of_adapters_is_a_model(golden, trained):
    base, folder, expected = golden
    config = checkpoint_config(str(trained / "latest"))
    assert (config.adapter, config.num_layers) == (None, read_hf_config(base).num_layers)
    check_merged(Weights(str(trained / "latest"), config, 0), expected)
    stored, theirs = checkpoint_adapter(newest(trained)), read_adapter(folder)
    assert stored.adapter == theirs.adapter
    assert all(np.array_equal(stored.arrays[name], theirs.arrays[name]) for name in theirs.arrays)


def test_first_adapters_of_a_run_are_those_of_the_folder(golden):
    base, folder, _ = golden
    stored = read_adapter(folder)
    config = read_hf_config(base).model_copy(update={"adapter": stored.adapter})
    plain = load_file(base / "model.safetensors")
    read = Weights(str(base), config, 0, str(folder)).reader()
    for spec in parameter_table(config):
        assert np.array_equal(read(spec), (stored.arrays if spec.adapts else plain)[spec.hf_name]), spec.name
    fresh = Weights(str(base), config, 0).reader()
    for spec in parameter_table(config):
        if spec.adapts:
            assert fresh(spec).any() == (spec.kind == "lora_a")


def test_another_base_is_refused(golden, own, trained, tmp_path):
    base, folder, _ = golden
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(base / "model.safetensors")
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file({name: array * np.float32(1.001) for name, array in tensors.items()}, other / "model.safetensors")
    config = read_hf_config(base)
    with pytest.raises(UserError, match=r"hf_adapter: was trained on .*qwen3_tiny, whose weights are not those of"):
        Weights(str(other), config, 0, str(own)).reader()
    Weights(str(other), config, 0, str(folder)).reader()  # PEFT says nothing of its base's weights
    first, stored = Weights(str(trained / "latest"), config, 0).split()
    assert (first.path, first.seed) == (str(base.resolve()), 7)
    with pytest.raises(UserError, match=r"step_000003: was trained on .*qwen3_tiny, whose weights are not"):
        replace(first, path=str(other)).merged(stored)
    with pytest.raises(UserError, match=r"is an adapter of .*gone, and that base model is not there"):
        replace(first, path=str(tmp_path / "gone")).merged(stored)


def test_a_base_that_is_not_here_is_said_to_be(own, tmp_path):
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in own.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    settings = json.loads((copied / PEFT_CONFIG_FILE).read_text())
    absent = "is an adapter of Qwen/absent: there is no such path here, .*; .*fetch it with `hf download Qwen/absent`"
    for name, words in (("Qwen/absent", absent), (None, "names no base model; give the base model")):
        (copied / PEFT_CONFIG_FILE).write_text(json.dumps(settings | {"base_model_name_or_path": name}))
        with pytest.raises(UserError, match=f"copied: {words}"):
            checkpoint_config(str(copied))


def test_an_adapter_over_an_adapter_is_refused(golden, own, trained):
    config, lora = read_hf_config(golden[0]), LoraSettings(rank=4)
    for path in (own, trained / "latest"):
        with pytest.raises(UserError, match=r"is an adapter, and the settings of lora ask for one over it; give its"):
            with_adapters(config, lora, str(path))
    assert with_adapters(config, lora, str(golden[0])).adapter.rank == 4
    assert with_adapters(config, LoraSettings(), str(own)) == config
    short = config.model_copy(update={"num_layers": 1})
    with pytest.raises(UserError, match=r"has model\.layers\.1\..*, and short has no such module to adapt"):
        with_adapters(short, LoraSettings(adapter_path=str(own)), "short")


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ({"target_modules": ("query",)}, "query"),
        ({"target_modules": ("q_proj", "v_porj")}, "v_porj"),
        ({"target_modules": ("q_proj", "lm_head")}, "lm_head"),
        ({"target_modules": ("q_proj", "layers.7.mlp.down_proj")}, "layers.7.mlp.down_proj"),
        ({"target_modules": "q_proj,v_proj"}, "q_proj,v_proj"),
        ({"target_modules": r".*q_proj|.*v_porj"}, ".*v_porj"),
        ({"exclude_modules": ("down_proj", "visual")}, "visual"),
        ({"exclude_modules": ".*visual.*"}, ".*visual.*"),
        ({"target_modules": ("q_proj",), "exclude_modules": ("vproj",)}, "vproj"),
    ],
)
def test_a_name_that_matches_no_module_is_refused(golden, given, lost):
    """PEFT itself is content when one of several names matches."""
    config = read_hf_config(golden[0])
    with pytest.raises(
        UserError, match=rf"^lora\.\w+ is .*, and {re.escape(repr(lost))} is no .*; give a list of names"
    ):
        with_adapters(config, LoraSettings(rank=4, **given), None)


@pytest.mark.parametrize(
    "given",
    [
        {"target_modules": ("q_proj", "layers.0.mlp.down_proj")},
        {"target_modules": r".*\.(q|x)_proj|.*mlp.*"},
        {"target_modules": r".*q_proj|.*v_proj", "exclude_modules": "model.layers.0.*"},
        {"exclude_modules": ("lm_head", "embed_tokens", "down_proj")},
    ],
)
def test_names_that_match_are_taken(golden, given):
    assert with_adapters(read_hf_config(golden[0]), LoraSettings(rank=4, **given), None).adapter.rank == 4


def test_a_random_base_is_told_by_its_seed(golden):
    config = read_hf_config(golden[0])
    prints = [Weights(None, config, seed).base().fingerprint for seed in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


def test_merging_a_stream_of_rows(golden):
    base, folder, expected = golden
    config = read_hf_config(base).model_copy(update={"adapter": read_adapter(folder).adapter})
    read = Weights(str(base), config, 0, str(folder)).reader()
    arrays: dict = {}
    merged = dict(split_adapter(((spec, read(spec)) for spec in parameter_table(config)), arrays))
    assert [spec.hf_name for spec in merged] == [spec.hf_name for spec in parameter_table(config.base)]
    for spec, array in merged.items():
        np.testing.assert_allclose(array, expected[spec.hf_name], rtol=1e-6, atol=1e-6)
    assert arrays.keys() == read_adapter(folder).arrays.keys()
    alone: dict = {}
    assert not list(split_adapter(((s, read(s)) for s in parameter_table(config) if s.adapts), alone))
    assert alone.keys() == arrays.keys()


def test_settings_of_a_run_and_of_its_first_adapter(golden):
    base, folder, _ = golden
    config = read_hf_config(base)

    def adapter_of(settings):
        return with_adapters(config, settings, str(base)).adapter

    assert adapter_of(LoraSettings()) is None
    assert adapter_of(LoraSettings(rank=4)).rank == 4
    assert adapter_of(LoraSettings(adapter_path=str(folder))) == read_adapter(folder).adapter
    assert adapter_of(LoraSettings(adapter_path=str(folder), rank=8)).rank == 8
    assert adapter_of(LoraSettings(rank=4, dropout=0.1)).dropout == 0.1
    with pytest.raises(UserError, match=r"lora\.dropout is 0\.1, and the adapter of .* has 0\.0; leave lora\.dropout"):
        adapter_of(LoraSettings(adapter_path=str(folder), dropout=0.1))
    with pytest.raises(UserError, match=r"lora\.rank is 4, and the adapter of .* has 8; leave lora\.rank out"):
        adapter_of(LoraSettings(adapter_path=str(folder), rank=4))
