"""FLOPs against a count made by walking over every product of a plain transformer, position by position."""

import pytest

from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings
from mindrlhf.metrics.flops import GroupLengths, Utilization, forward_flops, phase_flops
from mindrlhf.metrics.metric_set import MetricSet, reduce
from mindrlhf.model_roles import RoleModel

MODEL = ModelConfig(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6
)


def product(rows: int, inner: int, columns: int) -> int:
    """A multiplication and an addition for each of the terms."""
    return 2 * rows * inner * columns


def plain_count(model: ModelConfig, prompt: int, responses: list[int]) -> int:
    total = 0
    for row, length in enumerate([prompt, *responses]):
        for position in range(length):
            seen = position + 1 + (prompt if row else 0)
            for _ in range(model.num_layers):
                total += product(1, model.hidden_size, model.num_heads * model.head_dim)  # query
                total += 2 * product(1, model.hidden_size, model.num_kv_heads * model.head_dim)  # key, value
                for _ in range(model.num_heads):
                    total += product(1, model.head_dim, seen) + product(1, seen, model.head_dim)
                total += product(1, model.num_heads * model.head_dim, model.hidden_size)
                total += 3 * product(1, model.hidden_size, model.intermediate_size)  # gate, up, down
            if row:
                total += product(1, model.hidden_size, 1 if model.value_head else model.vocab_size)
    return total


@pytest.mark.parametrize("model", [MODEL, MODEL.as_critic()])
def test_a_forward_pass(model):
    for prompt, responses in ((5, [3, 1, 7]), (1, [1]), (4, [0, 2])):
        assert forward_flops(model, prompt, responses) == plain_count(model, prompt, responses)


def roles(policy: ModelConfig) -> dict[str, RoleModel]:
    critic = {"critic": RoleModel(None, policy.as_critic())}
    return dict.fromkeys(("policy", "generator", "reference"), RoleModel(None, policy)) | critic


def test_adapters_leave_out_the_gradients_of_weights():
    adapted = MODEL.model_copy(update={"adapter": Adapter(2, 4)})
    plain, found = (phase_flops(roles(model), [GroupLengths(5, [3, 1])], 2) for model in (MODEL, adapted))
    assert found == plain | {"update_actor": plain["update_actor"] * 2 / 3}


def test_the_models_of_a_role_add_up_and_a_verdict_follows_each_response():
    reward = MODEL.as_critic().model_copy(update={"num_layers": 2})
    judge = MODEL.model_copy(update={"hidden_size": 12})
    verdicts = JudgeSettings(path="judge", verdict="generated", max_new_tokens=4)
    models = {
        "reward_model.0": RoleModel("judge", judge, settings=verdicts),
        "reward_model.1": RoleModel("classifier", reward, settings=RewardModelSettings(path="classifier")),
    }
    found = phase_flops(roles(MODEL) | models, [GroupLengths(5, [3, 1]), GroupLengths(2, [6], 2)], 2)
    classified = plain_count(reward, 5, [3, 1]) + plain_count(reward, 2, [6, 6])
    written = [plain_count(judge, read, [4]) for read in (5 + 3, 5 + 1, 2 + 6, 2 + 6)]
    assert found.pop("reward_model") == classified + sum(written)
    assert found == phase_flops(roles(MODEL), [GroupLengths(5, [3, 1]), GroupLengths(2, [6], 2)], 2)


def test_operations_that_a_rank_has_counted_are_part_of_the_step():
    utilization = Utilization(roles(MODEL), ceiling=1e6, iterations=1)
    scoring, elsewhere = MetricSet(), MetricSet()
    counted = {"reward_model": 5e5}
    utilization.add(scoring, {"reward_model": 0.1, "step": 2.0}, [], [], counted)
    utilization.add(elsewhere, {"step": 2.0}, [], [], {"reward_model": 0.0})
    assert scoring.results() == {"perf/mfu": 0.25}
    assert elsewhere.results() == {"perf/mfu": 0.0}


