"""Reward functions, their registry, and the processes that run them, without MindSpore.

The parameters' names choose a reward function's form. Three forms are called once per sample, TRL's form once for all:

    def my_reward(prompt, completion, fields, **args): return 1.0 if fields["ground_truth"] in completion else 0.0
    def my_reward(completion, ground_truth, **args): return float(ground_truth in completion)
    def compute_score(data_source, solution_str, ground_truth, extra_info, **args): ...  # verl's
    def my_reward(prompts, completions, **columns): return [float(len(text)) for text in completions]  # see `batches`

prompt, completion: text without special tokens. args: the keyword arguments under `args` in the settings.
fields: read-only mapping of text to text: the task fields of the dataset row (`task`, `question`, `ground_truth`, ...)
and, from the trainer, `response_length` and `max_new_tokens` (tokens, as decimal text). verl's `data_source` and
`extra_info` (stored as JSON) come from the fields of the same names.
It returns a finite number; or a dict with that number under `score` and further numbers, logged as components; or None
to abstain. For a batch it returns a list of these. It may be `async`. Settings name it as a shipped function
(`registry.SHIPPED`), `package.module:function`, or `path/file.py:function`. It may keep state in its module, which
lives as long as its process does. Its printed output is dropped.
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
