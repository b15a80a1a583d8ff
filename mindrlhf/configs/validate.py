"""Checks across settings, before anything is built.

Each failure is one sentence that names the remedy. A single value's type and range are checked where it is read
(`loading.py`, `model_yaml.py`). Checks that need the data or the devices follow where those are known.
"""

from math import lcm

from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_names import SHAPE_FIELDS
from mindrlhf.configs.model_settings import GROUP
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.sft import SFTConfig
from mindrlhf.configs.validate_algorithm import check_algorithm
from mindrlhf.errors import UserError

# Advantages (`algorithms/advantages.py`) that compare the responses to one prompt with each other.

DTYPE_KEYS = ("compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type")


def check_grpo(
    config: GRPOConfig,
    train: ModelYaml,
    infer: ModelYaml,
    train_model: ModelConfig,
    infer_model: ModelConfig,
    workers: int,
) -> None:
    """Check the settings of a GRPO run against one another.

    train_model, infer_model: the architectures that the two YAMLs (and the checkpoint) give.
    workers: processes that were started. Raises UserError.
    """
    if train.context.device_target != infer.context.device_target:
        raise UserError(
            f"{infer.path}: context.device_target is {infer.context.device_target}, and {train.path} has "
            f"{train.context.device_target}; set both to the same."
        )
    for yaml, model in ((train, train_model), (infer, infer_model)):
        check_dtypes(yaml)
        check_layout(yaml, model, workers)
    check_training_layout(train, model, config.train.length_bucket)
    check_generating_layout(infer)
    check_same_model(train, infer, train_model, infer_model)
    check_sampling(config)
    check_algorithm(config, infer)
    check_batch(config, train, infer)
    check_optimizer(config)
    check_trainer(config)


def check_sft(config: SFTConfig, yaml: ModelYaml, model: ModelConfig, workers: int) -> None:
    """Check the settings of a fine-tuning run against one another.

    The arguments are those of `check_grpo`. Raises UserError.
    """
    check_dtypes(yaml)
    check_layout(yaml, model, workers)
    check_training_layout(yaml, model, config.train.length_bucket)
    check_optimizer(config)
    pairs, ranks = config.data.pairs_per_step, yaml.parallel.data_parallel
    if pairs % ranks:
        raise UserError(
            f"data.pairs_per_step is {pairs}, which the data_parallel {ranks} of {yaml.path} does not divide; "
            f"set data.pairs_per_step to {_multiples(pairs, ranks)}."
        )


def check_training_layout(yaml: ModelYaml, model: ModelConfig, length_bucket: int) -> None:
    """Check `parallel_config` for training. Raises UserError."""
    layout = yaml.parallel
    check_recompute(yaml)
    if layout.use_seq_parallel and length_bucket % layout.model_parallel:
        raise UserError(
            f"train.length_bucket is {length_bucket}, and with use_seq_parallel of {yaml.path} rows are split over "
            f"model_parallel {layout.model_parallel} ranks; set train.length_bucket to "
            f"{_multiples(length_bucket, layout.model_parallel)}."
        )


def check_recompute(yaml: ModelYaml) -> None:
    """Check that what is to be recomputed can be. Raises UserError.

    Pipeline stages can; without stages only the CPU's fused halves of layers can.
    With MindSpore 2.9's own (`Cell.recompute()`) some shapes fail to compile on CPU, with a topological cycle.
    """
    recompute, layout = yaml.recompute.recompute, yaml.parallel
    if not recompute:
        return
    shown = list(recompute) if isinstance(recompute, tuple) else recompute
    where = f"{yaml.path}: recompute_config.recompute is {shown}"
    if recompute is not True:
        raise UserError(f"{where}, and all layers are computed again, not a number of them; set it to True.")
    if layout.pipeline_stage > 1:
        return
    if yaml.context.device_target != "CPU":
        raise UserError(
            f"{where}, and with one pipeline stage layers on {yaml.context.device_target} keep their activations; set "
            "it to False and lower train.max_tokens_per_micro_batch, or set parallel_config.pipeline_stage to 2 or "
            "more: stages compute theirs again."
        )


