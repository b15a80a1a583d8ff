"""FLOPs of a vision tower against a count of every product, patch by patch and key by key."""

import pytest

from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.metrics.flops import GroupLengths, Utilization, forward_flops, phase_flops
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.metrics.tower_flops import tower_flops
from mindrlhf.model_roles import RoleModel

TEXT = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_layers": 3, "num_heads": 3}
VISION = VisionConfig(
    depth=5,
    hidden_size=32,
    intermediate_size=20,
    num_heads=2,
    patch_size=4,
    temporal_patch_size=2,
    window_size=24,
    full_attention_blocks=(1, 4, 9),  # the tower has no tenth block
    sections=(2, 1, 1),
)
SEEING = ModelConfig(**TEXT, head_dim=8, family="qwen2_5_vl", vision=VISION)
IMAGES = [(1, 12, 12), (1, 4, 14), (1, 10, 2)]
GROUPS = [GroupLengths(30, [3, 1], 1, IMAGES[:2]), GroupLengths(20, [6], 2, IMAGES[2:]), GroupLengths(4, [2])]


def plain_count(images) -> tuple[int, int]:
    """Operations of the blocks and of the merger; a window is 3 tokens or 6 patches wide."""
    blocks = merger = 0
    for _, rows, columns in images:
        patches = [(row, column) for row in range(rows) for column in range(columns)]
        for row, column in patches:
            blocks += 2 * 3 * 2 * 4 * 4 * 32
            for block in range(5):
                blocks += 2 * 32 * 96 + 2 * 32 * 32 + 3 * 2 * 32 * 20
                near = [one for one in patches if (one[0] // 6, one[1] // 6) == (row // 6, column // 6)]
                seen = patches if block in (1, 4) else near
                blocks += len(seen) * 2 * (2 * 16 + 2 * 16)  # two heads: scores, and weighted values
        merger += len(patches) // 4 * (2 * 128 * 128 + 2 * 128 * 24)
    return blocks, merger


def roles(model: ModelConfig) -> dict[str, RoleModel]:
    base = RoleModel(None, model.base)
    return {"policy": RoleModel(None, model), "generator": RoleModel(None, model), "reference": base}


@pytest.mark.parametrize("images", [IMAGES, IMAGES[:1], []])
def test_every_product_of_a_tower_is_counted(images):
    assert tower_flops(SEEING, images) == plain_count(images)
    text = forward_flops(SEEING, 40, [5, 2], 3)
    assert forward_flops(SEEING, 40, [5, 2], 3, images) == text + sum(plain_count(images))


@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", "merger")])
def test_a_tower_that_stays_counts_what_it_has_computed(frozen):
    """In no phase; the other ones count every image in every phase."""
    model = SEEING.model_copy(update={"frozen": frozen})
    stays = len(frozen) == 2
    seconds = {"gen": 0.5, "ref": 0.25, "update_actor": 2.0, "step": 4.0}
    metrics = MetricSet()
    utilization = Utilization(roles(model), ceiling=1e9, iterations=1)
    utilization.add(metrics, seconds, GROUPS, GROUPS, {"step": 7e6} if stays else {})
    groups = [group._replace(images=()) for group in GROUPS] if stays else GROUPS
    counted = phase_flops(roles(model), groups, 1)
    values = metrics.results()
    assert values["perf/mfu/rollout"] == pytest.approx(counted["gen"] / 0.5e9)
    every = counted["gen"] + counted["ref"] + counted["update_actor"]
    assert values["perf/mfu"] == pytest.approx((every + 7e6 * stays) / 4e9)


def test_a_model_of_text_has_no_tower():
    assert forward_flops(ModelConfig(**TEXT), 40, [5], 1, IMAGES) == forward_flops(ModelConfig(**TEXT), 40, [5])


ADAPTER = Adapter(4, 8)


@pytest.mark.parametrize(
    ("frozen", "adapter", "text", "blocks", "merger"),
    [
        ((), None, 3, 3, 3),
        (("vision",), None, 3, 1, 2 + 1),
        (("merger",), None, 3, 3, 2),
        (("vision", "merger"), None, 3, 1, 1),
        (("text",), None, 2, 3, 3),
        ((), ADAPTER, 2, 1, 1),
        ((), Adapter(4, 8, target_modules=("qkv",)), 2, 2, 2),
        ((), Adapter(4, 8, target_modules=("merger.mlp.0",)), 2, 1, 2),
    ],
)
def test_an_update_goes_back_as_far_as_something_trains(frozen, adapter, text, blocks, merger):
    model = SEEING.model_copy(update={"frozen": frozen, "adapter": adapter})
    found = phase_flops(roles(model), GROUPS, 2)
    of_blocks, of_merger = plain_count(IMAGES)
    of_text = sum(forward_flops(SEEING, *group[:3]) for group in GROUPS)
    assert found["gen"] == found["ref"] == of_text + of_blocks + of_merger
    assert found["update_actor"] == 2 * (text * of_text + blocks * of_blocks + merger * of_merger)
