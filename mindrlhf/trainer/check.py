"""Checking of a command line into a job, before MindSpore is imported."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.backend.process.launch import is_first_process, started_workers, under_msrun
from mindrlhf.checkpoint.adapted import with_adapters
from mindrlhf.checkpoint.open import checkpoint_config, open_tokenizer
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_names import SHAPE_FIELDS
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml
from mindrlhf.configs.validate import check_dropout, check_grpo
from mindrlhf.configs.verl.translation import translate
from mindrlhf.errors import UserError
from mindrlhf.files.naming import DEFAULT_FOLDER
from mindrlhf.job import Job
from mindrlhf.rollout.generator import refuse_critic
from mindrlhf.run.outputs import prepare_outputs


def check(args: argparse.Namespace) -> Job:
    """Read and check all settings. Raises UserError."""
    args, config, train, infer = read_settings(args)
    policy_path = args.load_sft_checkpoint_train or args.load_sft_checkpoint_infer
    reference_path = args.load_ref_checkpoint or policy_path
    critic_path = args.load_critic_checkpoint or policy_path
    workers = started_workers()
    if args.use_parallel and not under_msrun():
        raise UserError("--use_parallel is True without msrun; start it with msrun, or set it to False.")
    if args.use_parallel is False and workers > 1:
        raise UserError(f"--use_parallel is False, and msrun started {workers} workers; set it to True.")
    if not args.replay and not args.mind_dataset_dir:
        raise UserError("--mind_dataset_dir is missing; give the prompt MindRecord that rlhf_data.py wrote.")
    model = read_model(args, config, train, infer, workers)
    if config.algorithm.beta > 0:
        refuse_critic(reference_path, checkpoint_config(reference_path))
        check_same_architecture(reference_path, model, "reference model", "load_ref_checkpoint")
    if config.algorithm.uses_critic:
        check_same_architecture(critic_path, model, "critic", "load_critic_checkpoint")
    tokenizer = open_tokenizer(args, policy_path)
    output = prepare_outputs(args.save_ckpt_dir, args.output_dir, args.save_data_file)
    return Job(args, config, train, infer, model, tokenizer, policy_path, reference_path, critic_path, output)


def read_model(
    args: argparse.Namespace, config: GRPOConfig, train: ModelYaml, infer: ModelYaml, workers: int
) -> ModelConfig:
    """Read the model that is trained, with adapters, and check the settings with it.

    workers: processes that were started, or that the YAMLs ask for. Raises UserError.
    """
    infer_path = args.load_sft_checkpoint_infer
    path = args.load_sft_checkpoint_train or infer_path
    hf = checkpoint_config(path)
    refuse_critic(path, hf)
    model = train.architecture(hf, path or "")
    infer_model = infer.architecture(checkpoint_config(infer_path) or hf, infer_path or path or "")
    check_grpo(config, train, infer, model, infer_model, workers)
    model = with_adapters(model, config.lora, path)
    check_dropout(train, model.dropout)
    return model


def read_settings(args: argparse.Namespace) -> tuple[argparse.Namespace, GRPOConfig, ModelYaml, ModelYaml]:
    """Read flags, `--from-verl`, the run's settings, and both model YAMLs. Raises UserError."""
    overrides = split_overrides(args.overrides)
    if args.from_verl is not None:
        args, overrides[""] = from_verl(args, overrides[""])
    train = load_model_yaml(args.sft_path_train, overrides["train_yaml"])
    infer = load_model_yaml(args.sft_path_infer, overrides["infer_yaml"])
    defaults = {**infer.sampling_defaults(), **train.adapter_defaults()}
    config = load_grpo_config(args.grpo_config, overrides[""], defaults)
    return args, with_resume(config, args.resume_training), train, infer


def from_verl(args: argparse.Namespace, overrides: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Put flags and overrides of `--from-verl` beneath the given ones, and print them."""
    translation = translate(args.from_verl)
    if is_first_process():
        print(translation, flush=True)
    merged = dict(vars(args))
    for name, value in translation.flags.items():
        if merged[name] is None or merged[name] is DEFAULT_FOLDER:
            merged[name] = Path(value) if merged[name] is DEFAULT_FOLDER else value
    return argparse.Namespace(**merged), [*translation.overrides, *overrides]


def with_resume(config: GRPOConfig, flag: str | None) -> GRPOConfig:
    """Apply `--resume_training`: auto or True, never or False, or a path."""
    if flag is None:
        return config
    modes = {"auto": "auto", "true": "auto", "never": "disable", "false": "disable"}
    mode = modes.get(flag.lower(), "resume_path")
    path = flag if mode == "resume_path" else None
    trainer = config.trainer.model_copy(update={"resume_mode": mode, "resume_from_path": path})
    return config.model_copy(update={"trainer": trainer})


def check_same_architecture(path: str | None, model: ModelConfig, what: str, flag: str) -> None:
    """Check that a checkpoint has the architecture that is trained, rotary base included."""
    stored = checkpoint_config(path)
    for name in SHAPE_FIELDS.values() if stored else ():
        if name == "tie_word_embeddings" and stored.value_head:
            continue
        theirs, ours = getattr(stored, name), getattr(model, name)
        if theirs != ours:
            found = f"{path}: the {what}'s {name} is {theirs}, and the model that is trained has {ours}"
            raise UserError(f"{found}; give --{flag} a checkpoint of the same architecture.")


def split_overrides(
    overrides: Sequence[str], yamls: Sequence[str] = ("train_yaml", "infer_yaml")
) -> dict[str, list[str]]:
    """Split overrides by their prefix `train_yaml.` or `infer_yaml.`, or none for the run's own."""
    split: dict[str, list[str]] = {name: [] for name in ("", *yamls)}
    for override in overrides:
        prefix, _, rest = override.partition(".")
        if prefix in yamls:
            split[prefix].append(rest)
        else:
            split[""].append(override)
    return split
