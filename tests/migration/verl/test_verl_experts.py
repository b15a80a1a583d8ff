"""verl's replay of experts' routing as a setting."""

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.migration.verl.translation import translate


@pytest.mark.parametrize("engine", ["", "megatron.", "veomni."])
@pytest.mark.parametrize(("theirs", "ours"), [("disabled", "off"), ("R2", "old"), ("R3", "rollout")])
def test_routing_of_experts(engine, theirs, ours):
    mode = f"actor_rollout_ref.actor.{engine}router_replay.mode={theirs}"
    command = f"algorithm.adv_estimator=grpo {mode} actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    translation = translate(command)
    translation.check()
    assert load_grpo_config(overrides=translation.overrides).rollout.routing_replay == ours
    assert "rollout.enable_rollout_routing_replay" in translation.needless


def test_routing_of_experts_in_files_is_not_done():
    key = "actor_rollout_ref.actor.router_replay.record_file=routing.pt"
    with pytest.raises(UserError, match=r"not done here: actor\.router_replay\.record_file=routing\.pt"):
        translate(f"algorithm.adv_estimator=grpo {key}").check()
    with pytest.raises(UserError, match=r"router_replay\.mode=R1 \(it is one of disabled, R2, R3\)"):
        translate("algorithm.adv_estimator=grpo actor_rollout_ref.actor.router_replay.mode=R1").check()