def check_generating_layout(yaml: ModelYaml) -> None:
    """Check `parallel_config` for generation. Raises UserError."""
    if yaml.parallel.pipeline_stage != 1:
        raise UserError(
            f"{yaml.path}: parallel_config.pipeline_stage is {yaml.parallel.pipeline_stage}, and generation runs in "
            "one stage; set it to 1 and give the ranks to data_parallel or model_parallel."
        )
    if yaml.parallel.use_seq_parallel:
        raise UserError(
            f"{yaml.path}: parallel_config.use_seq_parallel is True, and generation has one position of each sequence "
            "at a time, which cannot be split; set it to False."
        )


def check_layout(yaml: ModelYaml, model: ModelConfig, workers: int) -> None:
    """Check that the layout takes all workers and divides the model. Raises UserError."""
    layout = yaml.parallel
    if layout.workers != workers:
        raise UserError(
            f"{yaml.path}: data_parallel {layout.data_parallel} x model_parallel {layout.model_parallel} x "
            f"pipeline_stage {layout.pipeline_stage} is {layout.workers}, and the workers started are {workers}; start "
            f"{layout.workers} (msrun --worker_num={layout.workers}), or set parallel_config to a product of {workers}."
        )
    tensor = layout.model_parallel
    for key in ("num_heads", "hidden_size", "intermediate_size", "vocab_size"):
        size = getattr(model, key)
        if size % tensor:
            raise UserError(
                f"{yaml.path}: parallel_config.model_parallel {tensor} does not divide {key} {size}; "
                f"set model_parallel to one of {_list(_tensor_ranks(model, tensor))}."
            )
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        raise UserError(
            f"{yaml.path}: parallel_config.model_parallel {tensor} and n_kv_heads {model.num_kv_heads} do not divide "
            f"one another; set model_parallel to one of {_list(_tensor_ranks(model, tensor))}."
        )
    stages = layout.pipeline_stage
    if stages > model.num_layers:
        raise UserError(
            f"{yaml.path}: parallel_config.pipeline_stage {stages} is more than the model's {model.num_layers} layers; "
            f"set it to {model.num_layers} or fewer."
        )
    if layout.micro_batch_num < stages:
        raise UserError(
            f"{yaml.path}: parallel_config.micro_batch_num {layout.micro_batch_num} is fewer than pipeline_stage "
            f"{stages}, which leaves stages without work; set it to {stages} or more."
        )


def check_dtypes(yaml: ModelYaml) -> None:
    """Check for float32 on CPU, which has no other matrix products.

    Raises UserError.
    """
    if yaml.context.device_target != "CPU":
        return
    for key in DTYPE_KEYS:
        dtype = getattr(yaml.model, key)
        if dtype != "float32":
            raise UserError(
                f"{yaml.path}: {GROUP}.{key} is {dtype}, and device_target CPU computes in float32 only; "
                f"set {key}: float32."
            )


def check_same_model(train: ModelYaml, infer: ModelYaml, train_model: ModelConfig, infer_model: ModelConfig) -> None:
    """Check that both YAMLs describe one architecture. Raises UserError.

    The trained weights are the ones that generate.
    """
    if train_model.family != infer_model.family:
        raise UserError(
            f"{infer.path}: the model is a {infer_model.family}, and that of {train.path} a {train_model.family}; "
            "give two YAMLs of one model."
        )
    for key, name in SHAPE_FIELDS.items():
        ours, theirs = getattr(infer_model, name), getattr(train_model, name)
        if ours != theirs:
            raise UserError(
                f"{infer.path}: {GROUP}.{key} is {ours}, and {train.path} has {theirs}; "
                f"set both to the value of the model that is trained."
            )


def check_sampling(config: GRPOConfig) -> None:
    """Check that sampling gives different responses to a prompt. Raises UserError.

    They have to differ only where the advantage compares them.
    """
    rollout, advantage = config.rollout, config.algorithm.advantage
    if rollout.min_new_tokens > rollout.max_new_tokens:
        raise UserError(
            f"rollout.min_new_tokens is {rollout.min_new_tokens}, more than rollout.max_new_tokens "
            f"{rollout.max_new_tokens}; set it to {rollout.max_new_tokens} or fewer."
        )
    if config.algorithm.method.compares:
        if rollout.num_generations == 1:
            raise UserError(
                f"rollout.num_generations is 1, and algorithm.advantage {advantage!r} compares the responses to one "
                "prompt; set it to 2 or more."
            )
        if rollout.temperature == 0:
            raise UserError(
                f"rollout.temperature is 0 (greedy, or do_sample: False in the predict YAML), and algorithm.advantage "
                f"{advantage!r} learns from different responses to one prompt; set it above 0, 1.0 for example."
            )


