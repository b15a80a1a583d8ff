"""Reward functions, their registry, and the processes that run them; nothing knows of MindSpore.

The names of a reward function's parameters choose its form. Three are called once for each sample, TRL's once for all:

    def my_reward(prompt, completion, fields, **args): return 1.0 if fields["ground_truth"] in completion else 0.0
    def my_reward(completion, ground_truth, **args): return float(ground_truth in completion)
    def compute_score(data_source, solution_str, ground_truth, extra_info, **args): ...  # verl's
    def my_reward(prompts, completions, **columns): return [float(len(text)) for text in completions]  # see `batches`

prompt, completion: text without special tokens. args: the keyword arguments under `args` in the settings.
fields: read-only mapping of text to text: the task fields of the dataset row (`task`, `question`, `ground_truth`, ...)
and, from the trainer, `response_length` and `max_new_tokens` (tokens, as decimal text). verl's `data_source` and
`extra_info`, which is JSON there, come from the fields of those names.
It returns a finite number; or a dict with that number under `score` and further numbers, which are logged as
components; or None to abstain; for a batch a list of these. It may be `async`. The settings name it as a shipped
function (`registry.SHIPPED`), `package.module:function`, or `path/file.py:function`. It may keep state in its module,
which lives as long as its process does. Its printed output is dropped.
"""
