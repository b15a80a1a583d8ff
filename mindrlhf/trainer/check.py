"""Checking of flags and settings into a job, before MindSpore is imported."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from mindrlhf.backend.process.launch import is_first_process, started_workers, under_msrun
from mindrlhf.checkpoint.adapted import with_adapters
from mindrlhf.checkpoint.local import local_model, local_models
from mindrlhf.checkpoint.tokenizer import open_tokenizer
from mindrlhf.checkpoint.weights import checkpoint_config, hf_folder
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.job_yamls import read_model_yamls, read_train_yaml, split_overrides
from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_names import SHAPE_FIELDS
from mindrlhf.configs.model_settings import differences
from mindrlhf.configs.model_yaml import ModelYaml, rounds_rollouts
from mindrlhf.configs.placement import (
    SCORER_FLAG,
    SPLIT,
    Division,
    layout_beside,
    layout_of_scorers,
    placed,
    placed_behind,
)
from mindrlhf.configs.reward_models import RewardModelSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.sharing_checks import check_shared_weights
from mindrlhf.configs.staleness import CORRECTION, check_parts, check_staleness
from mindrlhf.configs.validate import (
    check_divides,
    check_dropout,
    check_grpo,
    check_layout,
    check_sft,
    check_training_layout,
)
from mindrlhf.configs.vision_checks import (
    check_frozen,
    check_seeing,
    check_seeing_alike,
    check_seeing_policy,
    check_tool_images,
)
from mindrlhf.configs.vision_settings import tower_shape
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.naming import DEFAULT_FOLDER
from mindrlhf.flags import SFTFlags, TrainFlags
from mindrlhf.job import NO_OBJECTS, Job, Objects
from mindrlhf.judging.checkpoint import open_scoring_model
from mindrlhf.metrics.trackers import check_installed
from mindrlhf.migration.mindrlhf.translation import MindRLHFTranslation, is_mindrlhfs, is_mindrlhfs_name
from mindrlhf.migration.mindrlhf.translation import translate as translate_mindrlhf
from mindrlhf.migration.other_names import answer
from mindrlhf.migration.verl.translation import translate
from mindrlhf.model_roles import BESIDE, GENERATOR, POLICY, ROLES, SCORE, Role, RoleModel, role_of
from mindrlhf.rollout.generator import refuse_critic
from mindrlhf.run.outputs import prepare_outputs

_log = logging.getLogger(__name__)

Run = TypeVar("Run", GRPOSettings, SFTSettings)


def check(flags: TrainFlags, objects: Objects = NO_OBJECTS) -> Job:
    """Read and check all settings; they may name `objects`. Raises UserError."""
    flags, config, yamls = read_settings(flags)
    check_installed(config.trainer.loggers)
    flags = local_models(flags)
    workers = started_workers()
    if flags.use_parallel and not under_msrun():
        raise UserError("--use_parallel is True without msrun; start it with msrun, or set it to False.")
    if flags.use_parallel is False and workers > 1:
        raise UserError(f"--use_parallel is False, and msrun started {workers} workers; set it to True.")
    if flags.replay and config.trainer.placement == SPLIT:
        raise UserError("--replay generates nothing, and trainer.placement is split; set it to colocated.")
    if not flags.replay and not flags.mind_dataset_dir:
        raise UserError("--mind_dataset_dir is missing; give the prompt MindRecord that rlhf_data.py wrote.")
    model = read_model(flags, config, yamls, workers)
    roles = read_roles(flags, config, model)
    check_seeing(model, roles[POLICY.name].path or yamls["train"].path)
    tokenizer = open_tokenizer(flags, roles[POLICY.name].path)
    for role in map(role_of, roles):
        if role.setting:
            check_same_tokens(role, roles[role.name].path, tokenizer)
    output = prepare_outputs(flags.save_ckpt_dir, flags.output_dir, flags.save_data_file)
    return Job(flags, config, yamls, roles, tokenizer, output, objects)


def check_tuning(flags: SFTFlags, objects: Objects = NO_OBJECTS) -> Job:
    """Read and check all settings of fine-tuning; they may name `objects`. Raises UserError."""
    overrides = split_overrides(flags.overrides, ("train_yaml",))
    yaml = read_train_yaml(flags, flags.load_sft_checkpoint_train, overrides)
    config = load_sft_config(flags.sft_config, overrides[""], yaml.adapter_defaults(), flags.settings, answer)
    check_installed(config.trainer.loggers)
    config = with_resume(config, flags.resume_training)
    flags = local_models(flags)
    checkpoint = flags.load_sft_checkpoint_train
    model = yaml.architecture(checkpoint_config(checkpoint, seeing=True), checkpoint or "")
    check_seeing(model, checkpoint or yaml.path)
    check_sft(config, yaml, model, started_workers())
    model = as_trained(model, config, yaml, checkpoint)
    tokenizer = open_tokenizer(flags, checkpoint)
    output = prepare_outputs(flags.save_ckpt_dir, flags.output_dir)
    roles = dict.fromkeys((POLICY.name, GENERATOR.name), RoleModel(checkpoint, model))
    yamls = {"train": yaml, "infer": yaml.generating}
    return Job(flags, config, yamls, roles, tokenizer, output, objects)


def read_model(flags: TrainFlags, config: GRPOSettings, yamls: Mapping[str, ModelYaml], workers: int) -> ModelConfig:
    """Read the model that is trained, with adapters, and check the settings with it.

    workers: processes that were started, or that the YAMLs ask for. Raises UserError.
    """
    train, infer = yamls["train"], yamls["infer"]
    infer_path = flags.load_sft_checkpoint_infer
    path = flags.load_sft_checkpoint_train or infer_path
    hf = checkpoint_config(path, seeing=True)
    refuse_critic(path, hf)
    model = train.architecture(hf, path or "")
    infer_model = infer.architecture(checkpoint_config(infer_path, seeing=True) or hf, infer_path or path or "")
    if model.vision:
        check_seeing_policy(config, flags)
    check_tool_images(config.rollout, model)
    score = yamls.get(SCORE)
    check_grpo(config, train, infer, model, infer_model, workers, score.parallel.workers if score else 0)
    check_scorers(config, yamls, model)
    return as_trained(model, config, train, path)


def as_trained(
    model: ModelConfig, config: GRPOSettings | SFTSettings, yaml: ModelYaml, path: str | None
) -> ModelConfig:
    """Add adapters and frozen parts to the model of `path`. Raises UserError."""
    check_frozen(config, model)
    model = with_adapters(model.with_frozen(config.train.freeze_router, config.train.freeze), config.lora, path)
    check_dropout(yaml, model.dropout)
    return model


def read_roles(
    flags: TrainFlags, config: GRPOSettings, policy: ModelConfig, weights: bool = True
) -> dict[str, RoleModel]:
    """Read the models of a run's roles, the policy first.

    A replay has its rewards, and no models that score. weights: as in `local_model`. Raises UserError.
    """
    first = RoleModel(flags.load_sft_checkpoint_train or flags.load_sft_checkpoint_infer, policy)
    found = dict.fromkeys((POLICY.name, GENERATOR.name), first)
    for role in ROLES.values():
        names = role.names(config)
        if names and role.name not in found and not (role.listed and flags.replay):
            found |= dict(zip(names, read_models(role, flags, config, first, weights), strict=True))
    return found


def read_models(
    role: Role, flags: TrainFlags, config: GRPOSettings, policy: RoleModel, weights: bool
) -> list[RoleModel]:
    """Read the models of a role that a run has.

    weights: as in `local_model`. Raises UserError.
    """
    if role.listed:
        return [read_scoring(settings) for settings in role.listed(config)]
    return [
        read_other(role, config, policy.model, weights) if role.setting else read_alike(role, flags, config, policy)
    ]


def read_alike(role: Role, flags: TrainFlags, config: GRPOSettings, policy: RoleModel) -> RoleModel:
    """Read the model of a role that has the policy's architecture. Raises UserError."""
    path = getattr(flags, role.flag) or policy.path
    model = policy.model
    if not role.value_head:
        refuse_critic(path, checkpoint_config(path, seeing=True))
    check_same_architecture(path, model, role.title, role.flag)
    if role.value_head:
        return RoleModel(path, model.as_critic())
    alike = model.adapter is not None and path == policy.path
    apart = role.apart and (flags.scorer_ranks or config.trainer.scoring_ranks == "infer")
    shares = alike and not apart
    return RoleModel(path, model if alike and config.lora.reference == "start" else model.base, shares)


