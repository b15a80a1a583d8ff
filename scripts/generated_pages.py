"""Hook of `mkdocs build` (mkdocs.yml) that generates pages and tables of the documentation from the package.

- `settings.md`: every setting with its type, default, range and meaning, from the typed settings.
- `commands.md`: every command with its flags, from the parsers.
- A line `<!-- table: NAME -->` in a page becomes a table: `verl`, the translation of verl's keys by `--from-verl`;
  `verl-elsewhere`, `verl-needless` and `verl-not-done`, its report on the other keys;
  `trl`, the names that our settings have in TRL.
"""

import argparse
import importlib
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mindrlhf import cli
from mindrlhf.configs.base import Settings, is_group
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ContextSettings, ParallelSettings, RecomputeSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.vision_settings import VisionSettings
from mindrlhf.migration.trl.names import flat_fields, trl_names
from mindrlhf.migration.verl.table import ELSEWHERE, NEEDLESS, NOT_DONE
from mindrlhf.migration.verl.translation import translate

YAML_GROUPS = {
    "model.model_config": ModelSettings,
    "model.model_config.vision_config": VisionSettings,
    "parallel_config": ParallelSettings,
    "recompute_config": RecomputeSettings,
    "context": ContextSettings,
}

# Around a table of settings or flags, which stylesheets/site.css shows differently on a narrow screen.
REFERENCE, END = ('<div class="reference" markdown>', ""), ("", "</div>")

