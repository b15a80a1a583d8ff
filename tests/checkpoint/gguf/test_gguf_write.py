"""Models as GGUF files: back without a change, as the package `gguf` reads them, and as llama.cpp runs them."""

import json

import gguf
import gguf_files
import jobs
import numpy as np
import pytest
from llama_cpp_python import GREEDY, TOKENIZE, run_llama_cpp, smollm_file
from many_texts import many_texts
from slow_cases import few_of
from small_model import random_arrays, small_config

from mindrlhf.checkpoint.gguf.write import FILE_TYPES, write_model
from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.peft import read_adapter, write_adapter
from mindrlhf.checkpoint.peft_config import Base
from mindrlhf.checkpoint.stored_tensor import decode, encode
from mindrlhf.commands.export import TYPES
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import Llama3Scaling
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.models.families import DEFAULT
from mindrlhf.models.parameters import adapter_rows, parameter_table

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 512}
SCALING = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
FAMILIES = {
    "llama": {"family": "llama", "attention_bias": False, "rope_scaling": SCALING, "rope_theta": 5e5},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "attention_bias": False, "qk_norm": True},
    "qwen3_moe": gguf_files.EXPERTS | {"moe_intermediate_size": 32},
}
GENERATION = {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05, "do_sample": True}
# By family: modules with adapters -> the file's tensor; of experts, one of them and its place in the tensor.
MODULES = {
    "llama": {"self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v", "mlp.down_proj": "ffn_down"},
    "qwen3_moe": {
        "self_attn.q_proj": "attn_q",
        "self_attn.v_proj": "attn_v",
        "mlp.experts.0.down_proj": ("ffn_down_exps", 0),
        "mlp.experts.3.down_proj": ("ffn_down_exps", 3),
    },
}
THINGS = ("rain", "tea", "bread", "rivers", "Paris", "dogs", "chess", "books", "ships", "bees")
ROUNDING = {"f16": 0.05, "f32": 1e-3}  # of logits
PROMPTS, TOKENS = 20, 16


@pytest.fixture(scope="module")
def tokenizer():
    """The kind that the quick start trains, of fewer tokens than the models have rows."""
    return train_tokenizer(many_texts(500, (), seed=4), 380)


def ends_of(tokenizer) -> list[int]:
    return [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]


def write_folder(folder, family, tokenizer, dtype="float32", chat=True):
    """A Hugging Face folder of random weights that the dtype holds exactly."""
    ends = ends_of(tokenizer)
    config = small_config(**SIZES | FAMILIES[family], eos_token_ids=ends, pad_token_id=ends[1])
    arrays = {name: decode(encode(a, dtype, name), dtype) for name, a in random_arrays(config).items()}
    if chat:
        tokenizer = tokenizer.with_chat_template(DEFAULT.chat.chat_template)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder, config, tensors, dtype, tokenizer, generation=GENERATION)
    return config, arrays


def export(source, file, *more) -> int:
    return jobs.call(["export", "--checkpoint", source, "--gguf", file, *more])


KINDS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
FEW = [("llama", "f32"), ("qwen2", "bf16"), ("qwen3", "f16"), ("qwen3_moe", "bf16")]
REST = [(family, kind) for family in FAMILIES for kind in KINDS if (family, kind) not in FEW]


