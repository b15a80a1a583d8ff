"""Rules of the translation, each from keys of verl to ours."""

import os
import shlex
from pathlib import Path
from typing import Any, get_args

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.configs.tracking import Logger
from mindrlhf.configs.verl.command import Keys
from mindrlhf.configs.verl.result import Translation
from mindrlhf.configs.verl.table import COPIED_WITH, MEGATRON_MODULES
from mindrlhf.errors import UserError

TRUNCATIONS = ("error", "left", "right")
DATASET = ".mindrecord"
ADVANTAGE_NAMES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "gdpo": "grpo"}
LOSS_NAMES = {"vanilla": "clip", "clip-cov": "clip_cov", "kl-cov": "kl_cov"}
ESTIMATORS = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}  # verl's k3 is clamped: our low_var_kl
KL = {  # switch -> coefficient, estimator
    "actor.use_kl_loss": ("actor.kl_loss_coef", "actor.kl_loss_type"),
    "algorithm.use_kl_in_reward": ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
}
DECAYS = ("constant", "linear", "cosine")
DECAY_KEYS = ("warmup_style", "lr_scheduler_type", "lr_decay_style")
METRICS = ("acc", "score")
WITHOUT_LIMIT = 1_000_000  # rounds of dynamic sampling
MEGATRON_ADAPTER = "model.lora"


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
        names = {"jsonl" if name == "file" else name for name in ([given] if isinstance(given, str) else given)}
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