# verl command lines that together reach every key that `--from-verl` reads (tests/docs/test_generated_pages.py).
VERL_COMMANDS = (
    "data.train_batch_size=64 data.seed=1 data.shuffle=True data.max_response_length=512 data.train_files=t.parquet "
    "data.max_prompt_length=512 data.truncation=error data.filter_overlong_prompts=True data.prompt_key=problem "
    "data.apply_chat_template_kwargs={enable_thinking:False} "
    "data.val_files=v.parquet data.val_max_samples=100 data.tokenizer=t actor.ppo_mini_batch_size=32 "
    "actor.ppo_epochs=1 actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=16384 actor.clip_ratio_low=0.2 "
    "actor.clip_ratio_high=0.28 actor.clip_ratio_c=3.0 actor.loss_agg_mode=token-mean actor.loss_scale_factor=512 "
    "actor.entropy_coeff=0.0 actor.use_kl_loss=True actor.kl_loss_coef=0.001 actor.kl_loss_type=low_var_kl "
    "actor.optim.lr=1e-6 actor.optim.lr_warmup_steps=10 actor.optim.warmup_style=cosine actor.optim.min_lr_ratio=0.1 "
    "actor.optim.clip_grad=1.0 actor.fsdp_config.param_offload=True actor.fsdp_config.optimizer_offload=True "
    "actor.checkpoint.async_save=True rollout.n=8 rollout.temperature=1.0 rollout.top_k=-1 rollout.top_p=1.0 "
    "rollout.repetition_penalty=1.0 rollout.max_num_seqs=64 rollout.val_kwargs.n=4 rollout.val_kwargs.temperature=0.6 "
    "rollout.val_kwargs.top_k=-1 rollout.val_kwargs.top_p=0.95 algorithm.adv_estimator=grpo "
    "algorithm.norm_adv_by_std_in_grpo=False algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
    "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=96 reward.num_workers=2 "
    "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.penalty_factor=1.0 "
    "reward_model.overlong_buffer.len=128 algorithm.rollout_correction.rollout_is=token "
    "algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.rollout_rs=token "
    "algorithm.rollout_correction.rollout_rs_threshold=2.0 algorithm.rollout_correction.rollout_rs_threshold_lower=0.5 "
    "trainer.total_training_steps=100 trainer.total_epochs=1 trainer.logger=[console] trainer.project_name=p "
    "trainer.experiment_name=e trainer.rollout_data_dir=d trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=5 "
    "trainer.test_freq=5 trainer.val_before_train=True trainer.val_only=False trainer.resume_mode=resume_path "
    "trainer.resume_from_path=p trainer.default_local_dir=c reward.custom_reward_function.path=f.py "
    "reward.custom_reward_function.name=g model.path=m ref.model.path=r",
    "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl data.gen_batch_size=1024 "
    "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.001 critic.model.path=c actor.clip_ratio=0.2 "
    "actor.use_token_level_loss=True rollout.do_sample=False rollout.response_length=512 "
    "rollout.val_kwargs.do_sample=False critic.optim.lr_warmup_steps_ratio=0.1 actor.optim.lr_warmup_steps_ratio=0.1 "
    "trainer.total_training_steps=100 actor.optim.lr_scheduler_type=cosine critic.optim.lr_decay_style=linear "
    "critic.optim.min_lr_ratio=0.1 actor.optim.min_lr=0 custom_reward_function.path=f.py custom_reward_function.name=g "
    "custom_reward_function.overlong_buffer.enable=True custom_reward_function.overlong_buffer.len=128 "
    "custom_reward_function.overlong_buffer.penalty_factor=1.0 actor.ppo_micro_batch_size_per_gpu=4 "
    "actor.tis_imp_ratio_cap=2 model.tokenizer_path=t reward_model.num_workers=2",
    "algorithm.adv_estimator=gdpo actor.policy_loss.loss_mode=sapo actor.tau_pos=1.0 actor.tau_neg=1.05 "
    "actor.router_replay.mode=R2 actor.freeze_vision_tower=True "
    "actor.ppo_micro_batch_size=64 reward.reward_kwargs.overlong_buffer_cfg.enable=True "
    "reward.reward_kwargs.overlong_buffer_cfg.len=128 actor.optim.grad_clip=1.0 "
    "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=2.0",
    "algorithm.adv_estimator=grpo actor.policy_loss.loss_mode=clip_cov actor.policy_loss.clip_cov_ratio=2e-4 "
    "actor.policy_loss.clip_cov_lb=1 actor.policy_loss.clip_cov_ub=5 "
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
    "algorithm.adv_estimator=gae critic.optim.grad_clip=1.0 actor.policy_loss.loss_mode=sapo "
    "actor.policy_loss.tau_pos=1.0 actor.policy_loss.tau_neg=1.05 model.lora_rank=16 model.lora_alpha=16 "
    "model.target_modules=all-linear model.exclude_modules=[q_proj]",
    "algorithm.adv_estimator=grpo model.lora.rank=16 model.lora.alpha=32 model.lora.target_modules=[linear_qkv] "
    "model.lora.exclude_modules=[linear_proj] model.lora.dropout=0.1",
    "algorithm.adv_estimator=grpo model.lora_adapter_path=a",
    "algorithm.adv_estimator=grpo model.lora.adapter_path=a",
    "algorithm.adv_estimator=grpo actor.policy_loss.loss_mode=kl_cov actor.policy_loss.kl_cov_ratio=2e-4 "
    "actor.policy_loss.ppo_kl_coef=1",
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that have no file when mkdocs collects its files."""
    for name, page in (("settings.md", settings_page()), ("commands.md", commands_page())):
        files.append(File.generated(config, name, content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the tables when mkdocs reads a page. An unknown table's name stops the build with a KeyError."""
    return re.sub(r"<!-- table: ([\w-]+) -->", lambda found: "\n".join(TABLES[found[1]]()), markdown)


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "This page is made from the typed settings (`mindrlhf/configs/`) whenever the site is built. An unknown key, a "
        "wrong type and a value out of range are refused with one sentence that names the file and the line.",
        "",
        "A value is given in the YAML, or at the end of the command line as `group.key=value`; the later one holds. Of "
        "the names in brackets at the end of a line, verl's are without `actor_rollout_ref.`",
        "",
        "## GRPO",
        "",
        "`mindrlhf train --grpo_config FILE.yaml`",
        *_groups(GRPOSettings),
        "",
        "## Fine-tuning",
        "",
        "`mindrlhf sft --sft_config FILE.yaml`",
        *_groups(SFTSettings),
        "",
        "## Model YAMLs",
        "",
        "MindFormers' form. One file for training (`--sft_path_train`) and one for generating (`--sft_path_infer`): a "
        "path, or the name of one in `model_configs/qwen_grpo/`. Without a file these values are the defaults, the "
        "shape is the checkpoint's, and all processes are data-parallel. On the command line the keys follow "
        "`train_yaml.` and `infer_yaml.` Keys of MindFormers that are not listed have no effect; they are named once "
        "at the start.",
        *(line for name, group in YAML_GROUPS.items() for line in _section(group, name, group.__doc__)),
    ]
    return "\n".join(lines) + "\n"


def _groups(config: type[Settings]) -> Iterator[str]:
    """Yield a table of the settings without a group, and a table for each group."""
    single = {name: field for name, field in config.model_fields.items() if not is_group(field.annotation)}
    yield ""
    yield from _table(single, "")
    for name, field in config.model_fields.items():
        if is_group(field.annotation):
            yield from _section(field.annotation, name, field.description, field.default)


def _section(group: type[Settings], prefix: str, meaning: str, defaults: Settings | None = None) -> Iterator[str]:
    yield from ("", f"### `{prefix}`", "", meaning, "")
    yield from _table(group.model_fields, f"{prefix}.", defaults)