@pytest.mark.parametrize(("family", "kind"), few_of(FEW, REST))
def test_there_and_back_is_exact(tmp_path, tokenizer, family, kind):
    there, back, file = tmp_path / "there", tmp_path / "back", tmp_path / "model.gguf"
    write_folder(there, family, tokenizer, KINDS[kind])
    assert export(there, file, "--type", kind) == 0
    assert jobs.call(["convert", "--gguf", file, "--torch_ckpt_dir", back]) == 0
    assert (back / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
    assert read_hf_config(back) == read_hf_config(there)
    first, second = Tokenizer.from_path(there), Tokenizer.from_path(back)
    texts = many_texts(300, ("<|im_end|>",), seed=5)
    assert second.encode_batch(texts) == first.encode_batch(texts)
    assert second.chat_template == first.chat_template
    assert (second.eos_token_id, second.pad_token_id) == (first.eos_token_id, first.pad_token_id)


def test_types_of_tensors(tmp_path, tokenizer):
    write_folder(tmp_path / "hf", "qwen3", tokenizer)
    expected = {
        "f16": ("F16", "F16"),
        "bf16": ("BF16", "BF16"),
        "f32": ("F32", "F32"),
        "q8_0": ("Q8_0", "Q8_0"),
        "q4_0": ("Q4_0", "Q8_0"),
    }
    assert tuple(expected) == TYPES
    for kind, (matrices, tables) in expected.items():
        assert export(tmp_path / "hf", tmp_path / f"{kind}.gguf", "--type", kind) == 0
        reader = gguf.GGUFReader(tmp_path / f"{kind}.gguf")
        found = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert (found["blk.0.attn_q.weight"], found["token_embd.weight"]) == (matrices, tables)
        assert found["output_norm.weight"] == found["blk.1.attn_q_norm.weight"] == "F32"
        assert reader.fields["qwen3.attention.key_length"].contents() == 16
        assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 400
        assert reader.fields["tokenizer.ggml.pre"].contents() == "qwen2"


def test_rows_that_blocks_do_not_fill_are_float16(tmp_path, tokenizer):
    config = small_config(vocab_size=400, hidden_size=32, intermediate_size=48)
    arrays = random_arrays(config)
    save_hf(tmp_path / "hf", config, ((s, arrays[s.name]) for s in parameter_table(config)), tokenizer=tokenizer)
    assert export(tmp_path / "hf", tmp_path / "model.gguf", "--type", "q8_0") == 0
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert (found["blk.0.ffn_down.weight"], found["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


@pytest.mark.slow
def test_qwens_tokenizer_comes_back(shared, tmp_path):
    own = Tokenizer.from_path(shared / "data" / "qwen2_5_tokenizer" / "vocab.json")
    config = small_config(vocab_size=151_936, hidden_size=8, num_layers=1)
    arrays = random_arrays(config)
    save_hf(tmp_path / "hf", config, ((s, arrays[s.name]) for s in parameter_table(config)), tokenizer=own)
    assert export(tmp_path / "hf", tmp_path / "model.gguf") == 0
    back = Tokenizer.from_path(local_model(str(tmp_path / "model.gguf")))
    golden = json.loads((shared / "golden" / "qwen2_5_tokenizer.json").read_text(encoding="utf-8"))
    texts = [*many_texts(2000, ("<|im_start|>", "<tool_call>"), seed=6), json.dumps(golden, ensure_ascii=False)]
    assert back.encode_batch(texts) == own.encode_batch(texts)
    assert back.size == own.size
    assert dict(back._added_tokens()) == dict(own._added_tokens())


def test_experts_of_another_kind_are_refused(tmp_path, capsys):
    """llama.cpp's `qwen3moe` has experts in all layers, and divides a token's weights by their sum."""
    for change, message in (
        ({"num_layers": 2, "mlp_only_layers": (0,)}, "1 of 2 layers have experts, and GGUF's qwen3moe has them in all"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false, and GGUF's qwen3moe divides"),
    ):
        config = gguf_files.wide_config(**gguf_files.EXPERTS | change)
        arrays = random_arrays(config)
        tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
        with pytest.raises(UserError, match=message):
            write_model(tmp_path / "model.gguf", config, tensors, FILE_TYPES["f32"], {}, "tiny")
    assert not list(tmp_path.iterdir())


def test_modelfile(tmp_path, tokenizer):
    write_folder(tmp_path / "hf", "qwen2", tokenizer)
    assert export(tmp_path / "hf", tmp_path / "out" / "model.gguf") == 0
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert lines[1] == "FROM ./model.gguf"
    assert lines[2:6] == [
        'TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}',
        "{{ .Content }}<|im_end|>",
        "{{ end }}<|im_start|>assistant",
        '"""',
    ]
    assert set(lines[6:]) == {
        *('PARAMETER stop "<|im_end|>"', 'PARAMETER stop "<|endoftext|>"', "PARAMETER temperature 0.7"),
        *("PARAMETER top_p 0.8", "PARAMETER repeat_penalty 1.05"),
    }
    write_folder(tmp_path / "plain", "qwen2", tokenizer, chat=False)
    assert export(tmp_path / "plain", tmp_path / "out" / "plain.gguf") == 0
    assert "{{ .Prompt }}\n" in (tmp_path / "out" / "Modelfile").read_text()


def test_what_is_refused(tmp_path, tokenizer, capsys):
    write_folder(tmp_path / "hf", "qwen2", tokenizer)
    for more, message in (
        (["--gguf", tmp_path / "model.bin"], "must end in .gguf"),
        (["--gguf", tmp_path / "m.gguf", "--output", tmp_path / "o"], "give either --output"),
        (["--gguf", tmp_path / "m.gguf", "--dtype", "bf16"], "--dtype is about --output"),
        (["--output", tmp_path / "o", "--type", "f16"], "--type is about --gguf"),
        (["--gguf", tmp_path / "m.gguf", "--merge"], "leave out --merge and --base"),
        (["--gguf", tmp_path / "m.gguf", "--role", "critic"], "has no vocabulary head"),
        ([], "give either --output"),
    ):
        assert jobs.call(["export", "--checkpoint", tmp_path / "hf", *more]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "Modelfile").write_text("FROM mine\n")
    assert export(tmp_path / "hf", tmp_path / "m.gguf") == 2
    assert "Modelfile: is not written by `mindrlhf export`" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf"))
    content = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(content))
    assert export(tmp_path / "hf", tmp_path / "out" / "m.gguf") == 2
    assert "its tokenizer cuts text as none of llama.cpp's" in capsys.readouterr().err


@pytest.fixture(params=MODULES)
def adapted(request, tmp_path, tokenizer):
    """A model and an adapter over it whose modules have several ranks."""
    config, _ = write_folder(tmp_path / "base", request.param, tokenizer)
    adapter = Adapter(4, 8, False, ("q_proj", "v_proj", "down_proj"), rank_pattern={"v_proj": 2})
    config = config.model_copy(update={"adapter": adapter})
    arrays = random_arrays(config, seed=7)
    rows = adapter_rows(config).values()
    named = {name: array for spec in rows for name, array in split(spec, arrays[spec.name])}
    write_adapter(tmp_path / "adapter", adapter, named, Base(str(tmp_path / "base"), None))
    return config, named


def matrices(found, layer, tensor):
    """A and B of one module in the file."""
    name, place = tensor if isinstance(tensor, tuple) else (tensor, ...)
    return [found[f"blk.{layer}.{name}.weight.lora_{letter}"][place] for letter in "ab"]


def test_an_adapter_has_llama_cpps_names_scale_and_rows(tmp_path, adapted):
    config, arrays = adapted
    assert export(tmp_path / "adapter", tmp_path / "adapter.gguf") == 0
    assert "FROM ./base.gguf\nADAPTER ./adapter.gguf" in (tmp_path / "Modelfile").read_text()
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    assert reader.fields["general.type"].contents() == "adapter"
    alpha = reader.fields["adapter.lora.alpha"].contents()
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(found) == len(adapter_rows(config))
    stored = read_adapter(tmp_path / "adapter")
    for layer in range(2):
        for ours, theirs in MODULES[config.family].items():
            name = f"model.layers.{layer}.{ours}"
            a, b = matrices(found, layer, theirs)
            rank, scale = stored.adapter.of(name)
            assert a.shape[0] == b.shape[1] == rank
            expected = scale * arrays[f"{name}.lora_B.weight"] @ arrays[f"{name}.lora_A.weight"]
            order = gguf_files.row_order(config, f"{name}.weight")
            np.testing.assert_allclose(alpha / rank * b @ a, expected if order is None else expected[order], atol=1e-6)


def greedy(folder, prompts, count):
    """Our answers without sampling and without end tokens."""
    from mindrlhf.backend.process.launch import launch
    from mindrlhf.configs.grpo import SamplingSettings
    from mindrlhf.rollout.generator import Generator
    from mindrlhf.types import Prompt

    launch("CPU")
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=count, min_new_tokens=count)
    generator = Generator(str(folder), sampling)
    asked = [Prompt(place, np.array(ids, np.int32)) for place, ids in enumerate(prompts)]
    return [group.rollouts[0].response_ids.tolist() for group in generator.generate(asked)]


def same_answers(ours, theirs, rounding: float) -> int:
    """How many answers are the same; others part where llama.cpp's best token leads by no more than `rounding`."""
    same = 0
    for tokens, (best, leads, seconds) in zip(ours, theirs, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(tokens, best, strict=True)) if a != b), None)
        same += place is None
        assert place is None or (tokens[place] == seconds[place] and leads[place] <= rounding), (leads, place)
    print(f"{same} of {len(ours)} answers are the same")
    return same


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_gives_the_same_tokens(tmp_path, tokenizer, family, kind):
    """In f16 it rounds what it multiplies by the weights too, which decides between tokens that are nearly as good."""
    write_folder(tmp_path / "hf", family, tokenizer, "float16")
    file = tmp_path / "model.gguf"
    assert export(tmp_path / "hf", file, "--type", kind) == 0
    texts = many_texts(PROMPTS, (), seed=8)
    prompts = [ids[:48] for ids in tokenizer.encode_batch(texts)]
    theirs = run_llama_cpp(GREEDY, model=file, prompts=prompts, tokens=TOKENS, never=ends_of(tokenizer))
    same = same_answers(greedy(tmp_path / "hf", prompts, TOKENS), theirs, ROUNDING[kind])
    assert same >= (PROMPTS if kind == "f32" else PROMPTS - 2)
    texts = many_texts(2000, ("<|im_end|>",), seed=9, composed=True)
    assert run_llama_cpp(TOKENIZE, model=file, texts=texts) == tokenizer.encode_batch(texts)