def _batch(keys: Keys, result: Translation) -> None:
    size = "data.train_batch_size"
    if keys.first("data.gen_batch_size") and keys("algorithm.filter_groups.enable") is not True:
        size = "data.gen_batch_size"  # what verl draws for a step; dynamic sampling takes train_batch_size of them
        result.judge("needless", "data.gen_batch_size goes before it in verl", "data.train_batch_size")
    prompts, mini = keys.number(size), keys.number("actor.ppo_mini_batch_size")
    if "actor.ppo_mini_batch_size" not in keys.given:
        mini = min(mini, prompts)
    if mini < 1 or prompts < 1 or prompts % mini:
        raise UserError(
            f"--from-verl: {size} {prompts} is no multiple of actor.ppo_mini_batch_size {mini}; change one of them."
        )
    result.put("data.prompts_per_step", prompts, size)
    result.put("algorithm.updates_per_iteration", prompts // mini, size, "actor.ppo_mini_batch_size")


def _micro_batch(keys: Keys, result: Translation) -> None:
    """Translate verl's micro-batch size, in tokens or rows, by process."""
    ours = "train.max_tokens_per_micro_batch"
    dynamic = keys.among("actor.use_dynamic_bsz")
    if keys("actor.use_dynamic_bsz") is True:
        result.put(ours, keys.number("actor.ppo_max_token_len_per_gpu"), "actor.ppo_max_token_len_per_gpu", *dynamic)
        return
    name = keys.first("actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size")
    if name is None:
        return
    rows = keys.number(name)
    if name == "actor.ppo_micro_batch_size":  # of all processes
        processes = (keys.positive("trainer.n_gpus_per_node") or 8) * (keys.positive("trainer.nnodes") or 1)
        rows = max(1, rows // processes)
    length = keys.first("rollout.response_length") or "data.max_response_length"
    tokens = keys.number("data.max_prompt_length") + keys.number(length)
    result.put(ours, rows * tokens, name, length, *dynamic)


def _rollout(keys: Keys, result: Translation) -> None:
    sampled = keys.among("rollout.do_sample")
    if keys("rollout.do_sample") is False:
        result.put("rollout.temperature", 0.0, *sampled)
    else:
        result.put("rollout.temperature", keys("rollout.temperature"), "rollout.temperature", *sampled)
    result.put("rollout.top_k", keys.positive("rollout.top_k") or 0, "rollout.top_k")


def _advantage(keys: Keys, result: Translation) -> None:
    name = keys("algorithm.adv_estimator")
    ours = ADVANTAGE_NAMES.get(name, name)
    if ours not in ADVANTAGES:
        result.refused["algorithm.adv_estimator"] = f"algorithm.advantage is one of {', '.join(ADVANTAGES)}"
        return
    result.put("algorithm.advantage", ours, "algorithm.adv_estimator")
    if name == "gdpo":
        result.put("algorithm.normalize_functions", True, "algorithm.adv_estimator")
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    if ours in ("grpo", "grpo_passk") and (by_std in keys.given or keys(by_std) is False):
        result.put("algorithm.advantage_std", "group" if keys(by_std) else "none", by_std)
    result.copy_with(ours)


def _loss(keys: Keys, result: Translation) -> None:
    mode = "actor.policy_loss.loss_mode"
    ours = LOSS_NAMES.get(keys(mode), keys(mode))
    if ours not in POLICY_LOSSES:
        result.refused[mode] = f"algorithm.policy_loss is one of {', '.join(POLICY_LOSSES)}"
        return
    result.put("algorithm.policy_loss", ours, mode)
    if ours not in ("gpg", "sapo", "kl_cov"):
        for side in ("low", "high"):
            result.copy(f"algorithm.epsilon_{side}", f"actor.clip_ratio_{side} actor.clip_ratio")
    result.copy_with(ours)
    defined = POLICY_LOSSES[ours].aggregation
    if defined:
        result.put("algorithm.aggregation", defined, mode)
    elif keys("actor.use_token_level_loss") is True:
        result.put("algorithm.aggregation", "token-mean", "actor.use_token_level_loss")
    else:
        result.copy("algorithm.aggregation", "actor.loss_agg_mode")


def _kl(keys: Keys, result: Translation) -> None:
    on = [switch for switch, (coefficient, _) in KL.items() if keys(switch) is True and keys.number(coefficient)]
    if len(on) == 2:
        raise UserError(
            "--from-verl: actor.use_kl_loss and algorithm.use_kl_in_reward are both True, and the KL term is in one "
            "place here; set one of them to False."
        )
    for switch in keys.among(*KL):
        if keys(switch) is True and switch not in on:
            result.put("algorithm.beta", 0.0, switch, KL[switch][0])
    if not on:
        result.put("algorithm.beta", 0.0, *KL)
        return
    (switch,), (other,) = on, (name for name in KL if name not in on)
    in_reward = switch == "algorithm.use_kl_in_reward"
    coefficient, kind = KL[switch]
    result.put("algorithm.beta", keys.number(coefficient), coefficient, switch)
    name = str(keys(kind))
    plain = name.removesuffix("+")
    result.put("algorithm.kl_estimator", ESTIMATORS.get(plain, plain) + name[len(plain) :], kind)
    result.put("algorithm.kl_in_reward", in_reward, switch, *keys.among(other))
    if in_reward and keys("algorithm.kl_ctrl.type") == "adaptive":
        target = "algorithm.kl_ctrl.target_kl"
        result.put("algorithm.kl_target", keys.number(target), target, "algorithm.kl_ctrl.type")
        result.copy("algorithm.kl_horizon", "algorithm.kl_ctrl.horizon")


def _optimizer(keys: Keys, result: Translation, theirs: str = "actor", ours: str = "optimizer") -> None:
    rate = keys.number(f"{theirs}.optim.lr")
    for name, beta in zip(("beta1", "beta2"), keys(f"{theirs}.optim.betas"), strict=False):
        result.put(f"{ours}.{name}", beta, f"{theirs}.optim.betas")
    _warm_up(keys, result, theirs, ours)
    style = keys.first(*(f"{theirs}.optim.{name}" for name in DECAY_KEYS))
    if style and keys(style) in DECAYS:
        result.copy(f"{ours}.lr_decay", style)
    elif style:
        result.refused[style] = f"optimizer.lr_decay is one of {', '.join(DECAYS)}"
    if keys(f"{theirs}.optim.min_lr") is not None:
        result.copy(f"{ours}.min_lr", f"{theirs}.optim.min_lr")
    else:
        result.copy(f"{ours}.min_lr", f"{theirs}.optim.min_lr_ratio", lambda share: share * rate)


def _warm_up(keys: Keys, result: Translation, theirs: str, ours: str) -> None:
    steps, share = f"{theirs}.optim.lr_warmup_steps", f"{theirs}.optim.lr_warmup_steps_ratio"
    if keys.positive(steps):
        result.copy(f"{ours}.warmup_steps", steps)
    elif keys.positive(share):
        total = "trainer.total_training_steps"
        if keys.positive(total) is None:
            raise UserError(
                f"--from-verl: {share}={keys(share)} is a share of the run's updates, whose number is not known yet; "
                f"give {total}, or {steps} in its place."
            )
        result.put(f"{ours}.warmup_steps", int(keys(share) * keys(total)), share, total)


def _critic(keys: Keys, result: Translation) -> None:
    if keys("algorithm.adv_estimator") != "gae":
        result.judge("needless", "only the estimator gae has a critic", *keys.below("critic"), "trainer.critic_warmup")
        return
    _optimizer(keys, result, "critic", "critic.optimizer")
    result.copy_flag("load_critic_checkpoint", "critic.model.path")
    for name in ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode"):
        right = keys(f"actor.{name}")
        if keys.first(f"critic.{name}") and keys(f"critic.{name}") != right:
            result.refused[f"critic.{name}"] = f"the critic has the actor's, {right}"
        result.judge("needless", "the critic has the actor's", f"critic.{name}")


def _adapters(keys: Keys, result: Translation) -> None:
    path = keys.first("model.lora_adapter_path", f"{MEGATRON_ADAPTER}.adapter_path")
    if path:
        result.copy("lora.adapter_path", path)
        others = (*COPIED_WITH["adapters"].values(), *keys.below(MEGATRON_ADAPTER))
        result.judge("needless", f"the adapter of {path} has its own", *others)
    elif keys.positive("model.lora_rank"):
        result.copy_with("adapters")
    elif keys.positive(f"{MEGATRON_ADAPTER}.rank"):
        _megatron_adapters(keys, result)


def _megatron_adapters(keys: Keys, result: Translation) -> None:
    group = MEGATRON_ADAPTER
    result.judge("needless", "A is drawn uniformly, B is 0, both are float32", *keys.below(group))
    if keys(f"{group}.type") not in (None, "lora", "canonical_lora"):
        result.refused[f"{group}.type"] = "adapters are plain LoRA here"
    result.copy_with("megatron_adapters")
    for name in ("target_modules", "exclude_modules"):
        given = keys(f"{group}.{name}") or []
        names = [given] if isinstance(given, str) else given
        unknown = [one for one in names if one not in MEGATRON_MODULES]
        if unknown:
            result.refused[f"{group}.{name}"] = f"{unknown[0]} is not among {', '.join(MEGATRON_MODULES)}"
        elif names:
            ours = [one for joined in names for one in MEGATRON_MODULES[joined].split()]
            result.put(f"lora.{name}", ours, f"{group}.{name}")


def _dapo(keys: Keys, result: Translation) -> None:
    groups = "algorithm.filter_groups"
    if keys(f"{groups}.enable") is not True:
        return
    result.put("dynamic_sampling.enabled", True, f"{groups}.enable")
    rounds = keys.positive(f"{groups}.max_num_gen_batches") or WITHOUT_LIMIT
    result.put("dynamic_sampling.max_rounds", rounds, f"{groups}.max_num_gen_batches")
    result.copy("dynamic_sampling.prompts_per_round", "data.gen_batch_size")
    metric = f"{groups}.metric"
    if keys(metric) in METRICS:
        result.put("dynamic_sampling.metric", None, metric)
    elif keys(metric) is not None:
        result.refused[metric] = f"groups are compared by {' or '.join(METRICS)}, without the overlong punishment"


def _correction(keys: Keys, result: Translation) -> None:
    group = "algorithm.rollout_correction"
    level, sampling = keys(f"{group}.rollout_is"), keys(f"{group}.rollout_rs")
    cap = keys.positive("actor.tis_imp_ratio_cap")
    threshold, lowest = f"{group}.rollout_is_threshold", f"{group}.rollout_rs_threshold_lower"
    if sampling is not None and sampling != level:
        result.refused[f"{group}.rollout_rs"] = "rows and tokens are left out by the level of rollout_is only"
    elif level in ("token", "sequence"):
        result.put("rollout_correction.level", level, f"{group}.rollout_is")
        lower, _, upper = str(keys(threshold)).rpartition("_")
        if sampling is not None:
            threshold = keys.first(f"{group}.rollout_rs_threshold") or threshold
            upper = str(keys(threshold))
            lower = str(keys(lowest) or 1 / _bound(upper, threshold))
            result.put("rollout_correction.mode", "mask", f"{group}.rollout_rs")
            result.put("rollout_correction.lower", _bound(lower, lowest), *(keys.among(lowest) or [threshold]))
        elif lower:
            result.put("rollout_correction.mode", "mask", threshold)
            result.put("rollout_correction.lower", _bound(lower, threshold), threshold)
        result.put("rollout_correction.upper", _bound(upper, threshold), threshold)
    elif level is not None:
        result.refused[f"{group}.rollout_is"] = "rollout_correction.level is token or sequence"
    elif cap:
        result.put("rollout_correction.level", "token", "actor.tis_imp_ratio_cap")
        result.put("rollout_correction.upper", cap, "actor.tis_imp_ratio_cap")


def _bound(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--from-verl: {name} is {text!r}, and should be a number, or two with _ between.") from None


RULES = (
    *(_data, _validation, _reward, _memory, _trainer, _checkpoints, _batch, _micro_batch),
    *(_rollout, _advantage, _loss, _kl, _optimizer, _critic, _adapters, _dapo, _correction),
)
