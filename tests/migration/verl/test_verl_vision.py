"""verl's frozen vision tower as a setting."""

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.migration.verl.translation import translate


@pytest.mark.parametrize(("theirs", "ours"), [(True, ("vision", "merger")), (False, ())])
def test_a_frozen_tower(theirs, ours):
    translation = translate(f"algorithm.adv_estimator=grpo actor_rollout_ref.actor.freeze_vision_tower={theirs}")
    translation.check()
    assert load_grpo_config(overrides=translation.overrides).train.freeze == ours
    assert ("actor.freeze_vision_tower" in translation.needless) == (not theirs)
