"""Checks across settings, before anything is built; each raises UserError.

A value's type and range are checked when it is read, the data and the devices when they are known.
"""

from collections.abc import Iterable
from math import inf, lcm
from operator import attrgetter

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.algorithms.kl_names import check_kl_estimator
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.algorithms.methods import Methods, unknown_name
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.configs.expert_checks import check_expert_parallel, check_experts, check_spread_dropout
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_settings import GROUP, differences, shape
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.placement import check_workers
from mindrlhf.configs.problems import number
from mindrlhf.configs.run import HELD_OUT, RunSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.sharing_checks import check_shared_weights
from mindrlhf.errors import UserError
from mindrlhf.user_functions import is_user_function

# Pairs of settings; the first must not be above the second. Fine-tuning has the first pair too.
ORDER = (
    ("optimizer.min_lr", "optimizer.lr"),
    ("rollout.min_new_tokens", "rollout.max_new_tokens"),
    ("rollout_correction.lower", "rollout_correction.upper"),
    ("reward.overlong_buffer", "rollout.max_new_tokens"),
)


def check_grpo(
    config: GRPOSettings,
    train: ModelYaml,
    infer: ModelYaml,
    train_model: ModelConfig,
    infer_model: ModelConfig,
    workers: int,
    scorers: int = 0,
) -> None:
    """Check the settings of a GRPO run against one another.

    train_model, infer_model: the architectures that the two YAMLs (and the checkpoint) give.
    workers: processes that were started. scorers: ranks that only score.
    """
    ours, theirs = infer.context.device_target, train.context.device_target
    if ours != theirs:
        found = f"{infer.path}: context.device_target is {ours}, and {train.path} has {theirs}"
        raise UserError(f"{found}; set both to one.")
    check_workers(train, infer, config.trainer.placement, workers, scorers)
    for yaml, model in ((train, train_model), (infer, infer_model)):
        check_device(yaml, model)
        check_layout(yaml, model, yaml.parallel.workers if infer.first_rank else workers)
    check_training_layout(train, config.train.length_bucket)
    check_shared_weights(train, config.lora.dropout, config.rollout.routing_replay)
    check_generating_layout(infer)
    check_same_model(train, infer, train_model, infer_model)
    check_order(config, ORDER)
    check_comparison(config)
    check_algorithm(config.algorithm)
    check_batch(config, train, infer)
    check_dynamic_sampling(config, infer)
    check_experts(config, infer, train_model)
    held_out = "held-out problems; set data.val_dataset to a prompt MindRecord"
    check_trainer(config.trainer, config.data.val_dataset is not None, held_out)
    check_lora(config.lora)
    check_reference(config)


def check_sft(config: SFTSettings, yaml: ModelYaml, model: ModelConfig, workers: int) -> None:
    """Check the settings of a fine-tuning run against one another, as `check_grpo`."""
    check_device(yaml, model)
    check_layout(yaml, model, workers)
    check_training_layout(yaml, config.train.length_bucket)
    check_shared_weights(yaml, config.lora.dropout)
    check_order(config, ORDER[:1])
    check_held_out_pairs(config)
    check_lora(config.lora)
    _check_ranks(yaml, "data.pairs_per_step", config.data.pairs_per_step)
    if config.data.val_problems:
        check_generating_layout(yaml)


def check_held_out_pairs(config: SFTSettings) -> None:
    """Check that there is held-out data to measure, from one source."""
    data = config.data
    trainer = config.trainer
    pairs = data.val_dataset is not None or data.val_share > 0
    give = "held-out rows; set data.val_dataset, data.val_share or data.val_problems"
    check_trainer(trainer, pairs or data.val_problems is not None, give)
    if data.val_dataset and data.val_share:
        given = f"data.val_share is {data.val_share:g} and data.val_dataset is {data.val_dataset}"
        raise UserError(f"{given}; give one of them.")
    if trainer.best[0] == "val/loss" and not pairs:
        right = "set data.val_dataset or data.val_share"
        raise UserError(f"trainer: val/loss is measured on held-out rows; {right}.")


def check_training_layout(yaml: ModelYaml, length_bucket: int) -> None:
    if yaml.parallel.use_seq_parallel:
        ranks = yaml.parallel.model_parallel
        name = f"the model_parallel {ranks} of {yaml.path}, which has use_seq_parallel,"
        check_divides("train.length_bucket", length_bucket, ranks, name)


