"""verl's command line in our settings: `mindrlhf train --from-verl "key=value ..."`.

What the command line leaves out has verl's default where that is another than ours, so that the same algorithm runs.
Keys are those of verl's `ppo_trainer` configuration and of its DAPO recipe. What has no counterpart is listed, with
what to do instead where there is something.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import yaml

from mindrlhf.configs.tracking import Logger
from mindrlhf.configs.yaml_file import parse_value
from mindrlhf.errors import UserError

POLICY = "actor_rollout_ref."

# Of the keys read below; POLICY is left out of all names here.
VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "actor.ppo_mini_batch_size": 256,
    "actor.ppo_epochs": 1,
    "actor.clip_ratio": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coeff": 0.0,
    "actor.use_kl_loss": False,
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "low_var_kl",
    "actor.grad_clip": 1.0,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.optim.betas": [0.9, 0.999],
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "rollout.top_k": -1,
    "rollout.top_p": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
    "critic.cliprange_value": 0.5,
    "critic.grad_clip": 1.0,
    "trainer.critic_warmup": 0,
    "trainer.total_epochs": 30,
}
ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "gdpo": "grpo"}
LOSSES = {"vanilla": "clip", "clip-cov": "clip_cov", "kl-cov": "kl_cov"}
ESTIMATORS = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}  # verl's k3 is clamped: our low_var_kl
DECAYS = ("constant", "linear", "cosine")
INSTEAD = {  # beginning of a key -> what its user does here
    "data.train_files": "convert it with `mindrlhf data --file_path FILE.parquet`, then --mind_dataset_dir",
    "data.val_files": "convert it with `mindrlhf data`, then `mindrlhf eval`",
    "data.max_prompt_length": "--max_prompt_length of `mindrlhf data`",
    "data.truncation": "--truncation of `mindrlhf data`",
    "data.filter_overlong_prompts": "--truncation drop of `mindrlhf data`",
    "actor.ppo_micro_batch_size": "train.max_tokens_per_micro_batch cuts by tokens, with the same result",
    "actor.ulysses_sequence_parallel_size": "parallel_config of the finetune YAML",
    "actor.strategy": "parallel_config of the finetune YAML",
    "rollout.tensor_model_parallel_size": "parallel_config.model_parallel of the predict YAML",
    "trainer.n_gpus_per_node": "msrun --worker_num, and parallel_config of the model YAMLs",
    "trainer.nnodes": "msrun --worker_num, and parallel_config of the model YAMLs",
    "trainer.default_local_dir": "--save_ckpt_dir",
    "trainer.logger": "trainer.loggers, which has those of them that there are here",
}


@dataclass(frozen=True)
class Translation:
    """A verl command line in our terms.

    overrides: `group.key=value` each, for `load_grpo_config`.
    flags: flag of `mindrlhf train`, without dashes -> value; a flag that is given goes before it.
    sources: (ours, theirs) for people, one for each override and flag.
    without: `key=value` of verl that has no counterpart -> what to do instead, or "".
    """

    overrides: tuple[str, ...]
    flags: Mapping[str, str]
    sources: tuple[tuple[str, str], ...]
    without: Mapping[str, str]

    def __str__(self) -> str:
        width = max(len(ours) for ours, _ in self.sources)
        lines = ["from verl:", *(f"  {ours:<{width}}  {theirs}" for ours, theirs in self.sources)]
        if self.without:
            lines.append("from verl, without a counterpart:")
            lines += [f"  {given}" + (f"  ({instead})" if instead else "") for given, instead in self.without.items()]
        return "\n".join(lines)


def translate(command: str) -> Translation:
    """The settings that a verl command line (`key=value ...`, other words are passed over) stands for.

    Raises UserError for a shell variable that was not expanded, a value that cannot be read, and batch sizes that do
    not divide.
    """
    keys = _Keys(_parse(command))
    result = _Result(keys)
    for part in (_batch, _rollout, _advantage, _loss, _kl, _optimizers, _critic, _dapo, _correction, _trainer):
        part(keys, result)
    without = {
        f"{key}={value}": next((words for start, words in INSTEAD.items() if key.startswith(start)), "")
        for key, value in keys.given.items()
        if key not in keys.used
    }
    return Translation(tuple(result.overrides), result.flags, tuple(result.sources), without)


def _parse(command: str) -> dict[str, Any]:
    """Key without POLICY and without Hydra's plus signs -> value."""
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"--from-verl: the command line cannot be read ({error}).") from None
    given = {}
    for word in words:
        name, equals, text = word.lstrip("+").partition("=")
        if not equals or name.startswith("-"):
            continue
        if "$" in text:
            raise UserError(f"--from-verl: {name}={text} holds a shell variable; give its value.")
        try:
            given[name.removeprefix(POLICY)] = parse_value(text)
        except yaml.YAMLError:
            raise UserError(f"--from-verl: the value of {name}={text} cannot be read.") from None
    if not given:
        raise UserError("--from-verl: there is no key=value in it; give the arguments of verl's main_ppo.")
    return given


