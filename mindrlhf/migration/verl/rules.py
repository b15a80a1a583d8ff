"""Rules of the translation, each from keys of verl to ours."""

import os
import re
from typing import get_args

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.configs.tracking import Logger
from mindrlhf.configs.yaml_file import read_yaml
from mindrlhf.data.source import SEPARATOR
from mindrlhf.data.truncation import TRUNCATIONS
from mindrlhf.errors import UserError
from mindrlhf.migration.verl.architectures import frozen_tower, routing
from mindrlhf.migration.verl.command import Keys
from mindrlhf.migration.verl.optimizers import optimizer
from mindrlhf.migration.verl.result import VerlTranslation
from mindrlhf.migration.verl.table import COPIED_WITH, FILE_DEFAULTS, MEGATRON_MODULES, NAMES

KL = {  # switch -> coefficient, estimator
    "actor.use_kl_loss": ("actor.kl_loss_coef", "actor.kl_loss_type"),
    "algorithm.use_kl_in_reward": ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
}
METRICS = ("acc", "score")
VERL_REWARD = """
verl: its rule for a row's data_source; openai/gsm8k to the letter, MATH, DAPO, AIME and
Numina by `math`, which compares values and not texts; other sources are refused"""
WITHOUT_LIMIT = 1_000_000  # rounds of dynamic sampling
OVERLONG_BUFFERS = (
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
MEGATRON_ADAPTER = "model.lora"
OFFLOADED = re.compile(r"^(actor|ref|critic)\..*\.((param|optimizer|grad)_offload|offload_policy)$")
TURNS = "rollout.multi_turn"
TOOLS = {"code_interpreter": "python", "calculator": "calculator", "sqlite": "sqlite"}  # verl's tool -> ready one
UNLIMITED_TURNS = 1_000


def _data(keys: Keys, result: VerlTranslation) -> None:
    filtered = "data.filter_overlong_prompts"
    treatment = "data.truncation"
    column = "data.prompt_key"
    truncation = "drop" if keys(filtered) is True else keys(treatment)
    if truncation in TRUNCATIONS:
        result.put("data.truncation", truncation, filtered, treatment)
    else:
        result.refuse(treatment, f"data.truncation is one of {', '.join(TRUNCATIONS)}")
    result.copy("data.max_prompt_length", "data.max_prompt_length")
    if keys(column) not in (None, "prompt"):
        result.put("data.fields", [f"prompt={keys(column)}"], column)
    for theirs, ours in (("data.train_files", "--mind_dataset_dir"), ("data.val_files", "data.val_dataset")):
        given = keys(theirs) or []
        files = [os.path.expanduser(str(name)) for name in (given if isinstance(given, list) else [given])]
        if files:
            result.put(ours, SEPARATOR.join(files), theirs)
    group = "data.apply_chat_template_kwargs"
    variables = dict(keys(group) or {}) | {name.removeprefix(f"{group}."): keys(name) for name in keys.below(group)}
    if variables:
        result.put("data.chat_template_kwargs", variables, group, *keys.below(group))


def _sampling(keys: Keys, result: VerlTranslation) -> None:
    for ours, theirs in (("rollout", "rollout"), ("validation", "rollout.val_kwargs")):
        drawn, temperature, top_k = (f"{theirs}.{name}" for name in ("do_sample", "temperature", "top_k"))
        if keys(drawn) is False:
            result.put(f"{ours}.temperature", 0.0, drawn)
        elif keys(temperature) is not None:
            result.put(f"{ours}.temperature", keys(temperature), temperature, drawn)
        if keys(top_k) is not None:
            result.put(f"{ours}.top_k", keys.positive(top_k) or 0, top_k)


def _tools(keys: Keys, result: VerlTranslation) -> list[str]:
    """List ready tools for the names in verl's tool file; refuse others.

    Raises UserError for a file that cannot be read.
    """
    key = f"{TURNS}.tool_config_path"
    if keys(f"{TURNS}.enable") is not True or not keys(key):
        return []
    rows = read_yaml(os.path.expanduser(str(keys(key)))).values.get("tools")
    tools = []
    for row in rows if isinstance(rows, list) else [None]:
        try:
            name = row["tool_schema"]["function"]["name"]
        except (KeyError, TypeError):
            raise UserError(f"--from-verl: {key}={keys(key)} has a tool without tool_schema.function.name.") from None
        if name not in TOOLS:
            found = f"it names the tool {name!r} ({row.get('class_name')}), and here are {', '.join(TOOLS)}"
            result.refuse(key, f"{found}; give it in rollout.tools instead")
        else:
            tools.append(TOOLS[name])
    return tools


def _turns(keys: Keys, result: VerlTranslation) -> None:
    if keys(f"{TURNS}.enable") is not True:
        return
    named, turns, form = (f"{TURNS}.{name}" for name in ("tool_config_path", "max_assistant_turns", "format"))
    if tools := _tools(keys, result):
        result.put("rollout.tools", tools, f"{TURNS}.enable", named)
    result.put("rollout.max_turns", keys.positive(turns) or UNLIMITED_TURNS, turns)
    if keys(form) in (None, "hermes"):
        result.put("rollout.tool_format", "hermes", form)
    else:
        result.refuse(form, "rollout.tool_format is hermes, retool, python_block or file.py:Class")
    for name, reason in (
        ("interaction_config_path", "users are an environment, rollout.environment=file.py:Class"),
        ("max_user_turns", "rollout.max_turns counts the policy's turns"),
    ):
        if keys(f"{TURNS}.{name}"):
            result.refuse(f"{TURNS}.{name}", reason)


def _reward(keys: Keys, result: VerlTranslation) -> None:
    for buffer in OVERLONG_BUFFERS:
        switch, factor = f"{buffer}.enable", f"{buffer}.penalty_factor"
        if keys(switch) is True:
            result.put("reward.overlong_factor", 1.0 if keys(factor) is None else keys(factor), switch, factor)
            result.copy("reward.overlong_buffer", f"{buffer}.len")
    for group in ("reward.custom_reward_function", "custom_reward_function"):
        path, name, kwargs = (f"{group}.{part}" for part in ("path", "name", "reward_kwargs"))
        if keys(path):
            args = {key.removeprefix(f"{kwargs}."): keys(key) for key in keys.below(kwargs)}
            function = {"name": f"{os.path.expanduser(str(keys(path)))}:{keys(name) or 'compute_score'}"}
            function |= {"args": args} if args else {}
            result.put("reward.functions", [function], path, name, *keys.below(kwargs))
            return
    result.put("reward.functions", [{"name": "verl"}])
    result.put("validation.reward", "verl", words=VERL_REWARD)


def _memory(keys: Keys, result: VerlTranslation) -> None:
    """Swap for all roles where verl moves the tensors of one.

    These are its weights, its moments or its gradients.
    """
    switches = [name for name in keys.given if OFFLOADED.search(name) and isinstance(keys(name), bool)]
    if switches:
        result.put("memory.swap", any(map(keys, switches)), *switches)


def _trainer(keys: Keys, result: VerlTranslation) -> None:
    given = keys("trainer.logger")
    if given:
        names = {"jsonl" if name == "file" else name for name in ([given] if isinstance(given, str) else given)}
        ours = [name for name in get_args(Logger) if name in {"console", "jsonl", *names}]
        missing = ", ".join(sorted(names.difference(ours)))
        words = f"\nnot here: {missing}; jsonl has the same metrics" if missing else ""
        result.put("trainer.loggers", ours, "trainer.logger", words=words)
    for name in ("trainer.project_name", "trainer.experiment_name"):
        result.copy(name, name, str)
    if keys("trainer.rollout_data_dir"):
        result.put("trainer.save_rollouts", True, "trainer.rollout_data_dir")


def _checkpoints(keys: Keys, result: VerlTranslation) -> None:
    kept = "trainer.max_actor_ckpt_to_keep"
    path = "trainer.resume_from_path"
    if keys.positive("trainer.save_freq") or kept in keys.given:
        result.put("trainer.save_max_ckpt_num", keys.positive(kept), kept)
    if keys("trainer.resume_mode") == "resume_path":
        result.copy(path, path, lambda given: os.path.expanduser(str(given)))
    folder = "trainer.default_local_dir"
    names = ("trainer.project_name", "trainer.experiment_name")
    if keys(folder):
        result.copy("--save_ckpt_dir", folder)
        result.copy("--output_dir", folder)
    else:
        default = "/".join(("checkpoints", *(str(keys(name) or FILE_DEFAULTS[name]) for name in names)))
        given = [name for name in names if name in keys.given]
        result.put("--save_ckpt_dir", default, *given)
        result.put("--output_dir", default, *given)


def _batch(keys: Keys, result: VerlTranslation) -> None:
    size = "data.train_batch_size"
    part = "actor.ppo_mini_batch_size"
    if keys.first("data.gen_batch_size") and keys("algorithm.filter_groups.enable") is not True:
        size = "data.gen_batch_size"  # verl draws these for a step; dynamic sampling uses train_batch_size of them
        result.judge("needless", "data.gen_batch_size goes before it in verl", "data.train_batch_size")
    prompts = keys.number(size)
    mini = keys.number(part) if part in keys.given else min(keys.number(part), prompts)
    if mini < 1 or prompts < 1 or prompts % mini:
        raise UserError(f"--from-verl: {size} {prompts} is no multiple of {part} {mini}; change one of them.")
    result.put("data.prompts_per_step", prompts, size)
    result.put("algorithm.updates_per_iteration", prompts // mini, size, part)


def _micro_batch(keys: Keys, result: VerlTranslation) -> None:
    """Translate verl's micro-batch size, in tokens or rows, per process."""
    ours = "train.max_tokens_per_micro_batch"
    dynamic = "actor.use_dynamic_bsz"
    tokens = "actor.ppo_max_token_len_per_gpu"
    if keys(dynamic) is True:
        result.put(ours, keys.number(tokens), tokens, dynamic)
    elif name := keys.first("actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size"):
        processes = (keys.positive("trainer.n_gpus_per_node") or 8) * (keys.positive("trainer.nnodes") or 1)
        rows = keys.number(name) if name.endswith("_per_gpu") else max(1, keys.number(name) // processes)
        length = keys.first("rollout.response_length") or "data.max_response_length"
        row = keys.number("data.max_prompt_length") + keys.number(length)
        result.put(ours, rows * row, name, length, dynamic)


def _advantage(keys: Keys, result: VerlTranslation) -> None:
    estimator = "algorithm.adv_estimator"
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    ours = NAMES["advantage"].get(keys(estimator), keys(estimator))
    if ours not in ADVANTAGES:
        followers = by_std, *(key for name in ADVANTAGES for key in COPIED_WITH.get(name, {}).values())
        result.refuse(estimator, f"algorithm.advantage is one of {', '.join(ADVANTAGES)}", *followers)
        return
    result.put("algorithm.advantage", ours, estimator)
    if keys(estimator) == "gdpo":
        result.put("algorithm.normalize_functions", True, estimator)
    if ours in ("grpo", "grpo_passk") and by_std in keys.given:
        result.put("algorithm.advantage_std", "group" if keys(by_std) else "none", by_std)
    result.copy_with(ours)


def _loss(keys: Keys, result: VerlTranslation) -> None:
    mode = "actor.policy_loss.loss_mode"
    by_token = "actor.use_token_level_loss"
    ours = NAMES["policy_loss"].get(keys(mode), keys(mode))
    if ours not in POLICY_LOSSES:
        result.refuse(mode, f"algorithm.policy_loss is one of {', '.join(POLICY_LOSSES)}", *_of_loss(keys))
        return
    result.put("algorithm.policy_loss", ours, mode)
    for side in ("low", "high"):
        if f"epsilon_{side}" in POLICY_LOSSES[ours].options:
            result.copy(f"algorithm.epsilon_{side}", f"actor.clip_ratio_{side} actor.clip_ratio")
    result.copy_with(ours)
    if defined := POLICY_LOSSES[ours].aggregation:
        result.put("algorithm.aggregation", defined, mode)
    elif keys(by_token) is True:
        result.put("algorithm.aggregation", "token-mean", by_token)
    else:
        result.copy("algorithm.aggregation", "actor.loss_agg_mode")


def _of_loss(keys: Keys) -> list[str]:
    """List the given keys that mean nothing without a policy loss."""
    beginnings = (
        "actor.clip_ratio",
        "actor.policy_loss.",
        "actor.tau_",
        "actor.loss_agg_mode",
        "actor.use_token_level_",
    )
    return [name for name in keys.below("actor") if name.startswith(beginnings)]


def _kl(keys: Keys, result: VerlTranslation) -> None:
    asked = {switch: KL[switch][0] for switch in KL if keys(switch) is True}
    on = [switch for switch, coefficient in asked.items() if keys.number(coefficient)]
    silent = [coefficient for switch, coefficient in asked.items() if switch not in on]
    if len(on) == 2:
        both = " and ".join(KL)
        raise UserError(f"--from-verl: {both} are both True, and the KL term is in one place; set one to False.")
    if not on:
        result.put("algorithm.beta", 0.0, *KL, *silent)
        return
    coefficient, kind = KL[on[0]]
    result.put("algorithm.beta", keys.number(coefficient), coefficient, *on)
    name = str(keys(kind))
    plain = name.removesuffix("+")
    result.put("algorithm.kl_estimator", NAMES["kl_estimator"].get(plain, plain) + name[len(plain) :], kind)
    in_reward = "algorithm.use_kl_in_reward" in on
    result.put("algorithm.kl_in_reward", in_reward, *(name for name in KL if name in keys.given), *silent)
    if in_reward and keys("algorithm.kl_ctrl.type") == "adaptive":
        target = "algorithm.kl_ctrl.target_kl"
        result.put("algorithm.kl_target", keys.number(target), target, "algorithm.kl_ctrl.type")
        result.copy("algorithm.kl_horizon", "algorithm.kl_ctrl.horizon")


def _critic(keys: Keys, result: VerlTranslation) -> None:
    if keys("algorithm.adv_estimator") != "gae":
        result.judge("needless", "only the estimator gae has a critic", *keys.below("critic"), "trainer.critic_warmup")
        return
    optimizer(keys, result, "critic", "critic.optimizer")
    result.copy("--load_critic_checkpoint", "critic.model.path")
    for name in ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode"):
        if keys(f"critic.{name}") not in (None, "", keys(f"actor.{name}")):
            result.refuse(f"critic.{name}", f"the critic has the actor's, {keys(f'actor.{name}')}")


def _adapters(keys: Keys, result: VerlTranslation) -> None:
    path = keys.first("model.lora_adapter_path", f"{MEGATRON_ADAPTER}.adapter_path")
    if path:
        result.copy("lora.adapter_path", path)
        others = (*COPIED_WITH["adapters"].values(), *keys.below(MEGATRON_ADAPTER))
        result.judge("needless", f"the adapter of {path} has its own", *others)
    elif keys.positive("model.lora_rank"):
        result.copy_with("adapters")
    elif keys.positive(f"{MEGATRON_ADAPTER}.rank"):
        _megatron_adapters(keys, result)


def _megatron_adapters(keys: Keys, result: VerlTranslation) -> None:
    group = MEGATRON_ADAPTER
    result.judge("needless", "A is drawn uniformly, B is 0, both are float32", *keys.below(group))
    if keys(f"{group}.type") not in (None, "lora", "canonical_lora"):
        result.refuse(f"{group}.type", "adapters are plain LoRA here")
    result.copy_with("megatron_adapters")
    for name in ("target_modules", "exclude_modules"):
        given = keys(f"{group}.{name}") or []
        names = [given] if isinstance(given, str) else given
        unknown = [one for one in names if one not in MEGATRON_MODULES]
        if unknown:
            result.refuse(f"{group}.{name}", f"{unknown[0]} is not among {', '.join(MEGATRON_MODULES)}")
        elif names:
            ours = [one for joined in names for one in MEGATRON_MODULES[joined].split()]
            result.put(f"lora.{name}", ours, f"{group}.{name}")


def _dapo(keys: Keys, result: VerlTranslation) -> None:
    switch, rounds, metric = (f"algorithm.filter_groups.{name}" for name in ("enable", "max_num_gen_batches", "metric"))
    if keys(switch) is not True:
        return
    result.put("dynamic_sampling.enabled", True, switch)
    result.put("dynamic_sampling.max_rounds", keys.positive(rounds) or WITHOUT_LIMIT, rounds)
    result.copy("dynamic_sampling.prompts_per_round", "data.gen_batch_size")
    if keys(metric) in METRICS:
        result.put("dynamic_sampling.metric", None, metric)
    elif keys(metric) is not None:
        result.refuse(metric, f"groups are compared by {' or '.join(METRICS)}, without the overlong punishment")


def _correction(keys: Keys, result: VerlTranslation) -> None:
    group = "algorithm.rollout_correction"
    cap = "actor.tis_imp_ratio_cap"
    weights = f"{group}.rollout_is"
    rows = f"{group}.rollout_rs"
    threshold = f"{group}.rollout_is_threshold"
    if keys(rows) not in (None, keys(weights)):
        result.refuse(rows, "rows and tokens are left out by the level of rollout_is only", *keys.below(group))
    elif keys(weights) in ("token", "sequence"):
        result.put("rollout_correction.level", keys(weights), weights)
        lower, _, upper = str(keys(threshold)).rpartition("_")
        lowest = switch = threshold
        if keys(rows) is not None:
            threshold = keys.first(f"{rows}_threshold") or threshold
            lowest = keys.first(f"{rows}_threshold_lower") or threshold
            switch = rows
            upper = str(keys(threshold))
            lower = str(1 / _bound(upper, threshold) if lowest == threshold else keys(lowest))
        if lower:
            result.put("rollout_correction.mode", "mask", switch)
            result.put("rollout_correction.lower", _bound(lower, lowest), lowest)
        result.put("rollout_correction.upper", _bound(upper, threshold), threshold)
    elif keys(weights) is not None:
        result.refuse(weights, "rollout_correction.level is token or sequence", *keys.below(group))
    elif keys.positive(cap):
        result.put("rollout_correction.level", "token", cap)
        result.put("rollout_correction.upper", keys(cap), cap)


def _bound(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--from-verl: {name} is {text!r}, and should be a number, or two with _ between.") from None


RULES = (
    *(_data, _sampling, _turns, _reward, _memory, _trainer, _checkpoints, _batch, _micro_batch),
    *(_advantage, _loss, _kl, optimizer, _critic, _adapters, routing, frozen_tower, _dapo, _correction),
)
