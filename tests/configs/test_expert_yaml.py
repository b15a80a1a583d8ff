"""Model YAMLs of models with experts, under MindFormers' names."""

import pytest
import yaml

from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.errors import UserError


@pytest.fixture
def load(tmp_path):
    """Load a YAML with this `model_config`."""

    def loaded(group):
        path = tmp_path / "model.yaml"
        path.write_text(yaml.safe_dump({"model": {"model_config": group}}))
        return load_model_yaml(path)

    return loaded


def test_experts_of_the_published_yaml(load):
    """The keys of MindFormers' configs/qwen3_moe, with other sizes; routed_scaling_factor would be another model."""
    group = {
        "model_type": "qwen3_moe",
        "architectures": "Qwen3MoeForCausalLM",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "moe_grouped_gemm": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "moe_router_pre_softmax": True,
        "moe_token_drop_policy": "probs",
        "moe_aux_loss_coeff": 0.001,
    }
    model = load(group).architecture()
    assert (model.family, model.num_experts, model.num_experts_per_tok) == ("qwen3_moe", 8, 2)
    assert (model.moe_intermediate_size, model.norm_topk_prob, model.expert_layers) == (48, True, (0, 1))
    names = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
    plain = {key: value for key, value in group.items() if key not in ("num_experts", "num_experts_per_tok")}
    del plain["moe_intermediate_size"]
    assert load(plain | names).architecture() == model
    with pytest.raises(UserError, match="lacks num_experts, num_experts_per_tok, moe_intermediate_size"):
        load(plain).architecture()
    with pytest.raises(UserError, match="routed_scaling_factor"):
        load(group | {"routed_scaling_factor": 1.5})
