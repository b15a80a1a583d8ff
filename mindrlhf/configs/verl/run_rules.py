"""Rules for verl's run keys: data, validation, rewards, metrics, checkpoints."""

import os
import shlex
from pathlib import Path
from typing import Any, get_args

from mindrlhf.configs.tracking import Logger
from mindrlhf.configs.verl.command import Keys
from mindrlhf.configs.verl.result import Translation

LOGGERS = {"file": "jsonl"}
TRUNCATIONS = ("error", "left", "right")
DATASET = ".mindrecord"


def _data(keys: Keys, result: Translation) -> None:
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
    names = ("max_prompt_length", "truncation", "filter_overlong_prompts", "prompt_key")
    result.judge("elsewhere", f"{options} of `mindrlhf data`", *(f"data.{name}" for name in names))


def _dataset(files: list[str]) -> str:
    """Name the MindRecord for files of problems: same folder, same name."""
    stems = list(dict.fromkeys(Path(name).stem for name in files))
    folder = os.path.commonpath([Path(name).parent for name in files])
    return str(Path(folder, f"{'_'.join(stems)}{DATASET}"))


def _validation(keys: Keys, result: Translation) -> None:
    group = "rollout.val_kwargs"
    sampled = keys.among(f"{group}.do_sample")
    if keys(f"{group}.do_sample") is False:
        result.put("validation.temperature", 0.0, *sampled)
    elif keys.first(f"{group}.temperature"):
        result.put("validation.temperature", keys(f"{group}.temperature"), f"{group}.temperature", *sampled)
    if keys.among(f"{group}.top_k"):
        result.put("validation.top_k", keys.positive(f"{group}.top_k") or 0, f"{group}.top_k")


def _reward(keys: Keys, result: Translation) -> None:
    for buffer in (
        "reward_model.overlong_buffer",
        "custom_reward_function.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ):
        if keys(f"{buffer}.enable") is True:
            factor = keys(f"{buffer}.penalty_factor")
            used = keys.among(f"{buffer}.penalty_factor")
            result.put("reward.overlong_factor", 1.0 if factor is None else factor, f"{buffer}.enable", *used)
            result.copy("reward.overlong_buffer", f"{buffer}.len")
        result.judge("needless", "the punishment is always a metric of its own", f"{buffer}.log")
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


def _memory(keys: Keys, result: Translation) -> None:
    names = [
        name
        for name in keys.below("actor")
        if name.endswith((".param_offload", ".optimizer_offload")) and isinstance(keys(name), bool)
    ]
    if names:
        result.put("memory.swap", any(keys(name) for name in names), *names)


def _trainer(keys: Keys, result: Translation) -> None:
    if keys.first("trainer.logger"):
        given = keys("trainer.logger")
        names = {LOGGERS.get(name, name) for name in ([given] if isinstance(given, str) else given)}
        ours = [name for name in get_args(Logger) if name in {"console", "jsonl", *names}]
        result.put("trainer.loggers", ours, "trainer.logger")
        missing = sorted(names - set(ours))
        if missing:
            ours, theirs = result.sources.pop()
            result.sources.append((ours, f"{theirs} (not here: {', '.join(missing)}; jsonl has the same metrics)"))
    for name in ("trainer.project_name", "trainer.experiment_name"):
        result.copy(name, name, str)
    if keys("trainer.rollout_data_dir"):
        result.put("trainer.save_rollouts", True, "trainer.rollout_data_dir")


def _checkpoints(keys: Keys, result: Translation) -> None:
    kept = "trainer.max_actor_ckpt_to_keep"
    if keys.positive("trainer.save_freq") or kept in keys.given:
        result.put("trainer.save_max_ckpt_num", keys.positive(kept), kept)
    if keys("trainer.resume_mode") == "resume_path":
        result.copy("trainer.resume_from_path", "trainer.resume_from_path", lambda path: os.path.expanduser(str(path)))


RULES = (_data, _validation, _reward, _memory, _trainer, _checkpoints)
