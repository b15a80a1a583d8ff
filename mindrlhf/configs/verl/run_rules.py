"""Translation of verl's run keys: data, validation, rewards, checkpoints, models, metrics.

A rule reads keys, sets ours with `Result.put`, naming the keys that they follow from, and refuses unsupported ones.
"""

import os
import shlex
from pathlib import Path
from typing import Any, get_args

from mindrlhf.configs.tracking import Logger
from mindrlhf.configs.verl.result import Keys, Result

LOGGERS = {"file": "jsonl"}
TRUNCATIONS = ("error", "left", "right")
DATASET = ".mindrecord"


def _data(keys: Keys, result: Result) -> None:
    truncation = keys("data.truncation")
    if keys("data.filter_overlong_prompts") is True:
        truncation = "drop"
    elif truncation not in TRUNCATIONS:
        result.refused["data.truncation"] = f"`mindrlhf data` has --truncation {', '.join(TRUNCATIONS)} and drop"
    options = f"--max_prompt_length {keys('data.max_prompt_length')} --truncation {truncation}"
    if keys.first("data.prompt_key") and keys("data.prompt_key") != "prompt":
        options += f" --fields prompt={keys('data.prompt_key')}"
    for theirs in ("data.train_files", "data.val_files"):
        value = keys(theirs)
        if not value:
            continue
        files = [os.path.expanduser(str(name)) for name in (value if isinstance(value, list) else [value])]
        dataset = _dataset(files)
        if theirs == "data.train_files":
            result.flag("mind_dataset_dir", dataset, theirs)
        else:
            result.put("data.val_dataset", dataset, theirs)
        if files != [dataset]:
            tokenizer = os.path.expanduser(str(keys("model.path") or "MODEL"))
            result.commands.append(
                f"mindrlhf data --file_path {shlex.join(files)} --dataset_type verl --output_path "
                f"{shlex.quote(dataset)} --tokenizer_path {shlex.quote(tokenizer)} {options}"
            )
    for name in ("max_prompt_length", "truncation", "filter_overlong_prompts", "prompt_key"):
        result.elsewhere[f"data.{name}"] = f"{options} of `mindrlhf data`"


def _dataset(files: list[str]) -> str:
    """Name the MindRecord for files of problems: same folder, same name."""
    stems = list(dict.fromkeys(Path(name).stem for name in files))
    folder = (
        Path(files[0]).parent if len(files) == 1 else Path(os.path.commonpath([Path(name).parent for name in files]))
    )
    return str(folder / f"{'_'.join(stems)}{DATASET}")


def _validation(keys: Keys, result: Result) -> None:
    group = "rollout.val_kwargs"
    result.copy("validation.num_generations", f"{group}.n")
    sampled = keys.among(f"{group}.do_sample")
    if keys(f"{group}.do_sample") is False:
        result.put("validation.temperature", 0.0, *sampled)
    elif keys.first(f"{group}.temperature"):
        temperature = float(keys.number(f"{group}.temperature"))
        result.put("validation.temperature", temperature, f"{group}.temperature", *sampled)
    result.copy("validation.top_k", f"{group}.top_k", lambda k: max(0, k))
    result.copy("validation.top_p", f"{group}.top_p", float)
    if keys.given.get("data.val_max_samples") is not None:
        result.put("validation.limit", keys.positive("data.val_max_samples"), "data.val_max_samples")