def check_generating_layout(yaml: ModelYaml) -> None:
    layout = yaml.parallel
    where = f"{yaml.path}: parallel_config"
    if layout.pipeline_stage != 1:
        found = f"{where}.pipeline_stage is {layout.pipeline_stage}"
        raise UserError(f"{found}, and generation runs in one stage; set it to 1.")
    if layout.use_seq_parallel:
        raise UserError(
            f"{where}.use_seq_parallel is True, and generation has one position at a time; set it to False."
        )


def check_layout(yaml: ModelYaml, model: ModelConfig, workers: int) -> None:
    """Check that the layout uses all workers and divides the model."""
    layout = yaml.parallel
    where = f"{yaml.path}: parallel_config"
    tensor = layout.model_parallel
    stages = layout.pipeline_stage
    if layout.workers != workers:
        product = layout.workers
        factors = f"data_parallel {layout.data_parallel} x model_parallel {tensor} x pipeline_stage {stages}"
        start = f"start {product} (msrun --worker_num={product}), or set parallel_config to a product of {workers}"
        raise UserError(f"{yaml.path}: {factors} is {product}, and the workers started are {workers}; {start}.")
    if misfit := _misfit(model, tensor):
        right = ", ".join(str(ranks) for ranks in range(1, tensor) if not _misfit(model, ranks))
        raise UserError(f"{where}.model_parallel {tensor} {misfit}; set model_parallel to one of {right}.")
    check_expert_parallel(yaml, model)
    if stages > model.num_layers:
        found = f"{where}.pipeline_stage {stages} is more than the model's {model.num_layers} layers"
        raise UserError(f"{found}; set it to {model.num_layers} or fewer.")
    if layout.micro_batch_num < stages:
        found = f"{where}.micro_batch_num {layout.micro_batch_num} is fewer than pipeline_stage {stages}"
        raise UserError(f"{found}; set it to {stages} or more.")


def _misfit(model: ModelConfig, ranks: int) -> str:
    """Explain why tensor-parallel ranks cannot share a model; empty if they can."""
    sizes = {key: getattr(model, key) for key in ("num_heads", "hidden_size", "vocab_size")} | model.inner_widths
    for key, size in sizes.items():
        if size % ranks:
            return f"does not divide {key} {size}"
    heads = model.num_kv_heads
    return f"and n_kv_heads {heads} do not divide one another" if heads % ranks and ranks % heads else ""


def check_device(yaml: ModelYaml, model: ModelConfig) -> None:
    """Check that the device has products of the dtype, and attention for the heads.

    The dtype `auto` becomes one of the device's.
    """
    dtype = yaml.model.compute_dtype
    where = f"{yaml.path}: {GROUP}.compute_dtype"
    device = yaml.context.device
    if dtype != "auto" and dtype not in device.product_dtypes:
        names = " or ".join(device.product_dtypes)
        found = f"{where} is {dtype}, and device_target {device.name} computes in {names} only"
        raise UserError(f"{found}; set it to {names}.")
    limits = device.attention
    size = model.head_dim
    if size % limits.head_dim_multiple or size > (limits.most_head_dim or size):
        most = f" of at most {limits.most_head_dim}" if limits.most_head_dim else ""
        takes = f"attention on {device.name} takes multiples of {limits.head_dim_multiple}{most}"
        raise UserError(f"{yaml.path}: {GROUP}: head_dim is {size}, and {takes}; train another model there.")


def check_same_model(train: ModelYaml, infer: ModelYaml, train_model: ModelConfig, infer_model: ModelConfig) -> None:
    ours, theirs = ({"family": model.family} | shape(model) for model in (infer_model, train_model))
    if found := differences(ours, theirs, train.path):
        raise UserError(f"{infer.path}: {GROUP} is of another model: {found}; make them equal.")


def check_order(config: GRPOSettings | SFTSettings, pairs: Iterable[tuple[str, str]]) -> None:
    """Check that no first setting of a pair is above the second."""
    for key, limit in pairs:
        value, most = attrgetter(key)(config), attrgetter(limit)(config)
        if None not in (value, most) and value > most:
            shown = number(most)
            raise UserError(f"{key} is {number(value)}, above {limit} {shown}; set it to {shown} or less.")


def check_divides(key: str, value: int, divisor: int, name: str, unit: int | None = None) -> None:
    """Check that a divisor, called `name`, divides a setting; suggest multiples of `unit`."""
    if value % divisor:
        unit = unit or divisor
        below = value // unit * unit
        right = f"{below} or {below + unit}" if below else unit
        raise UserError(f"{key} is {value}, which {name} does not divide; set {key} to {right}.")


