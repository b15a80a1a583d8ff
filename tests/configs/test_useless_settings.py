"""Settings that a run could do nothing with are refused where they are read."""

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.stop_strings=['']", "stop_strings: an empty text"),
        ("validation.stop_strings=['a','']", "stop_strings: an empty text"),
        ("reward.functions=[]", "reward.functions: without a reward function"),
        ("reward.workers=100000", "reward.workers is 100000, and must be .* at most 1024"),
        (f"seed={2**64}", f"seed is {2**64}, and must be .* at most {2**62}"),
    ],
)
def test_useless_settings(override, message):
    with pytest.raises(UserError, match=message):
        load_grpo_config(None, [override])
