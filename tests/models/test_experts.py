"""The half with experts: rows sorted by expert, padding routed nowhere, side outputs against their formulas."""

import numpy as np
import pytest
from small_model import EXPERTS, SmallModel, small_config
from small_updater import Subject, random_groups, rows_like

from mindrlhf.configs.lora import Adapter
from mindrlhf.models.expert_layers import BALANCE, LOAD
from mindrlhf.models.experts import block_count, block_size
from mindrlhf.models.parameters import parameter_table
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD


def test_a_frozen_router_stays_and_passes_gradients_on():
    model = SmallModel.random(3, **EXPERTS | {"num_layers": 2})
    groups = random_groups()
    weights = rows_like(groups, lambda n: np.full(n, 0.02))
    frozen = SmallModel(model.config.with_frozen(True, ()), model.arrays)
    subjects = [Subject(one, NEGATIVE_LOG_LIKELIHOOD, moves=one is frozen) for one in (model, frozen)]
    for subject in subjects:
        subject.updater(groups, 1e-2, weights=weights)
    free, held = subjects
    for name, gradient in free.gradients.items():
        if name == ROUTER:
            assert np.abs(gradient).max() > 0
            assert not held.gradients[name].any()
            np.testing.assert_array_equal(held.weights()[name], model.arrays[name])
        else:
            np.testing.assert_array_equal(held.gradients[name], gradient)
            assert not np.array_equal(held.weights()[name], model.arrays[name])
    assert [spec.name for spec in frozen.specs if not spec.decays and spec.kind == "fixed"] == [ROUTER]


def test_adapters_are_on_experts_and_not_on_routers():
    config = small_config(**EXPERTS).model_copy(update={"adapter": Adapter(2, 4)})
    rows = {
        spec.name.removeprefix("model.layers.1.feed_forward.routed_experts."): spec for spec in parameter_table(config)
    }
    assert rows["ffn.w1.lora_a"].shape == (6, 2, 32)
    assert rows["ffn.w2.lora_b"].shape == (6, 32, 2)
    assert rows["ffn.w2.lora_b"].hf_tensors[5].name == "model.layers.1.mlp.experts.5.down_proj.lora_B.weight"
    assert not any(name.startswith("router.") for name, spec in rows.items() if spec.adapts)


@pytest.mark.parametrize(("choices", "experts"), [(2, 8), (64, 8), (512, 8), (8192, 16), (8192, 128), (1, 1)])
def test_blocks_have_room_for_any_routing(choices, experts):
    size = block_size(choices, experts)
    count = block_count(choices, experts, size)
    rng = np.random.default_rng(0)
    routings = [rng.multinomial(choices, rng.dirichlet(np.full(experts, spread))) for spread in (0.05, 1, 20)]
    routings.append(np.bincount(np.arange(choices) % experts, minlength=experts))
    routings.append(np.eye(experts, dtype=int)[0] * choices)
    assert all(np.ceil(loads / size).sum() <= count for loads in routings)
    assert count * size <= choices * size
    assert count * size < choices + experts * size


ROUTER = "model.layers.1.feed_forward.routed_experts.router.dense.weight"


@pytest.fixture(scope="module")
def updated():
    """A model with experts in two layers of three, and the side outputs of an update by layer, summed."""
    model = SmallModel.random(3, **EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": (0,)})
    groups = random_groups()
    update = Subject(model, NEGATIVE_LOG_LIKELIHOOD).updater(groups, 0.0, weights=rows_like(groups, np.zeros))
    return model, groups, update


def test_only_layers_with_experts_have_side_outputs(updated):
    for micro in updated[2].sides:
        assert list(micro) == [(layer, name) for layer in (1, 2) for name in (LOAD, BALANCE)]


def test_real_tokens_are_routed_and_no_padding(updated):
    """In the last layer only tokens of completions are computed."""
    _, groups, update = updated
    answered = sum(len(response) for group in groups for response in group.responses)
    prompts = sum(len(group.prompt_ids) - 1 for group in groups)  # each response computes its prompt's last token
    loads = {layer: sum(micro[layer, LOAD] for micro in update.sides) for layer in (1, 2)}
    assert loads[1].sum() == 2 * (prompts + answered)
    assert loads[2].sum() == 2 * answered
    assert all(load.shape == (6,) for load in loads.values())


def test_the_balance_is_the_formula_s(updated):
    """Of the first layer with experts, from the oracle's router in float64."""
    import reference_model

    model, groups, update = updated
    seen = []
    kept = reference_model.experts

    def watched(config, w, p, h, routing):
        seen.append((p, w[p + "mlp.gate.weight"] @ h.T))
        return kept(config, w, p, h, routing)

    shares = []
    try:
        reference_model.experts = watched
        for group in groups:
            for i, response in enumerate(group.responses):
                model.logits(np.concatenate([group.prompt_ids, response[:-1]]))
                logits = next(found for p, found in seen if p == "model.layers.1.").T
                seen.clear()
                own = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
                shares.append(own if i == 0 else own[len(group.prompt_ids) - 1 :])
    finally:
        reference_model.experts = kept
    shares = np.concatenate(shares)
    chosen = np.argsort(-shares, axis=1)[:, :2]
    load = np.bincount(chosen.ravel(), minlength=6)
    assert len(update.sides) == 1
    micro = update.sides[0]
    np.testing.assert_array_equal(micro[1, LOAD], load)
    expected = 6 * (load / load.sum() * shares.mean(0)).sum() / 2  # the mean over two layers
    np.testing.assert_allclose(micro[1, BALANCE], expected, rtol=1e-5)