def check_comparison(config: GRPOSettings) -> None:
    """Check that responses to a prompt can differ if the advantage compares them."""
    if not config.algorithm.method.compares:
        return
    asks = f"algorithm.advantage {config.algorithm.advantage!r} compares"
    if config.rollout.num_generations == 1:
        found = f"rollout.num_generations is 1, and {asks} the responses to one prompt"
        raise UserError(f"{found}; set it to 2 or more.")
    if config.rollout.temperature == 0:
        found = f"rollout.temperature is 0 (or do_sample False), and {asks} different responses"
        raise UserError(f"{found}; set it above 0.")


def check_batch(config: GRPOSettings, train: ModelYaml, infer: ModelYaml) -> None:
    """Check that a step's prompts divide over all ranks and updates."""
    key = "data.prompts_per_step"
    prompts = config.data.prompts_per_step
    updates = config.algorithm.updates_per_iteration
    ranks = train.parallel.data_parallel
    unit = lcm(infer.parallel.data_parallel, ranks * updates)
    over = f" x data_parallel {ranks} of {train.path}" if ranks > 1 else ""
    for yaml in (train, infer):
        _check_ranks(yaml, key, prompts, unit)
    check_divides(key, prompts, ranks * updates, f"algorithm.updates_per_iteration {updates}{over}", unit)


def _check_ranks(yaml: ModelYaml, key: str, value: int, unit: int | None = None) -> None:
    ranks = yaml.parallel.data_parallel
    check_divides(key, value, ranks, f"the data_parallel {ranks} of {yaml.path}", unit)


def check_dynamic_sampling(config: GRPOSettings, infer: ModelYaml) -> None:
    """Check that rounds of additional prompts can fill a step."""
    sampling = config.dynamic_sampling
    prompts = config.data.prompts_per_step
    if not sampling.enabled:
        return
    size = sampling.prompts_per_round or prompts
    names = [function.name.rpartition(":")[2] for function in config.reward.all_functions]
    if config.rollout.num_generations == 1:
        found = "dynamic_sampling.enabled compares rewards in a group, and rollout.num_generations is 1"
        raise UserError(f"{found}; set it to 2 or more.")
    if sampling.metric is not None and sampling.metric not in names:
        found = f"dynamic_sampling.metric is {sampling.metric!r}, which is none of reward.functions"
        raise UserError(f"{found}; give one of {', '.join(names)}.")
    if size * sampling.max_rounds < prompts:
        found = f"{sampling.max_rounds} rounds of {size} prompts are fewer than data.prompts_per_step {prompts}"
        raise UserError(f"dynamic_sampling: {found}; set max_rounds to {-(-prompts // size)} or more.")
    _check_ranks(infer, "dynamic_sampling.prompts_per_round", size)


def check_trainer(trainer: RunSettings, measured: bool, give: str) -> None:
    """Check for held-out data, a metric to watch, and a path to resume from.

    measured: whether there is held-out data. give: the settings that provide it, for messages.
    """
    if not measured:
        for key in ("val_only", "test_freq"):
            if getattr(trainer, key):
                raise UserError(f"trainer.{key} needs {give}.")
    best, _ = trainer.best
    if best and best.startswith(HELD_OUT) and trainer.test_freq is None:
        found = f"trainer.save_best_metric is {best}, which is measured every trainer.test_freq steps"
        raise UserError(f"{found}; set test_freq too.")
    for key in ("early_stop_patience", "export_best"):
        if getattr(trainer, key) and not best:
            raise UserError(f"trainer.{key} follows trainer.save_best_metric, which is null; name a metric there.")
    mode = trainer.resume_mode
    path = trainer.resume_from_path
    if (mode == "resume_path") != (path is not None):
        found = f"trainer.resume_mode is {mode} and trainer.resume_from_path is {path}"
        raise UserError(f"{found}; a path goes with resume_path, or give --resume_training PATH.")


def check_lora(lora: LoraSettings) -> None:
    """Check that adapters are switched on if any of their settings is changed."""
    changed = [name for name, field in LoraSettings.model_fields.items() if getattr(lora, name) != field.default]
    if changed and not lora.enabled:
        found = f"lora.{changed[0]} is {getattr(lora, changed[0])!r}, and lora.rank 0 means that there are no adapters"
        raise UserError(f"{found}; set lora.rank, 16 for example, or remove lora.{changed[0]}.")


def check_dropout(yaml: ModelYaml, dropout: float) -> None:
    """Check that layers with adapter dropout have products of the activations' dtype.

    dropout: rate of the adapters.
    """
    check_spread_dropout(yaml, dropout)
    dtype = yaml.model.compute_dtype
    device = yaml.context.device
    activations = device.activations(dtype)
    if dropout and activations != dtype:
        raise UserError(
            f"{yaml.path}: {GROUP}.compute_dtype is {dtype}, and with lora.dropout {dropout:g} updates run composed "
            f"layers, which are {activations} on {device.name}; set {activations}, or train without dropout."
        )