def read_other(role: Role, config: GRPOSettings, policy: ModelConfig, weights: bool) -> RoleModel:
    """Read the model of a role that may have any architecture.

    It sees as the policy does. weights: as in `local_model`. Raises UserError.
    """
    path = local_model(attrgetter(role.setting)(config), weights)
    model = checkpoint_config(path, seeing=policy.vision is not None)
    if model is None:
        raise UserError(f"{role.setting}: {path} has no config.json; give an HF directory or a hub's id.")
    refuse_critic(path, model)
    check_seeing_alike(model, policy, f"{role.setting}: {path}")
    return RoleModel(path, model)


def read_scoring(settings: RewardModelSettings) -> RoleModel:
    """Read the model of a reward function, without its weights. Raises UserError."""
    return RoleModel(settings.path, open_scoring_model(settings, weights=False).config, settings=settings)


def check_same_tokens(role: Role, path: str, tokenizer: Tokenizer) -> None:
    """Check that a model has all of the policy's tokens, with the same ids."""
    own = Tokenizer.from_path(hf_folder(path))
    for number in range(tokenizer.size):
        ours, theirs = tokenizer.id_to_token(number), own.id_to_token(number)
        if ours != theirs:
            found = f"token {number} is {theirs!r} there, and {ours!r} in the policy's tokenizer"
            raise UserError(f"{role.setting}: {path}: {found}; give a {role.title} with the policy's tokenizer.")


