"""Reward for `split.py` that waits for a judge as long as a server would take."""

import os
import time

from digit_reward import digits

CALLS, SECONDS = "JUDGE_CALLS", "JUDGE_SECONDS"


def judged(prompts, completions, ground_truth):
    """Return rewards of a batch after calls one behind the other, each for all of it."""
    time.sleep(int(os.environ[CALLS]) * float(os.environ[SECONDS]))
    rows = zip(prompts, completions, ground_truth, strict=True)
    return [digits(prompt, completion, {"ground_truth": right}) for prompt, completion, right in rows]
