"""The reward that verl takes for a data source."""

import pytest

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.errors import UserError
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rewards.verl import verl
from mindrlhf.types import Prompt


@pytest.mark.parametrize(
    ("source", "completion", "truth", "score"),
    [
        ("openai/gsm8k", "#### 72 clips", "72", 1.0),
        ("openai/gsm8k", r"\boxed{72}", "72", 0.0),
        ("lighteval/MATH", r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{2}", "3", 0.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{3}", "3", 1.0),
        ("numina_olympiads", r"\boxed{3}", "3", 1.0),
        ("math_dapo", "Answer: 3", "3", {"score": 1.0, "acc": 1.0}),
        ("aime2024", r"\boxed{4}", "3", {"score": -1.0, "acc": 0.0}),
    ],
)
def test_sources(source, completion, truth, score):
    assert verl("", completion, {"data_source": source, "ground_truth": truth, "task": "verl"}) == score


def test_a_row_of_gsm8k_needs_no_source():
    assert verl("", "#### 72 clips", {"task": "gsm8k", "ground_truth": "72"}) == 1.0
    assert verl("", "72 clips", {"task": "gsm8k", "ground_truth": "72"}) == 0.0


@pytest.mark.parametrize("source", ["codecontests", "hiyouga/geometry3k", "searchR1_nq", "mine", ""])
def test_other_sources_are_refused_by_name(source):
    with pytest.raises(
        ValueError, match=f"data_source '{source}' is not done here; name a function in reward.functions"
    ):
        verl("", "72", {"data_source": source, "ground_truth": "72"})


def test_all_rows_are_looked_at_before_a_run():
    settings = RewardSettings(functions=[{"name": "verl"}], workers=1)
    rows = [{"data_source": source, "ground_truth": "1", "task": "verl"} for source in ("openai/gsm8k", "apps")]
    prompts = [Prompt(place, (1, 2), row) for place, row in enumerate(rows)]
    with RewardRunner(settings) as rewards:
        rewards.check_ground_truths(prompts[:1], "x.parquet")
        with pytest.raises(UserError, match=r"^x.parquet: verl's reward for the data_source 'apps' is not done here"):
            rewards.check_ground_truths(prompts, "x.parquet")