@dataclass
class _Keys:
    """verl's keys: what was given, and which of it has been read."""

    given: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def __call__(self, name: str) -> Any:
        """The value, verl's default, or None."""
        self.used.add(name)
        return self.given.get(name, VERL_DEFAULTS.get(name))

    def number(self, name: str) -> float | int:
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"--from-verl: {name} is {value!r}, and should be a number.")
        return value

    def source(self, name: str) -> str:
        """`name=value`, and whether it is a default."""
        value = self.given.get(name, VERL_DEFAULTS.get(name))
        return f"{name}={value}" + ("" if name in self.given else " (verl's default)")


@dataclass
class _Result:
    keys: _Keys
    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    sources: list[tuple[str, str]] = field(default_factory=list)

    def put(self, ours: str, value: Any, *theirs: str) -> None:
        """Set our key; `theirs` are the keys of verl that it follows from."""
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        self.overrides.append(f"{ours}={text}")
        self.sources.append((f"{ours}={text}", ", ".join(self.keys.source(name) for name in theirs)))

    def copy(self, ours: str, theirs: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """As `put`, of a key that has a value."""
        value = self.keys(theirs)
        if value is not None:
            self.put(ours, change(value), theirs)

    def flag(self, name: str, theirs: str) -> None:
        value = self.keys(theirs)
        if value is not None:
            self.flags[name] = str(value)
            self.sources.append((f"--{name} {value}", self.keys.source(theirs)))


def _batch(keys: _Keys, result: _Result) -> None:
    prompts, mini = keys.number("data.train_batch_size"), keys.number("actor.ppo_mini_batch_size")
    if "actor.ppo_mini_batch_size" not in keys.given:
        mini = min(mini, prompts)
    if mini < 1 or prompts % mini:
        raise UserError(
            f"--from-verl: data.train_batch_size {prompts} is no multiple of actor.ppo_mini_batch_size {mini}; "
            "change one of them."
        )
    result.put("data.prompts_per_step", prompts, "data.train_batch_size")
    result.put("algorithm.updates_per_iteration", prompts // mini, "data.train_batch_size", "actor.ppo_mini_batch_size")
    result.copy("algorithm.num_iterations", "actor.ppo_epochs")
    result.copy("data.shuffle", "data.shuffle")
    result.copy("seed", "data.seed")
    result.copy("train.max_tokens_per_micro_batch", "actor.ppo_max_token_len_per_gpu")


def _rollout(keys: _Keys, result: _Result) -> None:
    limit = "rollout.response_length" if "rollout.response_length" in keys.given else "data.max_response_length"
    result.copy("rollout.max_new_tokens", limit)
    result.copy("rollout.num_generations", "rollout.n")
    if keys("rollout.do_sample") is False:
        result.put("rollout.temperature", 0.0, "rollout.do_sample")
    else:
        result.copy("rollout.temperature", "rollout.temperature", float)
    result.copy("rollout.top_k", "rollout.top_k", lambda k: max(0, k))
    for name in ("top_p", "repetition_penalty"):
        result.copy(f"rollout.{name}", f"rollout.{name}", float)
    result.copy("rollout.max_slots", "rollout.max_num_seqs")


def _advantage(keys: _Keys, result: _Result) -> None:
    name = keys("algorithm.adv_estimator")
    ours = ADVANTAGES.get(name, name)
    result.put("algorithm.advantage", ours, "algorithm.adv_estimator")
    if name == "gdpo":
        result.put("algorithm.normalize_functions", True, "algorithm.adv_estimator")
    keys.used |= {"algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam"}  # of some estimators only
    if ours in ("grpo", "grpo_passk") and keys("algorithm.norm_adv_by_std_in_grpo") is False:
        result.put("algorithm.advantage_std", "none", "algorithm.norm_adv_by_std_in_grpo")
    if ours in ("gae", "reinforce_plus_plus"):
        result.copy("algorithm.gamma", "algorithm.gamma", float)
    if ours == "gae":
        result.copy("algorithm.lam", "algorithm.lam", float)


def _loss(keys: _Keys, result: _Result) -> None:
    name = keys("actor.policy_loss.loss_mode")
    ours = LOSSES.get(name, name)
    result.put("algorithm.policy_loss", ours, "actor.policy_loss.loss_mode")
    both = keys.number("actor.clip_ratio")
    if ours not in ("gpg", "sapo", "kl_cov"):
        for side in ("low", "high"):
            theirs = f"actor.clip_ratio_{side}"
            value = keys(theirs)
            source = "actor.clip_ratio" if value is None else theirs
            result.put(f"algorithm.epsilon_{side}", float(both if value is None else value), source)
    if ours == "clip":
        result.copy("algorithm.dual_clip", "actor.clip_ratio_c", float)
    if ours == "sapo":
        result.copy("algorithm.tau_positive", "actor.tau_pos", float)
        result.copy("algorithm.tau_negative", "actor.tau_neg", float)
    own = {"clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), "kl_cov": ("kl_cov_ratio", "ppo_kl_coef")}
    for option in own.get(ours, ()):
        result.copy(f"algorithm.{option}", f"actor.policy_loss.{option}", float)
    if keys("actor.use_token_level_loss") is True:
        result.put("algorithm.aggregation", "token-mean", "actor.use_token_level_loss")
    else:
        result.copy("algorithm.aggregation", "actor.loss_agg_mode")
    result.copy("algorithm.aggregation_tokens", "actor.loss_scale_factor")
    result.copy("algorithm.entropy_coef", "actor.entropy_coeff", float)


def _kl(keys: _Keys, result: _Result) -> None:
    in_loss, in_reward = keys("actor.use_kl_loss") is True, keys("algorithm.use_kl_in_reward") is True
    if in_loss and in_reward:
        raise UserError(
            "--from-verl: actor.use_kl_loss and algorithm.use_kl_in_reward are both True, and the KL term is in one "
            "place here; set one of them to False."
        )
    if not (in_loss or in_reward):
        keys.used |= {"actor.kl_loss_coef", "actor.kl_loss_type", "algorithm.kl_penalty"}
        keys.used |= {name for name in keys.given if name.startswith("algorithm.kl_ctrl.")}
        result.put("algorithm.beta", 0.0, "actor.use_kl_loss", "algorithm.use_kl_in_reward")
        return
    coefficient, kind = (
        ("actor.kl_loss_coef", "actor.kl_loss_type")
        if in_loss
        else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    )
    result.put("algorithm.beta", float(keys.number(coefficient)), coefficient)
    result.copy("algorithm.kl_estimator", kind, _estimator)
    if in_reward:
        result.put("algorithm.kl_in_reward", True, "algorithm.use_kl_in_reward")
        if keys("algorithm.kl_ctrl.type") == "adaptive":
            result.copy("algorithm.kl_target", "algorithm.kl_ctrl.target_kl", float)
            result.copy("algorithm.kl_horizon", "algorithm.kl_ctrl.horizon", int)


def _estimator(name: str) -> str:
    plain = name.removesuffix("+")
    return ESTIMATORS.get(plain, plain) + "+" * name.endswith("+")


def _optimizers(keys: _Keys, result: _Result) -> None:
    _optimizer(keys, result, "actor", "optimizer")


def _optimizer(keys: _Keys, result: _Result, theirs: str, ours: str) -> None:
    rate = keys.number(f"{theirs}.optim.lr")
    result.put(f"{ours}.lr", float(rate), f"{theirs}.optim.lr")
    result.copy(f"{ours}.weight_decay", f"{theirs}.optim.weight_decay", float)
    for place, name in enumerate(("beta1", "beta2")):
        result.copy(f"{ours}.{name}", f"{theirs}.optim.betas", lambda betas, place=place: float(betas[place]))
    result.copy(f"{ours}.max_grad_norm", f"{theirs}.grad_clip", float)
    if (keys(f"{theirs}.optim.lr_warmup_steps") or 0) > 0:
        result.copy(f"{ours}.warmup_steps", f"{theirs}.optim.lr_warmup_steps")
    elif keys(f"{theirs}.optim.lr_warmup_steps_ratio") and "trainer.total_training_steps" in keys.given:
        share, steps = keys(f"{theirs}.optim.lr_warmup_steps_ratio"), keys("trainer.total_training_steps")
        names = (f"{theirs}.optim.lr_warmup_steps_ratio", "trainer.total_training_steps")
        result.put(f"{ours}.warmup_steps", int(share * steps), *names)
    for name in ("warmup_style", "lr_scheduler_type", "lr_decay_style"):
        if keys.given.get(f"{theirs}.optim.{name}") in DECAYS:
            result.copy(f"{ours}.lr_decay", f"{theirs}.optim.{name}")
    result.copy(f"{ours}.min_lr", f"{theirs}.optim.min_lr_ratio", lambda ratio: float(ratio * rate))


def _critic(keys: _Keys, result: _Result) -> None:
    if keys("algorithm.adv_estimator") != "gae":
        keys.used |= {name for name in keys.given if name.startswith("critic.") or name == "trainer.critic_warmup"}
        return
    _optimizer(keys, result, "critic", "critic.optimizer")
    result.copy("critic.value_clip", "critic.cliprange_value", float)
    result.copy("critic.warmup_steps", "trainer.critic_warmup")


def _dapo(keys: _Keys, result: _Result) -> None:
    groups = "algorithm.filter_groups"
    if keys(f"{groups}.enable") is True:
        result.put("dynamic_sampling.enabled", True, f"{groups}.enable")
        if (keys(f"{groups}.max_num_gen_batches") or 0) > 0:
            result.copy("dynamic_sampling.max_rounds", f"{groups}.max_num_gen_batches")
        keys.used.add(f"{groups}.metric")  # acc, score, seq_reward: with one reward function they are the reward
        result.copy("dynamic_sampling.prompts_per_round", "data.gen_batch_size")
    else:
        keys.used |= {name for name in keys.given if name.startswith(groups) or name == "data.gen_batch_size"}
    for group in ("reward_model", "custom_reward_function", "reward.reward_kwargs"):
        buffer = f"{group}.overlong_buffer" if group != "reward.reward_kwargs" else f"{group}.overlong_buffer_cfg"
        if keys(f"{buffer}.enable") is True:
            factor = keys(f"{buffer}.penalty_factor")
            result.put("reward.overlong_factor", float(1.0 if factor is None else factor), f"{buffer}.enable")
            result.copy("reward.overlong_buffer", f"{buffer}.len")
        keys.used.add(f"{buffer}.log")


def _correction(keys: _Keys, result: _Result) -> None:
    group = "algorithm.rollout_correction"
    if keys(f"{group}.rollout_is") in ("token", "sequence"):
        result.copy("rollout_correction.level", f"{group}.rollout_is")
        result.copy("rollout_correction.upper", f"{group}.rollout_is_threshold", float)
    else:
        keys.used.add(f"{group}.rollout_is_threshold")


def _trainer(keys: _Keys, result: _Result) -> None:
    result.copy("trainer.total_steps", "trainer.total_training_steps")
    result.copy("trainer.epochs", "trainer.total_epochs")
    loggers = keys.given.get("trainer.logger")
    if loggers is not None:
        loggers = [loggers] if isinstance(loggers, str) else loggers
        ours = [name for name in get_args(Logger) if name in {"console", "jsonl", *loggers}]
        result.put("trainer.loggers", ours, "trainer.logger")
        if set(loggers) <= set(ours):
            keys.used.add("trainer.logger")
    result.copy("trainer.project_name", "trainer.project_name", str)
    result.copy("trainer.experiment_name", "trainer.experiment_name", str)
    if keys("trainer.rollout_data_dir"):
        result.put("trainer.save_rollouts", True, "trainer.rollout_data_dir")
    path = keys("custom_reward_function.path")
    if path:
        name = keys("custom_reward_function.name") or "compute_score"
        result.put("reward.functions", [{"name": f"{path}:{name}"}], "custom_reward_function.path")
    result.flag("load_sft_checkpoint_infer", "model.path")
    result.flag("load_ref_checkpoint", "ref.model.path")
    if keys("algorithm.adv_estimator") == "gae":
        result.flag("load_critic_checkpoint", "critic.model.path")