@pytest.mark.slow
def test_llama_cpp_gives_the_same_tokens_with_an_adapter(tmp_path, tokenizer, adapted):
    for source, file, more in (("base", "base.gguf", ["--type", "f32"]), ("adapter", "adapter.gguf", [])):
        assert export(tmp_path / source, tmp_path / file, *more) == 0
    assert export(tmp_path / "adapter", tmp_path / "merged.gguf", "--merge", "--type", "f32") == 0
    prompts = [ids[:48] for ids in tokenizer.encode_batch(many_texts(PROMPTS, (), seed=8))]
    ask = {"prompts": prompts, "tokens": TOKENS, "never": ends_of(tokenizer)}
    ours = greedy(tmp_path / "adapter", prompts, TOKENS)
    theirs = run_llama_cpp(GREEDY, model=tmp_path / "base.gguf", adapter=tmp_path / "adapter.gguf", **ask)
    assert [tokens for tokens, *_ in theirs] == ours
    assert [tokens for tokens, *_ in run_llama_cpp(GREEDY, model=tmp_path / "merged.gguf", **ask)] == ours
    assert greedy(tmp_path / "base", prompts, TOKENS) != ours


@pytest.mark.slow
def test_a_real_model_goes_through_llama_cpp(tmp_path):
    source = smollm_file()
    assert export(source, tmp_path / "model.gguf") == 0
    tokenizer = Tokenizer.from_path(local_model(source))
    asked = [f"What is {a} plus {b}?" for a, b in zip(range(10), range(5, 15), strict=True)]
    asked += [f"Write one sentence about {thing}." for thing in THINGS]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = tokenizer.encode_batch([chat.format(text) for text in asked])
    theirs = run_llama_cpp(GREEDY, model=tmp_path / "model.gguf", prompts=prompts, tokens=TOKENS, never=[0, 2])
    ours = greedy(tmp_path / "model.gguf", prompts, TOKENS)
    assert same_answers(ours, theirs, ROUNDING["f16"]) >= PROMPTS - 2