def read_settings(flags: TrainFlags) -> tuple[TrainFlags, GRPOSettings, dict[str, ModelYaml]]:
    """Read flags, `--from-verl`, the run's settings, and the model YAMLs by layout. Raises UserError."""
    given = list(flags.overrides)
    if flags.from_verl is not None:
        flags, given = from_verl(flags, given)
    flags, given, theirs = from_mindrlhf(flags, given)
    overrides = split_overrides(given)
    beneath = split_overrides(theirs.overrides if theirs else ())
    train, infer = read_model_yamls(flags, overrides, beneath)
    if theirs:
        batch = theirs.batch(train.parallel, infer.parallel)
        overrides[""] = [*beneath[""], *batch, *overrides[""]]
        if is_first_process():
            print(theirs, flush=True)
    division = Division.of(flags)
    defaults = {**infer.sampling_defaults(), **train.adapter_defaults(), **division.defaults()}
    config = load_grpo_config(flags.grpo_config, overrides[""], defaults, flags.settings, answer)
    infer = placed(train, infer, config.trainer.placement, division)
    yamls = {"train": train, "infer": infer}
    if score := layout_of_scorers(train, overrides["score_yaml"], division.scorers):
        yamls[SCORE] = placed_behind(score, train, infer)
    if config.trainer.scoring_ranks == "infer":
        yamls[BESIDE] = layout_beside(train, infer, division.scorers)
    infer.context.device.check_weights(config.rollout.weights)
    check_parts(config)
    rounds = correction_defaults(train, infer, config.rollout.weights)
    if rounds or config.trainer.staleness:
        defaults |= CORRECTION
        config = load_grpo_config(flags.grpo_config, overrides[""], defaults, flags.settings, answer)
        check_staleness(config)
        if rounds and config.rollout_correction.level is None:
            _log.warning(
                "rollout_correction.level is null, with %s and training in %s: updates take responses for the trained "
                "policy's own",
                generated_in(infer, config.rollout.weights),
                train.model.compute_dtype,
            )
    return flags, with_resume(config, flags.resume_training), yamls


def correction_defaults(train: ModelYaml, infer: ModelYaml, weights: str = "train") -> Mapping[str, Any]:
    """Return settings for rollouts that are rounded otherwise than training.

    weights: `rollout.weights`.
    """
    return CORRECTION if rounds_rollouts(train, infer, weights) else {}


def generated_in(infer: ModelYaml, weights: str) -> str:
    """Describe the dtype of generation in a message."""
    return f"rollout.weights {weights}" if weights != "train" else f"generation in {infer.model.compute_dtype}"