def check_batch(config: GRPOConfig, train: ModelYaml, infer: ModelYaml) -> None:
    """Check that a step's prompts divide over ranks and updates. Raises UserError.

    The ranks are those that generate, and those that train.
    """
    prompts, updates = config.data.prompts_per_step, config.algorithm.updates_per_iteration
    train_ranks, infer_ranks = train.parallel.data_parallel, infer.parallel.data_parallel
    unit = lcm(infer_ranks, train_ranks * updates)
    fix = f"set data.prompts_per_step to {_multiples(prompts, unit)}"
    for yaml, ranks in ((train, train_ranks), (infer, infer_ranks)):
        if prompts % ranks:
            raise UserError(
                f"data.prompts_per_step is {prompts}, which the data_parallel {ranks} of {yaml.path} does not divide; "
                f"{fix}."
            )
    if prompts % (train_ranks * updates):
        over = f" x data_parallel {train_ranks} of {train.path}" if train_ranks > 1 else ""
        raise UserError(
            f"data.prompts_per_step is {prompts}, which algorithm.updates_per_iteration {updates}{over} does not "
            f"divide (mini-batches are cut between groups); {fix}, or change updates_per_iteration."
        )


def check_optimizer(config: GRPOConfig | SFTConfig) -> None:
    """Check that the learning rate decays downwards. Raises UserError."""
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UserError(
            f"optimizer.min_lr is {optimizer.min_lr:g}, above optimizer.lr {optimizer.lr:g}; set it to "
            f"{optimizer.lr:g} or less."
        )


def check_trainer(config: GRPOConfig) -> None:
    """Check that measuring has held-out problems and resuming has a path.

    Raises UserError.
    """
    trainer = config.trainer
    wanted = [key for key in ("val_only", "test_freq") if getattr(trainer, key)]
    if wanted and config.data.val_dataset is None:
        raise UserError(f"trainer.{wanted[0]} needs held-out problems; set data.val_dataset to a prompt MindRecord.")
    metric = trainer.save_best_metric
    if metric and metric.startswith("val-") and trainer.test_freq is None:
        raise UserError(
            f"trainer.save_best_metric is {metric}, which is measured every trainer.test_freq steps; set test_freq too."
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        raise UserError(
            f"trainer.resume_mode is {trainer.resume_mode} and trainer.resume_from_path is {trainer.resume_from_path}; "
            "a path goes with resume_path, or give --resume_training PATH."
        )


def check_lengths(
    config: GRPOConfig, yaml: ModelYaml, model: ModelConfig, prompt_tokens: int, group: str = "rollout"
) -> None:
    """Check that the longest prompt and response fit into the model.

    prompt_tokens: tokens of the longest prompt, or the limit that prompts are cut to.
    group: `rollout` or `validation`, whose max_new_tokens counts. Raises UserError.
    """
    most = (config.rollout if group == "rollout" else config.validation.completed(config.rollout)).max_new_tokens
    limits = {f"{GROUP}.max_position_embedding": model.max_position_embeddings}
    if yaml.model.seq_length is not None:
        limits[f"{GROUP}.seq_length"] = yaml.model.seq_length
    key, limit = min(limits.items(), key=lambda item: item[1])
    needed = prompt_tokens + most
    if needed > limit:
        room = limit - prompt_tokens
        shorter = f"set {group}.max_new_tokens to {room} or fewer, or " if room > 0 else "use shorter prompts, or "
        raise UserError(
            f"{yaml.path}: prompts of up to {prompt_tokens} tokens with {group}.max_new_tokens {most} need {needed} "
            f"positions, and {key} is {limit}; {shorter}raise {key.rpartition('.')[2]} to {needed} or more."
        )


def _multiples(value: int, unit: int) -> str:
    """List the multiples of `unit` around `value`, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _tensor_ranks(model: ModelConfig, most: int) -> list[int]:
    """List tensor-parallel ranks below `most` that divide the model, 1 first."""
    sizes = (model.num_heads, model.hidden_size, model.intermediate_size, model.vocab_size)
    kv = model.num_kv_heads
    return [n for n in range(1, most) if all(size % n == 0 for size in sizes) and (kv % n == 0 or n % kv == 0)]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
