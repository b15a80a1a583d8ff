"""PEFT's adapter folders: read, written, merged into a base, and refused where they are damaged or more than LoRA."""

import json
import random
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.peft import PEFT_WEIGHTS_FILE, is_adapter, read_adapter, write_adapter
from mindrlhf.checkpoint.peft_config import OWN_FILE, OWN_KEY, PEFT_CONFIG_FILE, Base
from mindrlhf.checkpoint.weight_source import fingerprint, open_weights
from mindrlhf.configs.lora import Adapter
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table

GOLDEN = ("qwen2_tiny", "qwen3_tiny")
PREFIX = "base_model.model."


def golden_adapter(shared, base):
    return shared / "golden" / f"{base}_lora"


@pytest.fixture
def folder(tmp_path):
    """An adapter of rank 3 on two modules, as a run writes it."""
    rng = np.random.default_rng(0)
    shapes = {"q_proj": (8, 6), "down_proj": (6, 10)}
    paths = {name: f"model.layers.0.{'self_attn' if name == 'q_proj' else 'mlp'}.{name}" for name in shapes}
    arrays = {}
    for name, (outputs, inputs) in shapes.items():
        arrays[f"{paths[name]}.lora_A.weight"] = rng.normal(size=(3, inputs)).astype(np.float32)
        arrays[f"{paths[name]}.lora_B.weight"] = rng.normal(size=(outputs, 3)).astype(np.float32)
    adapter = Adapter(3, 6.0, target_modules=tuple(shapes))
    write_adapter(tmp_path / "adapter", adapter, arrays, Base("models/base", "ab" * 32))
    return tmp_path / "adapter"


def change_config(folder, **changes):
    """Set keys of the configuration; a value of ... removes the key."""
    file = folder / PEFT_CONFIG_FILE
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def change_tensors(folder, change):
    """Save other tensors, as PEFT would: without this suite's checksum."""
    tensors = load_file(folder / PEFT_WEIGHTS_FILE)
    change(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / PEFT_WEIGHTS_FILE)
    (folder / OWN_FILE).unlink(missing_ok=True)


@pytest.mark.parametrize("base", GOLDEN)
def test_an_adapter_of_peft_merges_as_peft_merges(shared, base):
    stored, config = read_adapter(golden_adapter(shared, base)), read_hf_config(shared / "golden" / base)
    stored.check_fits(config, base)
    weights = open_weights(shared / "golden" / base, config)
    expected = load_file(golden_adapter(shared, base) / "merged" / "model.safetensors")
    changed = 0
    for spec in parameter_table(config):
        merged = stored.merged(spec, weights.read(spec.name))
        np.testing.assert_allclose(merged, expected[spec.hf_name], rtol=1e-6, atol=1e-6)
        changed += not np.array_equal(merged, weights.read(spec.name))
    assert changed == 7 * config.num_layers