def _table(fields: dict[str, FieldInfo], prefix: str, defaults: Settings | None = None) -> Iterator[str]:
    """Yield a table of settings. defaults: this group's values, which may differ from its class's defaults."""
    yield from (*REFERENCE, "| key | type | default | meaning |", "| --- | --- | --- | --- |")
    for name, field in flat_fields(fields):
        default = field.get_default(call_default_factory=True)
        if defaults is not None:
            default = defaults
            for part in name.split("."):
                default = getattr(default, part)
        shown = "" if default is PydanticUndefined else f"`{_value(default)}`"
        yield f"| `{prefix}{name}` | {_cell(_type(field))} | {_cell(shown)} | {_cell(field.description)} |"
    yield from END


def _value(value: Any) -> str:
    if isinstance(value, Settings):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type(field: FieldInfo) -> str:
    """Describe a type, with the limits of a number: `int, from 1`."""
    signs = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}
    limits = [
        words.format(f"2^{limit.bit_length() - 1}" if limit == 2**62 else f"{limit:g}")
        for sign, words in signs.items()
        for rule in field.metadata
        if (limit := getattr(rule, sign, None)) is not None
    ]
    return ", ".join([_name(field.annotation), " ".join(limits)] if limits else [_name(field.annotation)])


def _name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(parts[0])
    if origin is Literal:
        return " or ".join(f"`{_value(part)}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _name(part) for part in parts)
    if origin is tuple:
        return f"list of {_name(parts[0])}"
    if is_group(annotation):
        return f"group of {', '.join(f'`{name}`' for name in annotation.model_fields)}"
    return {str: "text", Path: "path", dict: "group"}.get(origin or annotation, getattr(annotation, "__name__", ""))


def _cell(text: str) -> str:
    """Escape text for a table: a pipe would end the cell, and outside of code `<output>` would be a tag."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "This page is made from the commands' own parsers whenever the site is built; `mindrlhf COMMAND --help` shows "
        "the same. A flag in bold has to be given. Exit codes: 0 done, 2 a mistake in what was given (one line on "
        "stderr), 1 an error of the suite, or two runs that were compared and do not agree.",
    ]
    for name, (_, summary) in cli.COMMANDS.items():
        lines += ["", f"## `mindrlhf {name}`", "", _cell(f"{summary[0].upper()}{summary[1:]}."), ""]
        lines += [*REFERENCE, "| flag | default | meaning |", "| --- | --- | --- |"]
        parser = command_parser(name)
        lines += [_flag(parser, action) for action in parser._actions if action.help != argparse.SUPPRESS]
        lines += END
    return "\n".join(lines) + "\n"


def command_parser(name: str) -> argparse.ArgumentParser:
    """Build the parser of `mindrlhf NAME`."""
    parser = argparse.ArgumentParser(prog=f"mindrlhf {name}", add_help=False)
    importlib.import_module(f"mindrlhf.commands.{cli.COMMANDS[name][0]}").add_arguments(parser)
    return parser


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if action.option_strings:
        names = " ".join(f"`{option}`" for option in action.option_strings)
        names = f"**{names}**" if action.required else names
    else:
        names = f"`{action.metavar or action.dest}`"
    choices = f" `{'`, `'.join(map(str, action.choices))}`." if action.choices else ""
    default = "" if action.default in (None, False, (), []) else f"`{action.default}`"
    meaning = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| {names} | {default} | {_cell(meaning)}{choices} |"


def verl_rows() -> dict[str, list[str]]:
    """Map verl's key, or keys that count together, to our keys and flags, by `translate`."""
    rows: dict[str, list[str]] = {}
    for command in VERL_COMMANDS:
        translation = translate(command)
        translation.check()
        for ours, theirs in translation.sources:
            keys = ", ".join(re.findall(r"(?:^|, )([a-z_][\w.]*)=", theirs))
            if not keys:
                continue
            name = re.split("[= ]", ours)[0]
            if name not in rows.setdefault(keys, []):
                rows[keys].append(name)
    return rows


def _two_columns(theirs: str, rows: Mapping[str, Iterable[str]]) -> list[str]:
    lines = [f"| {theirs} | here |", "| --- | --- |"]
    return lines + [f"| {_code(keys.split(', '))} | {_code(ours)} |" for keys, ours in sorted(rows.items())]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _verl_table(table: Mapping[str, str], heading: str) -> list[str]:
    """List keys of verl, grouped by the reason or place given in the table."""
    lines = [f"| {heading} | verl |", "| --- | --- |"]
    return lines + [
        f"| {_cell(reason.format(value='...'))} | {_code(keys.split())} |" for reason, keys in table.items()
    ]


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "verl": lambda: _two_columns("verl", verl_rows()),
    "verl-elsewhere": lambda: _verl_table(ELSEWHERE, "here"),
    "verl-needless": lambda: _verl_table(NEEDLESS, "why"),
    "verl-not-done": lambda: _verl_table({str(one): " ".join(one.asking) for one in NOT_DONE}, "not done"),
    "trl": lambda: _two_columns("TRL", trl_names(GRPOSettings)),
}
