"""The YAMLs in model_configs/qwen_grpo: they load, describe the published models, and pass the checks of a run."""

import pytest

from mindrlhf import cli
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.configs.validate import check_grpo, check_lengths

TINY = ("finetune_qwen2_tiny", "predict_qwen2_tiny")
TINY_EXPERTS = ("finetune_qwen3_moe_tiny", "predict_qwen3_moe_tiny")
PAIRS = {
    # name of train and infer YAML: workers, parameters as published with the checkpoints (tied head counted once)
    ("finetune_qwen2_5_0_5b", "predict_qwen2_5_0_5b_instruct"): (1, 494_032_768),
    ("finetune_qwen2_5_7b", "predict_qwen2_5_7b_instruct"): (8, 7_615_616_512),
    ("finetune_qwen2_5_32b", "predict_qwen2_5_32b_instruct"): (32, 32_763_876_352),
}
# The same of models without an overlay for one CPU process.
OTHERS = {
    ("finetune_qwen2_5_1_5b", "predict_qwen2_5_1_5b_instruct"): (1, 1_543_714_304),
    ("finetune_qwen2_5_3b", "predict_qwen2_5_3b_instruct"): (8, 3_085_938_688),
    ("finetune_qwen2_5_14b", "predict_qwen2_5_14b_instruct"): (16, 14_770_033_664),
    ("finetune_qwen3_0_6b", "predict_qwen3_0_6b"): (1, 596_049_920),
    ("finetune_qwen3_1_7b", "predict_qwen3_1_7b"): (1, 1_720_574_976),
    ("finetune_qwen3_4b", "predict_qwen3_4b"): (8, 4_022_468_096),
    ("finetune_qwen3_8b", "predict_qwen3_8b"): (8, 8_190_735_360),
    ("finetune_qwen3_14b", "predict_qwen3_14b"): (16, 14_768_307_200),
    ("finetune_qwen3_32b", "predict_qwen3_32b"): (32, 32_762_123_264),
    ("finetune_r1_distill_qwen_1_5b", "predict_r1_distill_qwen_1_5b"): (1, 1_777_088_000),
    ("finetune_r1_distill_qwen_7b", "predict_r1_distill_qwen_7b"): (8, 7_615_616_512),
    ("finetune_r1_distill_qwen_14b", "predict_r1_distill_qwen_14b"): (16, 14_770_033_664),
    ("finetune_r1_distill_qwen_32b", "predict_r1_distill_qwen_32b"): (32, 32_763_876_352),
    ("finetune_qwen3_30b_a3b", "predict_qwen3_30b_a3b"): (16, 30_532_122_624),
    ("finetune_qwen3_30b_a3b_ep2", "predict_qwen3_30b_a3b_ep2"): (16, 30_532_122_624),
    ("finetune_qwen3_235b_a22b", "predict_qwen3_235b_a22b"): (128, 235_093_634_560),
    ("finetune_qwen2_5_vl_3b", "predict_qwen2_5_vl_3b_instruct"): (8, 3_754_622_976),
    ("finetune_qwen2_5_vl_7b", "predict_qwen2_5_vl_7b_instruct"): (8, 8_292_166_656),
    ("finetune_qwen2_5_vl_32b", "predict_qwen2_5_vl_32b_instruct"): (32, 33_452_718_336),
}
SWAP = "memory.swap=True"
# What a pair's plan needs to fit, as docs/ascend.md has it; the others fit with the default settings.
FITS_WITH = {
    "finetune_qwen3_235b_a22b": (SWAP,),
    **dict.fromkeys(("finetune_qwen3_30b_a3b", "finetune_qwen3_30b_a3b_ep2"), (SWAP,)),
    **dict.fromkeys((f"finetune_qwen2_5_vl_{size}" for size in ("3b", "7b", "32b")), ("--image_tokens=1280", SWAP)),
}
LAYOUTS = {
    "finetune_qwen3_235b_a22b": (1, 8, 16, 16),
    "predict_qwen3_235b_a22b": (4, 32, 1, 1),
    "finetune_qwen3_30b_a3b": (1, 4, 4, 4),
    "finetune_qwen3_30b_a3b_ep2": (2, 2, 4, 4),
    "predict_qwen3_30b_a3b": (4, 4, 1, 1),
    "finetune_qwen2_5_7b": (1, 4, 2, 4),
    "predict_qwen2_5_7b_instruct": (2, 4, 1, 1),
    "finetune_qwen2_5_32b": (1, 8, 4, 4),
    "predict_qwen2_5_32b_instruct": (4, 8, 1, 1),
    "finetune_qwen2_5_vl_7b": (1, 4, 2, 4),
    "predict_qwen2_5_vl_7b_instruct": (2, 4, 1, 1),
    "finetune_qwen2_5_vl_32b": (1, 8, 4, 4),
    "predict_qwen2_5_vl_32b_instruct": (4, 8, 1, 1),
}


