"""verl's optimizers of eight bits."""

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.migration.verl.translation import translate

PAGED = "critic.optim.optimizer=PagedAdamW8bit critic.optim.optimizer_impl=bitsandbytes.optim"


@pytest.mark.parametrize(
    ("command", "actor", "critic"),
    [
        ("actor.optim.optimizer=AdamW8bit actor.optim.optimizer_impl=torchao.optim", "int8", "float32"),
        (PAGED, "float32", "int8"),
        ("actor.optim.optimizer=AdamW", "float32", "float32"),
    ],
)
def test_optimizers_of_eight_bits_have_such_moments(command, actor, critic):
    config = load_grpo_config(None, translate(command).overrides)
    assert (config.optimizer.state, config.critic.optimizer.state) == (actor, critic)
