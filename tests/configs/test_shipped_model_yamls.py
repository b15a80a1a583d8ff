"""The YAMLs in model_configs/qwen_grpo: they load, describe the published models, and pass the checks of a run."""

import pytest

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
# The same of models with experts, which have no overlay for one CPU process.
EXPERTS = {("finetune_qwen3_30b_a3b", "predict_qwen3_30b_a3b"): (16, 30_532_122_624)}
LAYOUTS = {
    "finetune_qwen3_30b_a3b": (1, 4, 4, 4),
    "predict_qwen3_30b_a3b": (4, 4, 1, 1),
    "finetune_qwen2_5_7b": (1, 4, 2, 4),
    "predict_qwen2_5_7b_instruct": (2, 4, 1, 1),
    "finetune_qwen2_5_32b": (1, 8, 4, 4),
    "predict_qwen2_5_32b_instruct": (4, 8, 1, 1),
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
    return model.num_layers * layer + width + tables * model.vocab_size * width


def test_nothing_else_is_shipped(root):
    names = {name for pair in (*PAIRS, *EXPERTS, TINY, TINY_EXPERTS) for name in pair} | {
        f"{name}_cpu" for pair in PAIRS for name in pair
    }
    assert {path.stem for path in (root / "model_configs" / "qwen_grpo").iterdir()} == names


@pytest.mark.parametrize("pair", PAIRS | EXPERTS, ids=lambda pair: pair[0])
def test_a_pair_describes_the_published_model_and_its_layout_passes(load, pair):
    workers, count = (PAIRS | EXPERTS)[pair]
    train, infer = (load(name) for name in pair)
    model = train.architecture()
    assert infer.architecture() == model
    assert parameters(model) == count
    check_grpo(load_grpo_config(None, (), infer.sampling_defaults()), train, infer, model, model, workers)
    for yaml in (train, infer):
        assert yaml.unused == ()
        assert yaml.context.device_target == "Ascend"
        assert yaml.model.compute_dtype == "bfloat16"


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


@pytest.mark.parametrize("name", [*(pair[1] for pair in PAIRS | EXPERTS), TINY[1], TINY_EXPERTS[1]])
def test_predict_yamls_sample_the_whole_distribution(load, name):
    rollout = load(name).sampling_defaults()["rollout"]
    assert (rollout["temperature"], rollout["top_k"], rollout["top_p"], rollout["repetition_penalty"]) == (
        1.0,
        0,
        1.0,
        1.0,
    )
    assert rollout["max_new_tokens"] >= 128