def check_reference(config: GRPOSettings) -> None:
    """Check that a reference updated from adapters has adapters, and copies them whole."""
    steps = config.algorithm.reference_sync_steps
    share = config.algorithm.reference_sync_share
    reference = config.lora.reference
    if config.lora.enabled and steps and (reference == "base" or share != 1):
        given = f"algorithm.reference_sync_steps is {steps} with algorithm.reference_sync_share {share:g}"
        right = "set lora.reference to start and reference_sync_share to 1"
        raise UserError(f"{given} and lora.reference {reference}, and only adapters follow adapters, whole; {right}.")


def check_lengths(
    config: GRPOSettings | SFTSettings,
    yaml: ModelYaml,
    model: ModelConfig,
    prompt_tokens: int,
    group: str = "rollout",
) -> None:
    """Check that the longest prompt and response fit into the model.

    prompt_tokens: tokens of the longest prompt, or the limit that prompts are cut to.
    group: `rollout` or `validation`, whose max_new_tokens counts.
    """
    most = (config.rollout if group == "rollout" else config.held_out.sampling).max_new_tokens
    limits = {"max_position_embedding": model.max_position_embeddings, "seq_length": yaml.model.seq_length or inf}
    key, limit = min(limits.items(), key=lambda item: item[1])
    needed = prompt_tokens + most
    if needed > limit:
        room = limit - prompt_tokens
        shorter = f"set {group}.max_new_tokens to {room} or fewer" if room > 0 else "use shorter prompts"
        raise UserError(
            f"{yaml.path}: prompts of up to {prompt_tokens} tokens with {group}.max_new_tokens {most} need {needed} "
            f"positions, and {GROUP}.{key} is {limit}; {shorter}, or raise {key} to {needed} or more."
        )


def check_algorithm(algorithm: AlgorithmSettings) -> None:
    check_kl_estimator(algorithm.kl_estimator)
    if algorithm.aggregation not in MODES:
        raise unknown_name("aggregation", algorithm.aggregation, MODES)
    _check_options(algorithm, "advantage", ADVANTAGES)
    _check_options(algorithm, "policy_loss", POLICY_LOSSES)
    low, high = algorithm.clip_cov_lb, algorithm.clip_cov_ub
    if algorithm.normalize_functions and algorithm.kl_in_reward:
        found = "algorithm.normalize_functions does not normalise the KL term of kl_in_reward"
        raise UserError(f"{found}; set kl_in_reward to False.")
    if algorithm.kl_bias_correction and algorithm.kl_in_reward:
        found = "algorithm.kl_bias_correction is of the KL term in the loss, and kl_in_reward puts it elsewhere"
        raise UserError(f"{found}; keep one.")
    if algorithm.kl_bias_correction and algorithm.kl_estimator.endswith("+"):
        found = f"algorithm.kl_estimator {algorithm.kl_estimator} has an unbiased gradient"
        raise UserError(f"{found}; leave kl_bias_correction out.")
    if None not in (low, high) and low >= high:
        raise UserError(f"algorithm.clip_cov_lb is {low}, not below algorithm.clip_cov_ub {high}; lower it.")
    if algorithm.method.uses_teacher == (algorithm.teacher is None):
        given = f"algorithm.teacher is {algorithm.teacher}, and algorithm.advantage {algorithm.advantage}"
        if algorithm.teacher is None:
            raise UserError(f"{given} needs one; name an HF directory or a hub's id.")
        raise UserError(f"{given} learns from none; set advantage to distillation, or remove teacher.")
    for setting in ("kl_in_reward", "kl_target", "reference_sync_steps") if algorithm.beta == 0 else ():
        if value := getattr(algorithm, setting):
            absent = "algorithm.beta 0 means that there is no reference model"
            raise UserError(f"algorithm.{setting} is {value}, and {absent}; set beta above 0, or remove {setting}.")


def _check_options(algorithm: AlgorithmSettings, setting: str, methods: Methods) -> None:
    """Check a method and its options; a user's policy loss is checked later."""
    name = getattr(algorithm, setting)
    taken = {}
    if name in methods or methods is ADVANTAGES or not is_user_function(name):
        method = methods.find(name)
        taken = method.options
        method.checked(algorithm.options_of(method))
    for key, takers in methods.offered().items():
        if getattr(algorithm, key) is not None and key not in taken:
            given = f"algorithm.{key} is {getattr(algorithm, key)!r}, and algorithm.{setting} {name!r}"
            raise UserError(f"{given} has no such option (it belongs to {' and '.join(takers)}); remove it.")
