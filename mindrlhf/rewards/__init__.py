"""Reward functions, their registry, and the processes that run them, without MindSpore.

A reward function is called by the names of its parameters, in any order:

    def my_reward(prompt, completion, fields, **args): return 1.0 if fields["ground_truth"] in completion else 0.0
    def my_reward(completion, ground_truth): return float(ground_truth in completion)
    def compute_score(data_source, solution_str, ground_truth, extra_info): ...  # verl's
    def my_reward(prompts, completions, **columns): return [float(len(text)) for text in completions]  # TRL's
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...  # verl's for a batch

A name of `batches.TRL_BATCH` or `VERL_BATCH` makes it a batch function, called once for all samples. Other parameters
have defaults, or come from `args` in the settings; a function that takes none of the known names is refused.

prompt, completion: text without special tokens. fields: read-only mapping with the columns of the dataset row (`task`,
`question`, `ground_truth`, ...), each with its type, and from the trainer `response_length` and `max_new_tokens`
(tokens, as decimal text). Shipped functions read the stored text of columns. verl's `data_source` and `extra_info` come
from the columns of the same names.
It returns a finite number; or a dict with that number under `score`, further numbers, logged as
`reward_extra/<function>/<name>`, and further texts, which go to the records; or None to abstain. For a batch it returns
a list of these. It may be `async`. Settings name it as a shipped function (`registry.SHIPPED`),
`package.module:function`, or `path/file.py:function`. It may keep state in its module, which lives as long as its
process does. Its printed output is dropped.
"""

from typing import Any

# Functions of TRL's module of rewards -> ours.
_TRL = {
    "accuracy_reward": "the shipped reward 'math', which reads the ground truth of a row",
    "reasoning_accuracy_reward": "the shipped reward 'math', which does not read answers inside of thoughts",
    "think_format_reward": "the shipped reward 'format'",
    "get_soft_overlong_punishment": "the settings reward={'overlong_factor': 1.0, 'overlong_buffer': ...}",
}


def __getattr__(name: str) -> Any:
    if name in _TRL:
        found = f"mindrlhf.rewards has no {name}: in its place is {_TRL[name]}"
        raise ImportError(f"{found}; where TRL is installed, its own function is a reward function here too.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