@pytest.mark.parametrize("base", GOLDEN)
def test_an_adapter_of_peft_comes_back_as_it_was(shared, tmp_path, base):
    stored = read_adapter(golden_adapter(shared, base))
    write_adapter(tmp_path / "copy", stored.adapter, stored.arrays, stored.base)
    theirs, ours = (load_file(at / PEFT_WEIGHTS_FILE) for at in (golden_adapter(shared, base), tmp_path / "copy"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    theirs, ours = (
        json.loads((at / PEFT_CONFIG_FILE).read_text()) for at in (golden_adapter(shared, base), tmp_path / "copy")
    )
    assert ours.keys() <= theirs.keys(), "PEFT warns of keys that it does not know"
    assert {key: theirs[key] for key in ours} == ours
    again = read_adapter(tmp_path / "copy")
    assert (again.adapter, again.base.name) == (stored.adapter, base)


@pytest.mark.parametrize("base", GOLDEN)
def test_peft_loads_what_is_written_here(shared, tmp_path, base):
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    stored = read_adapter(golden_adapter(shared, base))
    write_adapter(tmp_path / "a", stored.adapter, stored.arrays, Base(base, "ab" * 32))
    model = transformers.AutoModelForCausalLM.from_pretrained(shared / "golden" / base, torch_dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "a")
    golden = np.load(golden_adapter(shared, base) / "golden.npz")
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        logits = model(**{name: torch.from_numpy(golden[name].astype(np.int64)) for name in names}).logits.numpy()
    real = golden["attention_mask"] == 1
    np.testing.assert_allclose(logits[real], golden["logits"][real], atol=1e-5)


def test_part_of_a_weight_gets_its_part_of_the_product(shared):
    stored, config = read_adapter(golden_adapter(shared, "qwen3_tiny")), read_hf_config(shared / "golden/qwen3_tiny")
    weights = open_weights(shared / "golden/qwen3_tiny", config)
    for spec in parameter_table(config):
        if len(spec.shape) == 2:
            index = (slice(0, spec.shape[0] // 2), slice(spec.shape[1] // 2, None))
            whole, part = (
                stored.merged(spec, weights.read(spec.name)),
                stored.merged(spec, weights.read(spec.name, index), index),
            )
            np.testing.assert_allclose(part, whole[index], rtol=1e-6, atol=1e-7)


def test_all_linear_is_written_as_the_names_that_vllm_reads(tmp_path):
    paths = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")]
    arrays = {f"{path}.lora_A.weight": np.ones((2, 4), np.float32) for path in paths}
    arrays |= {f"{path}.lora_B.weight": np.ones((4, 2), np.float32) for path in paths}
    write_adapter(tmp_path / "a", Adapter(2, 4.0), arrays, Base(None))
    assert json.loads((tmp_path / "a" / PEFT_CONFIG_FILE).read_text())["target_modules"] == ["q_proj", "up_proj"]
    assert read_adapter(tmp_path / "a").arrays.keys() == arrays.keys()


def test_settings_survive(tmp_path):
    path = "model.layers.0.self_attn.q_proj"
    arrays = {f"{path}.lora_A.weight": np.ones((5, 4)), f"{path}.lora_B.weight": np.ones((4, 5))}
    adapter = Adapter(2, 0.5, True, r".*\.q_proj", ("k_proj",), {"q_proj": 5}, {"q_.*": 3.5}, dropout=0.1)
    write_adapter(tmp_path / "a", adapter, arrays, Base("b", "c" * 64), card={"README.md": b"# Card\n"})
    stored = read_adapter(tmp_path / "a")
    assert stored.adapter == adapter
    assert stored.adapter.of(path) == (5, 3.5 / 5**0.5)
    assert (stored.base.name, stored.base.fingerprint) == ("b", "c" * 64)
    assert json.loads((tmp_path / "a" / PEFT_CONFIG_FILE).read_text())["lora_dropout"] == 0.1
    assert (tmp_path / "a" / "README.md").read_text() == "# Card\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 4]]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [5]),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("init_lora_weights", "pissa"),
        ("peft_type", "ADALORA"),
        ("task_type", "SEQ_CLS"),
        ("some_new_method", {"on": True}),
    ],
)
def test_unsupported_settings_are_refused_by_name(folder, key, value):
    change_config(folder, **{key: value})
    with pytest.raises(UserError, match=rf"adapter_config\.json: {key} is .*not supported; "):
        read_adapter(folder)


def test_settings_of_training_and_of_unused_methods_are_passed_over(folder):
    before = read_adapter(folder)
    change_config(
        folder, lora_dropout=..., init_lora_weights="gaussian", inference_mode=False, peft_version="0.99",
        megatron_config=None, arrow_config=None, some_new_method=False, loftq_config={}, qalora_group_size=16,
    )  # fmt: skip
    assert read_adapter(folder).adapter == before.adapter


def test_dropout_is_read_and_checked(folder):
    for share in (0, 0.05):
        change_config(folder, lora_dropout=share)
        assert read_adapter(folder).adapter.dropout == share
    for wrong in (1.0, -0.1, "0.1", None, True):
        change_config(folder, lora_dropout=wrong)
        with pytest.raises(UserError, match=r"lora_dropout is .*, and must be a number, at least 0 and below 1"):
            read_adapter(folder)


def test_an_adapter_is_refused_on_another_model(shared, tmp_path):
    stored = read_adapter(golden_adapter(shared, "qwen2_tiny"))
    other = read_hf_config(shared / "golden" / "qwen3_tiny")
    with pytest.raises(UserError, match=r"has shape \[.*\], and other asks for \[.*\]; give the base model"):
        stored.check_fits(other, "other")
    config = read_hf_config(shared / "golden" / "qwen2_tiny")
    with pytest.raises(UserError, match=r"has model\.layers\.1\..*, and short has no such module to adapt"):
        stored.check_fits(config.model_copy(update={"num_layers": 1}), "short")
    fewer = {name: array for name, array in stored.arrays.items() if "layers.1.mlp.up_proj" not in name}
    write_adapter(tmp_path / "fewer", stored.adapter, fewer, stored.base)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.lora_A\.weight and 1 more are missing"):
        read_adapter(tmp_path / "fewer").check_fits(config, "qwen2_tiny")


def test_another_base_is_refused_by_name(folder):
    stored = read_adapter(folder)
    stored.check_base("ab" * 32, "models/base")
    with pytest.raises(UserError, match=r"was trained on models/base, whose weights are not those of models/other"):
        stored.check_base("cd" * 32, "models/other")
    (folder / OWN_FILE).unlink(missing_ok=True)
    read_adapter(folder).check_base("cd" * 32, "models/other")


def test_a_base_has_one_fingerprint_in_any_form(shared, tmp_path):
    golden = shared / "golden" / "qwen2_tiny"
    config = read_hf_config(golden)
    table, source = parameter_table(config), open_weights(golden, config)
    first = fingerprint(table, source.read)
    save_file({spec.name: source.read(spec.name) for spec in table}, tmp_path / "ours.safetensors")
    assert fingerprint(table, open_weights(tmp_path / "ours.safetensors", config).read) == first

    def changed(name, index):
        values = source.read(name, index)
        return values + np.float32(name == table[-1].name) * np.spacing(values)

    assert fingerprint(table, changed) != first
    assert fingerprint(table[:-1], source.read) != first


def test_folders_that_are_no_adapter(tmp_path, folder):
    assert is_adapter(folder)
    assert not is_adapter(tmp_path)
    assert not is_adapter(None)
    with pytest.raises(UserError, match="there is no such folder"):
        read_adapter(tmp_path / "absent")
    (folder / PEFT_WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors \(a \.bin file has to be converted"):
        read_adapter(folder)


def test_a_folder_with_something_else_is_not_replaced(folder):
    stored = read_adapter(folder)
    with pytest.raises(UserError, match="the folder exists and is not empty"):
        write_adapter(folder, stored.adapter, stored.arrays, stored.base)
    write_adapter(folder, stored.adapter, stored.arrays, stored.base, replaces=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt: is no part of a model"):
        write_adapter(folder, stored.adapter, stored.arrays, stored.base, replaces=True)
    assert read_adapter(folder).arrays.keys() == stored.arrays.keys()


def truncate(folder, rng):
    name = rng.choice((PEFT_WEIGHTS_FILE, PEFT_CONFIG_FILE))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: rng.randrange(len(content.rstrip()))])


def append(folder, rng):
    with (folder / PEFT_WEIGHTS_FILE).open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 50)))


