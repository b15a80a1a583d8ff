"""The reward that says what is right, where a command names none."""

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.evaluation.evaluator import reward_of
from mindrlhf.types import Prompt


def named(*rows):
    return reward_of([Prompt(i, np.array([1]), row) for i, row in enumerate(rows)], "rows.parquet", "give --reward")


def test_rows_of_verl_have_the_reward_of_their_data_source():
    gsm8k = {"task": "verl", "data_source": "openai/gsm8k"}
    assert named(gsm8k, gsm8k) == "gsm8k_strict"
    assert named({"task": "verl", "data_source": "lighteval/MATH"}) == "math"
    assert named(gsm8k, {"task": "verl", "data_source": "lighteval/MATH"}) == "math"
    assert named({"task": "verl", "data_source": "countdown"}) == "math"


def test_our_own_rows_have_the_reward_of_their_task():
    assert named({"task": "gsm8k"}) == "gsm8k"
    assert named({"task": "countdown", "data_source": "openai/gsm8k"}) == "countdown"
    with pytest.raises(UserError, match="give --reward"):
        named({"task": "poems"})