def from_verl(flags: TrainFlags, overrides: list[str]) -> tuple[TrainFlags, list[str]]:
    """Add flags and overrides of `--from-verl`, and print them; given ones win."""
    translation = translate(flags.from_verl)
    if is_first_process():
        print(translation, flush=True)
    translation.check()
    folders = ("save_ckpt_dir", "output_dir")
    # With a folder of the user's for checkpoints, the outputs stay alongside it.
    passed = folders if flags.save_ckpt_dir is not DEFAULT_FOLDER else ()
    for name, value in translation.flags.items():
        given = getattr(flags, name)
        if name not in passed and (given is None or given is DEFAULT_FOLDER):
            flags = replace(flags, **{name: Path(value) if name in folders else value})
    return flags, [*translation.overrides, *overrides]


def from_mindrlhf(flags: TrainFlags, overrides: list[str]) -> tuple[TrainFlags, list[str], MindRLHFTranslation | None]:
    """Translate MindRLHF's file in `--grpo_config`, and its names among the overrides.

    Returns the flags with those that the file sets, the other overrides, and the translation; None without such a file
    and names. Raises UserError.
    """
    path = flags.grpo_config if is_mindrlhfs(flags.grpo_config) else None
    named = [text for text in overrides if is_mindrlhfs_name(text)]
    if path is None and not named:
        return flags, overrides, None
    theirs = translate_mindrlhf(path, named)
    flags = replace(flags, grpo_config=None) if path else flags
    for name, value in theirs.flags.items():
        given = getattr(flags, name)
        if given in (None, False) or given is DEFAULT_FOLDER:
            kind = Path if name in ("save_ckpt_dir", "save_data_file") else type(given) if given is False else str
            flags = replace(flags, **{name: kind(value)})
    return flags, [text for text in overrides if text not in named], theirs


def with_resume(config: Run, flag: str | None) -> Run:
    """Apply `--resume_training`: auto or True, never or False, or a path."""
    if flag is None:
        return config
    modes = {"auto": "auto", "true": "auto", "never": "disable", "false": "disable"}
    mode = modes.get(flag.lower(), "resume_path")
    path = flag if mode == "resume_path" else None
    trainer = config.trainer.model_copy(update={"resume_mode": mode, "resume_from_path": path})
    return config.model_copy(update={"trainer": trainer})


def check_scorers(config: GRPOSettings, yamls: Mapping[str, ModelYaml], model: ModelConfig) -> None:
    """Check ranks that score and do not train the policy, which have one layout.

    model: the policy's, which the critic has too. Raises UserError.
    """
    layout = next((name for name in (SCORE, BESIDE) if name in yamls), None)
    if layout is None:
        return
    yaml = yamls[layout]
    roles = [role for role in ROLES.values() if role.layout_in(yamls) == layout and role.used(config)]
    asked, models, right = f"{SCORER_FLAG} is {yaml.parallel.workers}", "reference, teacher or critic", "leave it out"
    if layout == BESIDE:
        asked, models, right = "trainer.scoring_ranks is infer", "reference or teacher", "set it to train"
    if not roles:
        raise UserError(f"{asked}, and the run has no {models} (algorithm.beta is 0); {right}.")
    if steps := config.algorithm.reference_sync_steps:
        found = f"algorithm.reference_sync_steps is {steps}, and {asked}: the policy is on other ranks"
        raise UserError(f"{found}; {right}, or set reference_sync_steps to 0.")
    check_layout(yaml, model, yaml.parallel.workers)
    check_training_layout(yaml, config.train.length_bucket)
    check_shared_weights(yaml, dropout=0.0)
    ranks = yaml.parallel.data_parallel
    updates = config.algorithm.updates_per_iteration if any(role.training for role in roles) else 1
    name = f"the data_parallel {ranks} of {yaml.path}" + (f" x {updates} updates" if updates > 1 else "")
    check_divides("data.prompts_per_step", config.data.prompts_per_step, ranks * updates, name)


def check_same_architecture(path: str | None, model: ModelConfig, what: str, flag: str) -> None:
    """Check that a checkpoint has the architecture that is trained, rotary base included."""
    stored = checkpoint_config(path, seeing=True)
    if stored is None:
        return
    names = [name for name in SHAPE_FIELDS.values() if not (name == "tie_word_embeddings" and stored.value_head)]
    theirs, ours = ({name: getattr(one, name) for name in names} | tower_shape(one.vision) for one in (stored, model))
    if found := differences(theirs, ours, "the model that is trained"):
        right = f"give --{flag} a checkpoint of the same architecture"
        raise UserError(f"{path}: the {what} is another model: {found}; {right}.")
