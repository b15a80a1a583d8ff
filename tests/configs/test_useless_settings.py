"""Settings that a run could do nothing with are refused where they are read."""

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.stop_strings=['']", "stop_strings.0 is '', and must be text, not empty"),
        (
            "validation.stop_strings=['a','']",
            r"stop_strings is \['a', ''\], and must be a list \(each entry text, not empty\)",
        ),
        ("reward.functions=[]", "reward.functions is .*, not empty"),
        ("reward.workers=100000", "reward.workers is 100000, and must be .* at most 1024"),
        (f"seed={2**64}", f"seed is {2**64}, and must be .* at most {2**62}"),
    ],
)
def test_useless_settings(override, message):
    with pytest.raises(UserError, match=message):
        load_grpo_config(None, [override])