def flip_a_bit(folder, rng):
    content = bytearray((folder / PEFT_WEIGHTS_FILE).read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (folder / PEFT_WEIGHTS_FILE).write_bytes(content)


def overwrite(folder, rng):
    content = bytearray((folder / PEFT_WEIGHTS_FILE).read_bytes())
    start = rng.randrange(len(content) - 64)
    content[start : start + 64] = rng.randbytes(64)
    (folder / PEFT_WEIGHTS_FILE).write_bytes(content)


def drop_a_tensor(folder, rng):
    change_tensors(folder, lambda tensors: tensors.pop(rng.choice(sorted(tensors))))


def rename_a_tensor(folder, rng):
    def change(tensors):
        name = rng.choice(sorted(tensors))
        old, new = rng.choice(
            [
                (PREFIX, ""),
                (".weight", ".default.weight"),
                ("lora_A", "lora_embedding_A"),
                ("lora_B", "lora_magnitude_vector"),
                ("proj", "norm"),
            ]
        )
        for other in [other for other in tensors if old in other] or [name]:
            tensors[other.replace(old, new) if old in other else "x"] = tensors.pop(other)

    change_tensors(folder, change)


def reshape_a_tensor(folder, rng):
    def change(tensors):
        name = rng.choice(sorted(tensors))
        tensors[name] = rng.choice([tensors[name].T, tensors[name].ravel(), tensors[name][:1, :1]])

    change_tensors(folder, change)


def retype_a_tensor(folder, rng):
    def change(tensors):
        name = rng.choice(sorted(tensors))
        tensors[name] = tensors[name].astype(rng.choice(["int8", "int32", "int64", "float64", "bool"]))

    change_tensors(folder, change)


def spoil_a_number(folder, rng):
    def change(tensors):
        name = rng.choice(sorted(tensors))
        tensors[name].flat[rng.randrange(tensors[name].size)] = rng.choice([np.nan, np.inf, -np.inf])

    change_tensors(folder, change)


def remove_a_key(folder, rng):
    change_config(folder, **{rng.choice(("r", "lora_alpha", "target_modules")): ...})


def spoil_a_value(folder, rng):
    wrong = {
        "r": (0, -1, 2.5, "3", None, True, 10**9),
        "lora_alpha": (0, -8, "6", None, [], 1e400, True),
        "use_rslora": ("yes", 1, None),
        "target_modules": (None, [], "", [3], "q_proj(", {"q_proj": 1}, "lm_head"),
        "exclude_modules": (3, ["q_proj", 5], "(", ["q_proj"]),
        "rank_pattern": ([3], {"q_proj": 0}, {"(": 3}, {"q_proj": 4}, 7),
        "alpha_pattern": ([3], {"q_proj": "x"}, {"(": 3.0}, 7),
        "base_model_name_or_path": (3, ["a"]),
        OWN_KEY: ([1], {"base_fingerprint": 3}, {"other": "x"}, {"weights_sha256": "0" * 64}, "x"),
    }
    key = rng.choice(sorted(wrong))
    change_config(folder, **{key: rng.choice(wrong[key])})


def exchange_a_file(folder, rng):
    name = rng.choice((PEFT_WEIGHTS_FILE, PEFT_CONFIG_FILE))
    contents = [b"", b"[]", b"\xff\xfe\x00", b"version https://git-lfs.github.com/spec/v1\n", rng.randbytes(300)]
    (folder / name).write_bytes(rng.choice(contents))


def remove_a_file(folder, rng):
    (folder / rng.choice((PEFT_WEIGHTS_FILE, PEFT_CONFIG_FILE))).unlink()


DAMAGES = (
    *(truncate, append, flip_a_bit, overwrite, drop_a_tensor, rename_a_tensor, reshape_a_tensor, retype_a_tensor),
    *(spoil_a_number, remove_a_key, spoil_a_value, exchange_a_file, remove_a_file),
)


@pytest.mark.parametrize("seed", range(100))
def test_damaged_folders_are_refused_with_a_sentence(folder, seed):
    DAMAGES[seed % len(DAMAGES)](folder, random.Random(seed))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError) as refused:
        read_adapter(folder)
    message = str(refused.value)
    assert message.startswith(str(folder))
    assert re.fullmatch(r"[^\n]{40,1200}\.", message)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_facts_of_this_suite_are_read_from_where_earlier_versions_wrote_them(folder):
    new = read_adapter(folder).base
    facts = json.loads((folder / OWN_FILE).read_text())
    assert new == Base("models/base", "ab" * 32, facts["weights_sha256"])
    (folder / OWN_FILE).unlink()
    assert read_adapter(folder).base == Base("models/base")
    change_config(folder, **{OWN_KEY: facts})
    assert read_adapter(folder).base == new
    (folder / OWN_FILE).write_text('{"other": "x"}')
    with pytest.raises(UserError, match=rf"{OWN_FILE}: unknown key other"):
        read_adapter(folder)
