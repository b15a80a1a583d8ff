"""Reward functions, their registry, and the processes that run them.

This room knows nothing of MindSpore. A reward function is called once for each sample:

    def my_reward(prompt, completion, fields, **args):
        return 1.0 if fields["ground_truth"] in completion else 0.0

prompt, completion: text without special tokens.
fields: read-only mapping of text to text: the task fields of the dataset row (`task`, `question`, `ground_truth`, ...)
    and, from the trainer, `response_length` and `max_new_tokens` (tokens, as decimal text).
args: the keyword arguments under `args` in the settings.
It returns a finite number; or a dict with that number under `score` and further numbers, which are logged as
components; or None to abstain.

A function whose first two parameters are called `completion` and `ground_truth` is called with just these two
(and args): the shortest reward is `def my_reward(completion, ground_truth): return float(ground_truth in completion)`.

So is verl's form, `compute_score(data_source, solution_str, ground_truth, extra_info)`: the text of `data_source` and
the JSON of `extra_info` come from the fields of those names, which verl's parquet columns become.

The settings name it as a shipped function (`registry.SHIPPED`), `package.module:function`, or `path/file.py:function`.
It may keep state in its module, which lives as long as its process does. Its printed output is dropped.
"""