def test_a_step_of_two_ranks():
    utilization = Utilization(roles(MODEL), ceiling=1e6, iterations=2)
    seconds = {"gen": 0.5, "ref": 0.25, "reward": 9.0, "update_actor": 2.0, "step": 4.0}
    ranks = []
    for groups in ([GroupLengths(5, [3, 1])], [GroupLengths(4, [2, 6])]):
        metrics = MetricSet()
        utilization.add(metrics, seconds, groups, groups)
        ranks.append(metrics)
    values = reduce(ranks[0], lambda own: [own, ranks[1]]).results()
    forward = plain_count(MODEL, 5, [3, 1]) + plain_count(MODEL, 4, [2, 6])
    assert values["perf/mfu/rollout"] == pytest.approx(forward / (2 * 0.5 * 1e6))
    assert values["perf/mfu/actor"] == pytest.approx(2 * 3 * forward / (2 * 2.0 * 1e6))
    assert values["perf/mfu"] == pytest.approx((1 + 1 + 6) * forward / (2 * 4.0 * 1e6))
    assert "perf/mfu/critic" not in values
    idle = MetricSet()
    utilization.add(idle, seconds, [], [])
    together = reduce(ranks[0], lambda own: [own, idle]).results()
    alone = 8 * plain_count(MODEL, 5, [3, 1])
    assert together["perf/mfu"] == pytest.approx(alone / (2 * 4.0 * 1e6)), "idle ranks count"


def test_a_rank_that_built_a_graph_counts_in_the_whole_step_alone():
    """The graph's first run, which is inside `compile`, is missing from the seconds of its phase."""
    utilization = Utilization(roles(MODEL), ceiling=1e6, iterations=1)
    building, running = MetricSet(), MetricSet()
    utilization.add(
        building, {"gen": 1e-6, "compile": 3.0, "step": 4.0}, [GroupLengths(5, [3])], [GroupLengths(5, [3])]
    )
    utilization.add(running, {"gen": 1.0, "compile": 0.0, "step": 4.0}, [GroupLengths(5, [3])], [GroupLengths(5, [3])])
    assert building.results().keys() == {"perf/mfu"}
    values = reduce(building, lambda own: [own, running]).results()
    forward = plain_count(MODEL, 5, [3])
    assert values["perf/mfu/rollout"] == pytest.approx(forward / (1.0 * 1e6))
    assert values["perf/mfu"] == pytest.approx(2 * forward / (2 * 4.0 * 1e6))


def test_the_critic_has_its_own_head():
    utilization = Utilization(roles(MODEL), ceiling=1e6, iterations=1)
    metrics = MetricSet()
    utilization.add(
        metrics, {"values": 1.0, "update_critic": 1.0, "step": 2.0}, [GroupLengths(5, [3])], [GroupLengths(5, [3])]
    )
    critic = plain_count(MODEL.as_critic(), 5, [3])
    assert metrics.results()["perf/mfu/critic"] == pytest.approx(3 * critic / 1e6)
    assert metrics.results()["perf/mfu"] == pytest.approx(4 * critic / 2e6)


def test_no_share_is_above_one():
    """The ceiling was measured on a busy machine: it follows the fastest phase seen, for the steps after it too."""
    utilization = Utilization(roles(MODEL), ceiling=1e6, iterations=1)
    others = {"perf/throughput": 9.0}
    assert utilization.within_ceiling({"perf/mfu": 0.5, **others}) == {"perf/mfu": 0.5, **others}
    fast = utilization.within_ceiling({"perf/mfu": 0.5, "perf/mfu/rollout": 1.25, **others})
    assert fast == {"perf/mfu": 0.4, "perf/mfu/rollout": 1.0, **others}
    assert utilization.within_ceiling({"perf/mfu": 0.5}) == {"perf/mfu": 0.4}


def test_what_an_earlier_step_generated_is_not_counted_again():
    utilization, metrics = Utilization(roles(MODEL), ceiling=1e6, iterations=1), MetricSet()
    seconds = {"gen": 1.0, "update_actor": 1.0, "step": 2.0}
    utilization.add(metrics, seconds, [GroupLengths(5, [3]), GroupLengths(4, [2, 6])], [GroupLengths(5, [3])])
    new, kept = plain_count(MODEL, 5, [3]), plain_count(MODEL, 4, [2, 6])
    assert metrics.results()["perf/mfu/rollout"] == pytest.approx(new / 1e6)
    assert metrics.results()["perf/mfu/actor"] == pytest.approx(3 * (new + kept) / 1e6)
