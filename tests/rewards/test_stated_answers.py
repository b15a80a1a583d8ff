"""Where the answer of a completion stands: boxes, marks, headings, tags and thoughts."""

import pytest

from mindrlhf.rewards.answers import after_thinking, stated
from mindrlhf.rewards.countdown import countdown
from mindrlhf.rewards.gsm8k import gsm8k, gsm8k_strict
from mindrlhf.rewards.knights_and_knaves import knights_and_knaves
from mindrlhf.rewards.math import math

BOTH = pytest.mark.parametrize("reward", [gsm8k, math])


@BOTH
@pytest.mark.parametrize(
    "completion",
    [
        "9 * 2 = 18\n\nThe final answer is \\boxed{18}.",
        "#### Step 1: count the eggs\n9 * 2 = 18\n\nThe final answer is \\boxed{18}.",
        "<think>\nsimple\n</think>\n#### Solution\n9 * 2 = 18\n\n<answer>18</answer>",
        "#### Solution\n9 * 2 = 18\n\n#### Answer\n\\boxed{18}",
        "\\boxed{18}\n\n#### Check\n9 * 2 = 18, and 20 - 2 = 18, not 19.",
        "\\boxed{18}\n\n#### 2. Check\nwith 9 hens",
        "##### Step 3: multiply\n\\boxed{18}",
        "#### **Step 1**\n\\boxed{18}\n\n#### Verified",
        "#### Step 1: count the eggs\n9 * 2 = 18",
        "\\boxed{17}\n\nNo:\n#### 18",
        "#### 17\nNo: \\boxed{18}",
        "#### Total = 18\nThat is all 9 hens.",
        "#### Answer: 18",
        "\\boxed{18}\n####",
    ],
)
def test_a_heading_hides_no_answer(completion, reward):
    assert reward("", completion, {"ground_truth": "18"}) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed  {73}", "73"),
        (r"\boxed 73 .", "73"),
        ("\\boxed{\n73\n}", "73"),
        (r"\boxed{\boxed{73}}", r"\boxed{73}"),
        (r"first \boxed{12}, then \fbox{73}", "73"),
        (r"\boxed{73}. Let me check: \boxed{", "73"),
        (r"\boxed{1 + \boxed{73}", "73"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ 5 \right.}", r"\left\{ 5 \right."),
        (r"\boxed{\frac{1}{2}} and {3}", r"\frac{1}{2}"),
        (r"\boxed{", None),
        ("}}}", None),
    ],
)
def test_boxes(completion, answer):
    assert stated("", completion) == answer


def test_boxes_take_linear_time():
    for piece in (r"\boxed{", "{", "}", "#### a", "#", r"\boxed ", "\\"):
        stated("", piece * 50_000)


THOUGHT = "<think>\nMaybe \\boxed{5}, #### 5, <answer>5</answer>. Wait, I have to check whether"


@pytest.mark.parametrize(
    ("prompt", "completion", "text"),
    [
        ("", THOUGHT, ""),
        ("Q\n<think>\n", THOUGHT.removeprefix("<think>"), ""),
        ("Q\n<think>", "5", ""),
        ("Q\n<think>\n", "5</think> 6", " 6"),
        ("Q\n<think>\n\n</think>\n\n", "6", "6"),
        ("think between <think> and </think>", "6", "6"),
        ("", "6 <think> 5", "6 "),
        ("", "<think>4</think> 6 <think> 5", " 6 "),
    ],
)
def test_an_unfinished_thought_is_left_out(prompt, completion, text):
    assert after_thinking(prompt, completion) == text


@pytest.mark.parametrize(("prompt", "completion"), [("", THOUGHT), ("Q\n<think>\n", THOUGHT.removeprefix("<think>\n"))])
def test_an_unfinished_thought_is_no_answer(prompt, completion):
    assert gsm8k(prompt, completion, {"ground_truth": "5"}) == 0.0
    assert math(prompt, completion, {"ground_truth": "5"}) == 0.0
    assert countdown(prompt, completion, {"ground_truth": '{"target": 5, "numbers": [5]}'}) == 0.0
    roles = {"ground_truth": "(1) Zoey is a knight"}
    assert knights_and_knaves(prompt, f"{completion} Zoey is a knight", roles)["score"] == 0.0
    assert gsm8k(prompt, f"{completion}</think> 5", {"ground_truth": "5"}) == 1.0


@pytest.mark.parametrize("reward", [math, gsm8k, gsm8k_strict])
def test_a_truth_of_bytes_is_no_wrong_answer(reward):
    with pytest.raises(ValueError, match="the ground truth b'18' is bytes, and should be text or a number"):
        reward("", "#### 18", {"ground_truth": b"18"})
    assert reward("", "#### 18", {"ground_truth": 18}) == 1.0
