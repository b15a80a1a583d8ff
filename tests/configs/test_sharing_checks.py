"""Weights that data-parallel ranks share: read from MindFormers' key, refused where layers share what they may not."""

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import OPTIMIZER_LEVEL, ContextSettings, ModelYaml, ParallelSettings, load_model_yaml
from mindrlhf.configs.placement import Division, placed
from mindrlhf.configs.validate import check_grpo, check_layout
from mindrlhf.errors import UserError

SIZES = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 192, "num_layers": 4, "num_heads": 12}
EXPERTS = {"family": "qwen3_moe", "attention_bias": False, "qk_norm": True, "num_experts": 4, "num_experts_per_tok": 2}
MODEL = ModelConfig(**SIZES | EXPERTS | {"moe_intermediate_size": 24})
LEVEL = {"data_parallel": 2, "enable_parallel_optimizer": True, "optimizer_level": "level3"}
TEXT = """
context: {device_target: CPU}
parallel: {enable_parallel_optimizer: True, parallel_optimizer_config: {optimizer_level: LEVEL, threshold: 64}}
parallel_config: {data_parallel: 2}
recompute_config: {recompute: True}
"""


def yaml(path: str, **parallel) -> ModelYaml:
    return ModelYaml(path=path, parallel=ParallelSettings(**parallel), context=ContextSettings(device_target="CPU"))


def check(train: dict, *overrides: str) -> None:
    own, other = yaml("train.yaml", **train), yaml("infer.yaml", data_parallel=2 * train.get("pipeline_stage", 1))
    check_grpo(load_grpo_config(None, overrides), own, other, MODEL, MODEL, own.parallel.workers)


@pytest.mark.parametrize(
    ("train", "settings", "found", "right"),
    [
        ({"pipeline_stage": 2, "micro_batch_num": 2}, (), "parallel_config.pipeline_stage is 2", "1"),
        ({}, ("lora.rank=4", "lora.dropout=0.1"), "lora.dropout is 0.1", "0"),
        ({}, ("rollout.routing_replay=old",), "rollout.routing_replay is old", "off"),
        ({}, ("rollout.routing_replay=rollout",), "rollout.routing_replay is rollout", "off"),
    ],
)
def test_what_layers_of_one_graph_cannot_do_is_refused(train, settings, found, right):
    with pytest.raises(UserError) as caught:
        check(LEVEL | train, *settings)
    message = str(caught.value)
    assert message.startswith(f"train.yaml: {OPTIMIZER_LEVEL} is level3, and {found}, where ")
    assert message.endswith(f"; set the level to level1, or {found.partition(' ')[0]} to {right}.")
    check(LEVEL | train | {"optimizer_level": "level1"}, *settings)
    check(LEVEL)


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_the_level_is_read_where_mindspore_has_it(tmp_path, level):
    file = tmp_path / "train.yaml"
    file.write_text(TEXT.replace("LEVEL", level))
    loaded = load_model_yaml(file)
    assert loaded.parallel.optimizer_level == level
    assert loaded.parallel.shards_weights == (level == "level3")
    assert loaded.unused == ("parallel.parallel_optimizer_config.threshold",)
    assert loaded.computes_again  # on CPU by the fused operators, or because of the level
    assert loaded.recomputes == (level == "level1")
    assert OPTIMIZER_LEVEL not in loaded.without_effect(generating=False)
    assert OPTIMIZER_LEVEL in loaded.without_effect(generating=True)


def test_another_level_is_refused_by_its_place(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(TEXT.replace("LEVEL", "level2"))
    with pytest.raises(UserError, match=rf"{OPTIMIZER_LEVEL} is 'level2', and must be one of 'level1', 'level3'"):
        load_model_yaml(file)


@pytest.mark.parametrize("changes", [{"data_parallel": 1}, {"enable_parallel_optimizer": False}])
def test_a_level_without_effect_is_said(changes):
    given = yaml("train.yaml", **LEVEL | changes)
    assert not given.parallel.shards_weights
    assert OPTIMIZER_LEVEL in given.without_effect(generating=False)
    assert OPTIMIZER_LEVEL not in yaml("train.yaml", **LEVEL).without_effect(generating=False)


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_weights_that_generate_are_not_shared(placement):
    """One YAML may serve both roles."""
    one = yaml("both.yaml", **LEVEL)
    infer = placed(one, one, placement, Division())
    assert one.parallel.shards_weights
    assert not infer.parallel.shards_weights
    check_layout(infer, MODEL, 2)
