"""Checks of settings for experts: each failure names the file or key, the values, and a fix that then passes."""

import pytest

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml, ParallelSettings
from mindrlhf.configs.validate import check_dropout, check_grpo, check_layout
from mindrlhf.errors import UserError

SIZES = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 192, "num_layers": 4, "num_heads": 12}
EXPERTS = {"family": "qwen3_moe", "attention_bias": False, "qk_norm": True, "num_experts": 4}
DENSE = ModelConfig(**SIZES)
SPARSE = ModelConfig(**SIZES | EXPERTS | {"num_experts_per_tok": 2, "moe_intermediate_size": 24})


def yaml(path: str, **parallel) -> ModelYaml:
    return ModelYaml(path=path, parallel=ParallelSettings(**parallel), context=ContextSettings(device_target="CPU"))


def check(model: ModelConfig, *overrides: str, workers: int = 1, **layouts: dict) -> GRPOSettings:
    train, infer = (yaml(f"{role}.yaml", **layouts.get(role, {})) for role in ("train", "infer"))
    config = load_grpo_config(None, overrides)
    check_grpo(config, train, infer, model, model, workers)
    return config


def refused(call, *arguments, **named) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("replay", ["old", "rollout"])
def test_only_routing_of_experts_is_replayed(replay):
    message = refused(check, DENSE, f"rollout.routing_replay={replay}")
    assert f"rollout.routing_replay is {replay}, and the model of the family qwen2 has no experts" in message
    check(SPARSE, f"rollout.routing_replay={replay}")
    assert check(DENSE, "rollout.routing_replay=off").rollout.routing_replay == "off"


def test_the_old_policy_s_routing_is_not_that_of_groups_of_earlier_policies():
    carried = ("dynamic_sampling.enabled=True",)
    message = refused(check, SPARSE, "rollout.routing_replay=old", *carried)
    assert message.endswith("carries groups over from earlier policies; set it to rollout.")
    check(SPARSE, "rollout.routing_replay=rollout", *carried)


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ({"data_parallel": 2, "expert_parallel": 2}, DENSE, "is 2, and the model of the family qwen2 has no experts"),
        ({"data_parallel": 6, "expert_parallel": 4}, SPARSE, "does not divide data_parallel 6; set it to 1 or 2."),
        ({"data_parallel": 3, "expert_parallel": 3}, SPARSE, "does not divide num_experts 4; set it to 1."),
    ],
)
def test_ranks_over_which_experts_are_spread(layout, model, words):
    message = refused(check_layout, yaml("train.yaml", **layout), model, layout["data_parallel"])
    assert message.startswith("train.yaml: parallel_config.expert_parallel is ")
    assert words in message
    check_layout(yaml("train.yaml", data_parallel=4, expert_parallel=2), SPARSE, 4)


def test_spread_experts_generate_with_the_trained_weights():
    layouts = {"train": {"data_parallel": 2}, "infer": {"data_parallel": 2, "expert_parallel": 2}, "workers": 2}
    message = refused(check, SPARSE, "rollout.weights=int8", **layouts)
    assert "rollout.weights is int8, and infer.yaml has parallel_config.expert_parallel 2" in message
    check(SPARSE, **layouts)


def test_spread_experts_drop_no_inputs_of_adapters():
    spread = yaml("train.yaml", data_parallel=2, expert_parallel=2)
    message = refused(check_dropout, spread, 0.1)
    assert "lora.dropout is 0.1, and train.yaml has parallel_config.expert_parallel 2" in message
    check_dropout(spread, 0.0)