def _reward(keys: Keys, result: Result) -> None:
    for buffer in (
        "reward_model.overlong_buffer",
        "custom_reward_function.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ):
        if keys(f"{buffer}.enable") is True:
            factor = keys(f"{buffer}.penalty_factor")
            used = keys.among(f"{buffer}.penalty_factor")
            result.put("reward.overlong_factor", float(1.0 if factor is None else factor), f"{buffer}.enable", *used)
            result.copy("reward.overlong_buffer", f"{buffer}.len")
        if keys.among(f"{buffer}.log"):
            result.needless[f"{buffer}.log"] = "the punishment is always a metric of its own"
    workers = keys.first("reward.num_workers", "reward_model.num_workers")
    if workers:
        result.copy("reward.workers", workers)
    for group in ("reward.custom_reward_function", "custom_reward_function"):
        path = keys.first(f"{group}.path")
        if path:
            name = keys(f"{group}.name") or "compute_score"
            function: dict[str, Any] = {"name": f"{os.path.expanduser(str(keys(path)))}:{name}"}
            args = keys.below(f"{group}.reward_kwargs")
            if args:
                function["args"] = {arg.removeprefix(f"{group}.reward_kwargs."): keys(arg) for arg in args}
            result.put("reward.functions", [function], path, *keys.among(f"{group}.name"), *args)
            return
    result.sources.append(("reward.functions", "as set here; verl has a rule of its own for each data_source"))


def _memory(keys: Keys, result: Result) -> None:
    names = [
        name
        for name in keys.below("actor")
        if name.endswith((".param_offload", ".optimizer_offload")) and isinstance(keys(name), bool)
    ]
    if names:
        result.put("memory.swap", any(keys(name) for name in names), *names)


def _trainer(keys: Keys, result: Result) -> None:
    if keys.given.get("trainer.total_training_steps") is not None:
        result.put("trainer.total_steps", keys.positive("trainer.total_training_steps"), "trainer.total_training_steps")
    result.copy("trainer.epochs", "trainer.total_epochs")
    if keys.first("trainer.logger"):
        given = keys("trainer.logger")
        names = {LOGGERS.get(name, name) for name in ([given] if isinstance(given, str) else given)}
        ours = [name for name in get_args(Logger) if name in {"console", "jsonl", *names}]
        result.put("trainer.loggers", ours, "trainer.logger")
        missing = sorted(names - set(ours))
        if missing:
            ours, theirs = result.sources.pop()
            result.sources.append((ours, f"{theirs} (not here: {', '.join(missing)}; jsonl has the same metrics)"))
    for name in keys.among("trainer.project_name", "trainer.experiment_name"):
        result.copy(name, name, str)
    if keys("trainer.rollout_data_dir"):
        result.put("trainer.save_rollouts", True, "trainer.rollout_data_dir")
    if "trainer.test_freq" in keys.given:
        result.put("trainer.test_freq", keys.positive("trainer.test_freq"), "trainer.test_freq")
    for name in keys.among("trainer.val_before_train", "trainer.val_only"):
        result.copy(name, name, bool)


def _checkpoints(keys: Keys, result: Result) -> None:
    frequency = keys.positive("trainer.save_freq")
    if "trainer.save_freq" in keys.given:
        result.put("trainer.save_freq", frequency, "trainer.save_freq")
    if frequency or "trainer.max_actor_ckpt_to_keep" in keys.given:
        kept = keys.positive("trainer.max_actor_ckpt_to_keep")
        result.put("trainer.save_max_ckpt_num", kept, "trainer.max_actor_ckpt_to_keep")
    result.copy("trainer.async_save", "actor.checkpoint.async_save")
    mode = keys("trainer.resume_mode")
    result.put("trainer.resume_mode", mode, "trainer.resume_mode")
    if mode == "resume_path":
        result.copy("trainer.resume_from_path", "trainer.resume_from_path", lambda path: os.path.expanduser(str(path)))
    result.copy_flag("save_ckpt_dir", "trainer.default_local_dir")


def _models(keys: Keys, result: Result) -> None:
    result.copy_flag("load_sft_checkpoint_infer", "model.path")
    result.copy_flag("load_ref_checkpoint", "ref.model.path")
    tokenizer = keys.first("data.tokenizer", "model.tokenizer_path")
    if tokenizer:
        result.copy_flag("tokenizer_path", tokenizer)


RULES = (_data, _validation, _reward, _memory, _trainer, _checkpoints, _models)