@pytest.fixture
def load(root):
    return lambda name: load_model_yaml(root / "model_configs" / "qwen_grpo" / f"{name}.yaml")


def parameters(model: ModelConfig) -> int:
    """Elements of all weights, counted from the architecture as published."""
    width, inner = model.hidden_size, model.intermediate_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = 2 * width * query + 2 * width * key + 2 * width
    layer += query + 2 * key if model.attention_bias else 2 * model.head_dim
    each = 3 * width * model.moe_intermediate_size + width  # an expert, and its row of the router
    layer += model.num_experts * each if model.num_experts else 3 * width * inner
    tables = 1 if model.tie_word_embeddings else 2
    return model.num_layers * layer + width + tables * model.vocab_size * width + tower_parameters(model)


def tower_parameters(model: ModelConfig) -> int:
    """Elements of a vision tower, with biases everywhere but at the patches."""
    if model.vision is None:
        return 0
    wide, inner = model.vision.hidden_size, model.vision.intermediate_size
    block = 2 * wide + (3 * wide + wide) * (wide + 1) + 2 * inner * (wide + 1) + wide * (inner + 1)
    merged = 4 * wide
    merger = wide + merged * (merged + 1) + model.hidden_size * (merged + 1)
    return wide * 3 * 2 * 14 * 14 + model.vision.depth * block + merger


def test_nothing_else_is_shipped(root):
    names = {name for pair in (*PAIRS, *OTHERS, TINY, TINY_EXPERTS) for name in pair} | {
        f"{name}_cpu" for pair in PAIRS for name in pair
    }
    folder = root / "model_configs" / "qwen_grpo"
    assert {path.stem for path in folder.glob("*.*")} == names
    shapes = {path.relative_to(folder).as_posix() for path in folder.glob("*/*")}
    assert shapes == {"qwen2_5_vl_tiny/config.json", "qwen2_5_vl_tiny/preprocessor_config.json"}


@pytest.mark.parametrize("pair", PAIRS | OTHERS, ids=lambda pair: pair[0])
def test_a_pair_describes_the_published_model_and_its_layout_passes(load, pair):
    workers, count = (PAIRS | OTHERS)[pair]
    train, infer = (load(name) for name in pair)
    model = train.architecture()
    assert infer.architecture() == model
    assert parameters(model) == count
    check_grpo(load_grpo_config(None, (), infer.sampling_defaults()), train, infer, model, model, workers)
    for yaml in (train, infer):
        assert yaml.unused == ()
        assert yaml.context.device_target == "Ascend"
        assert yaml.model.compute_dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS | OTHERS, ids=lambda pair: pair[0])
def test_a_pair_passes_its_own_plan(pair, capsys):
    words = FITS_WITH.get(pair[0], ())
    assert cli.main(["plan", "--sft_path_train", pair[0], "--sft_path_infer", pair[1], *words]) == 0
    assert "\nfits: " in capsys.readouterr().out


@pytest.mark.parametrize("name", LAYOUTS)
def test_large_models_have_the_layout_their_users_know(load, name):
    parallel = load(name).parallel
    layout = (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage, parallel.micro_batch_num)
    assert layout == LAYOUTS[name]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_the_cpu_overlays_are_the_same_model_on_one_process(load, pair):
    train, infer = (load(f"{name}_cpu") for name in pair)
    model = train.architecture()
    assert model == load(pair[0]).architecture() == infer.architecture()
    config = load_grpo_config(None, (), infer.sampling_defaults())
    check_grpo(config, train, infer, model, model, workers=1)
    check_lengths(config, infer, model, prompt_tokens=512)
    assert infer.sampling_defaults() == load(pair[1]).sampling_defaults()
    for yaml in (train, infer):
        assert yaml.context.device_target == "CPU"
        assert yaml.unused == ()


@pytest.mark.parametrize("pair", [TINY, TINY_EXPERTS], ids=lambda pair: pair[0])
def test_the_tiny_pair_trains_from_scratch_on_cpu(load, pair):
    train, infer = (load(name) for name in pair)
    model = train.architecture()
    assert infer.architecture() == model
    assert 1_000_000 < parameters(model) < 4_000_000
    assert model.vocab_size == 512
    check_grpo(GRPOSettings(), train, infer, model, model, workers=1)
    for yaml in (train, infer):
        assert (yaml.context.device_target, yaml.unused) == ("CPU", ())


@pytest.mark.parametrize("name", [*(pair[1] for pair in PAIRS | OTHERS), TINY[1], TINY_EXPERTS[1]])
def test_predict_yamls_sample_the_whole_distribution(load, name):
    rollout = load(name).sampling_defaults()["rollout"]
    assert (rollout["temperature"], rollout["top_k"], rollout["top_p"], rollout["repetition_penalty"]) == (
        1.0,
        0,
        1.0,
        1.0,
    )
    assert rollout["max_new_tokens"] >= 128
