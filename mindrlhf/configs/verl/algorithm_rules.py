"""Translation of verl's algorithm keys: batches, rollouts, advantage, loss, KL, optimizers.

A rule reads keys, sets ours with `Result.put`, naming the keys that they follow from, and refuses unsupported ones.
"""

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.configs.verl.result import Keys, Result
from mindrlhf.errors import UserError

ADVANTAGE_NAMES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "gdpo": "grpo"}
LOSS_NAMES = {"vanilla": "clip", "clip-cov": "clip_cov", "kl-cov": "kl_cov"}
ESTIMATORS = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}  # verl's k3 is clamped: our low_var_kl
DECAYS = ("constant", "linear", "cosine")
DECAY_KEYS = ("warmup_style", "lr_scheduler_type", "lr_decay_style")
METRICS = ("acc", "score")
WITHOUT_LIMIT = 1_000_000  # rounds of dynamic sampling


def _batch(keys: Keys, result: Result) -> None:
    size = "data.train_batch_size"
    if keys.first("data.gen_batch_size") and keys("algorithm.filter_groups.enable") is not True:
        size = "data.gen_batch_size"  # what verl draws for a step; dynamic sampling takes train_batch_size of them
        result.needless["data.train_batch_size"] = "data.gen_batch_size goes before it in verl"
    prompts, mini = keys.number(size), keys.number("actor.ppo_mini_batch_size")
    if "actor.ppo_mini_batch_size" not in keys.given:
        mini = min(mini, prompts)
    if mini < 1 or prompts < 1 or prompts % mini:
        raise UserError(
            f"--from-verl: {size} {prompts} is no multiple of actor.ppo_mini_batch_size {mini}; change one of them."
        )
    result.put("data.prompts_per_step", prompts, size)
    result.put("algorithm.updates_per_iteration", prompts // mini, size, "actor.ppo_mini_batch_size")
    result.copy("algorithm.num_iterations", "actor.ppo_epochs")
    result.copy("data.shuffle", "data.shuffle")
    result.copy("seed", "data.seed")


def _micro_batch(keys: Keys, result: Result) -> None:
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
    tokens = keys.number("data.max_prompt_length") + keys.number(_response_length(keys))
    result.put(ours, rows * tokens, name, _response_length(keys), *dynamic)


def _response_length(keys: Keys) -> str:
    return keys.first("rollout.response_length") or "data.max_response_length"


def _rollout(keys: Keys, result: Result) -> None:
    result.copy("rollout.max_new_tokens", _response_length(keys))
    result.copy("rollout.num_generations", "rollout.n")
    if keys("rollout.do_sample") is False:
        result.put("rollout.temperature", 0.0, "rollout.do_sample")
    else:
        result.put(
            "rollout.temperature", keys("rollout.temperature"), "rollout.temperature", *keys.among("rollout.do_sample")
        )
    result.copy("rollout.top_k", "rollout.top_k", lambda k: max(0, k))
    for name in ("top_p", "repetition_penalty"):
        result.copy(f"rollout.{name}", f"rollout.{name}", float)
    result.copy("rollout.max_slots", "rollout.max_num_seqs")


def _advantage(keys: Keys, result: Result) -> None:
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
    if ours in ("gae", "reinforce_plus_plus"):
        result.copy("algorithm.gamma", "algorithm.gamma", float)
    if ours == "gae":
        result.copy("algorithm.lam", "algorithm.lam", float)


def _loss(keys: Keys, result: Result) -> None:
    mode = "actor.policy_loss.loss_mode"
    ours = LOSS_NAMES.get(keys(mode), keys(mode))
    if ours not in POLICY_LOSSES:
        result.refused[mode] = f"algorithm.policy_loss is one of {', '.join(POLICY_LOSSES)}"
        return
    result.put("algorithm.policy_loss", ours, mode)
    if ours not in ("gpg", "sapo", "kl_cov"):
        for side in ("low", "high"):
            theirs = keys.first(f"actor.clip_ratio_{side}") or "actor.clip_ratio"
            result.put(f"algorithm.epsilon_{side}", float(keys.number(theirs)), theirs)
    if ours == "clip":
        result.copy("algorithm.dual_clip", "actor.clip_ratio_c", float)
    if ours == "sapo":
        for side, name in (("positive", "tau_pos"), ("negative", "tau_neg")):
            theirs = keys.first(f"actor.{name}", f"actor.policy_loss.{name}")
            if theirs:
                result.copy(f"algorithm.tau_{side}", theirs, float)
    own = {"clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), "kl_cov": ("kl_cov_ratio", "ppo_kl_coef")}
    for option in own.get(ours, ()):
        result.copy(f"algorithm.{option}", f"actor.policy_loss.{option}", float)
    defined = POLICY_LOSSES[ours].aggregation
    if defined:
        result.put("algorithm.aggregation", defined, mode)
    elif keys("actor.use_token_level_loss") is True:
        result.put("algorithm.aggregation", "token-mean", "actor.use_token_level_loss")
    else:
        result.copy("algorithm.aggregation", "actor.loss_agg_mode")
    result.copy("algorithm.aggregation_tokens", "actor.loss_scale_factor")
    result.copy("algorithm.entropy_coef", "actor.entropy_coeff", float)


def _kl(keys: Keys, result: Result) -> None:
    places = {
        "actor.use_kl_loss": ("actor.kl_loss_coef", "actor.kl_loss_type"),
        "algorithm.use_kl_in_reward": ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
    }
    on = [switch for switch, (coefficient, _) in places.items() if keys(switch) is True and keys.number(coefficient)]
    if len(on) == 2:
        raise UserError(
            "--from-verl: actor.use_kl_loss and algorithm.use_kl_in_reward are both True, and the KL term is in one "
            "place here; set one of them to False."
        )
    for switch in keys.among(*places):
        if keys(switch) is True and switch not in on:
            result.put("algorithm.beta", 0.0, switch, places[switch][0])
    if not on:
        result.put("algorithm.beta", 0.0, *places)
        return
    (switch,), (other,) = on, (name for name in places if name not in on)
    coefficient, kind = places[switch]
    result.put("algorithm.beta", float(keys.number(coefficient)), coefficient, switch)
    result.copy("algorithm.kl_estimator", kind, _estimator)
    result.put("algorithm.kl_in_reward", switch == "algorithm.use_kl_in_reward", switch, *keys.among(other))
    if switch == "algorithm.use_kl_in_reward" and keys("algorithm.kl_ctrl.type") == "adaptive":
        result.put(
            "algorithm.kl_target",
            float(keys.number("algorithm.kl_ctrl.target_kl")),
            "algorithm.kl_ctrl.target_kl",
            "algorithm.kl_ctrl.type",
        )
        result.copy("algorithm.kl_horizon", "algorithm.kl_ctrl.horizon", int)


def _estimator(name: str) -> str:
    plain = str(name).removesuffix("+")
    return ESTIMATORS.get(plain, plain) + "+" * str(name).endswith("+")


def _optimizers(keys: Keys, result: Result) -> None:
    _optimizer(keys, result, "actor", "optimizer")


def _optimizer(keys: Keys, result: Result, theirs: str, ours: str) -> None:
    rate = keys.number(f"{theirs}.optim.lr")
    result.put(f"{ours}.lr", float(rate), f"{theirs}.optim.lr")
    result.copy(f"{ours}.weight_decay", f"{theirs}.optim.weight_decay", float)
    for place, name in enumerate(("beta1", "beta2")):
        result.copy(f"{ours}.{name}", f"{theirs}.optim.betas", lambda betas, place=place: float(betas[place]))
    norm = keys.first(f"{theirs}.optim.clip_grad", f"{theirs}.optim.grad_clip") or f"{theirs}.grad_clip"
    result.copy(f"{ours}.max_grad_norm", norm, float)
    _warm_up(keys, result, theirs, ours)
    style = keys.first(*(f"{theirs}.optim.{name}" for name in DECAY_KEYS))
    if style and keys(style) in DECAYS:
        result.copy(f"{ours}.lr_decay", style)
    elif style:
        result.refused[style] = f"optimizer.lr_decay is one of {', '.join(DECAYS)}"
    if keys(f"{theirs}.optim.min_lr") is not None:
        result.copy(f"{ours}.min_lr", f"{theirs}.optim.min_lr", float)
    else:
        result.copy(f"{ours}.min_lr", f"{theirs}.optim.min_lr_ratio", lambda ratio: float(ratio * rate))


def _warm_up(keys: Keys, result: Result, theirs: str, ours: str) -> None:
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


def _critic(keys: Keys, result: Result) -> None:
    if keys("algorithm.adv_estimator") != "gae":
        for name in [*keys.below("critic"), *keys.among("trainer.critic_warmup")]:
            result.needless[name] = "only the estimator gae has a critic"
        return
    _optimizer(keys, result, "critic", "critic.optimizer")
    result.copy("critic.value_clip", "critic.cliprange_value", float)
    result.copy("critic.warmup_steps", "trainer.critic_warmup")
    result.copy_flag("load_critic_checkpoint", "critic.model.path")
    for name in ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode"):
        if keys.first(f"critic.{name}"):
            if keys(f"critic.{name}") != keys(f"actor.{name}"):
                result.refused[f"critic.{name}"] = f"the critic has the actor's, {keys(f'actor.{name}')}"
            result.needless[f"critic.{name}"] = "the critic has the actor's"


def _dapo(keys: Keys, result: Result) -> None:
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


def _correction(keys: Keys, result: Result) -> None:
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
        result.put("rollout_correction.upper", float(cap), "actor.tis_imp_ratio_cap")


def _bound(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--from-verl: {name} is {text!r}, and should be a number, or two with _ between.") from None


RULES = (_batch, _micro_batch, _rollout, _advantage, _loss, _kl, _optimizers, _critic, _dapo, _correction)
