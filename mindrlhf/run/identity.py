"""Checkpoint that a run continues, and a check that it is the same run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.manifest import MANIFEST_FILE, step_folders
from mindrlhf.checkpoint.resume import Checkpoint, choose, locate
from mindrlhf.checkpoint.weights import Weights
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.layers import flatten
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.run import RunSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.errors import UserError
from mindrlhf.files.naming import step_of
from mindrlhf.files.printable import printable
from mindrlhf.files.settings_file import versions
from mindrlhf.model_roles import POLICY, REFERENCE, RoleModel
from mindrlhf.parallel.partition import Partition
from mindrlhf.run.report import RunData

# Fields of the model that a run may change without becoming another one.
_OPEN_FIELDS = ("eos_token_ids", "pad_token_id", "bos_token_id", "initializer_range", "max_position_embeddings")
# Settings of the trainer group that change the computation; the others only control what is written, and when.
_MATTERS = ("trainer.total_steps", "trainer.epochs", "trainer.staleness")


def find_checkpoint(settings: RunSettings, folder: Path, collectives: Collectives) -> Checkpoint | None:
    """Find the checkpoint that `trainer.resume_mode` asks for, or None.

    All ranks find the same checkpoint and share the work of checking it. Raises `UserError` if other checkpoints in the
    folder would mix with the run's.
    """
    first = collectives.is_first
    present = step_folders(folder)
    if settings.resume_mode == "disable":
        if present and not settings.val_only:
            found = f"--save_ckpt_dir {folder}: holds checkpoints of an earlier run ({present[0].name})"
            raise UserError(f"{found}; continue it with --resume_training auto, or give another folder.")
        return None
    if settings.resume_mode == "auto" and not present:
        _say(first, f"{folder}: holds no checkpoint yet; starting at step 1")
        return None
    path = folder if settings.resume_mode == "auto" else Path(settings.resume_from_path)
    checkpoint, problems = choose(
        locate(path),
        lambda problem: next(filter(None, collectives.all_gather_object(problem)), None),
        lambda one: one.verify(collectives.place, collectives.size),
    )
    for problem in problems:
        _say(first, f"{problem} Passed over.")
    _check_not_in_the_way(folder, checkpoint, problems, present)
    return checkpoint


def run_identity(
    config: GRPOSettings | SFTSettings, roles: Mapping[str, RoleModel], yaml: ModelYaml, data: RunData
) -> dict[str, Any]:
    """Describe a run's identity as plain JSON values.

    yaml: of the graphs that train.
    """
    policy = roles[POLICY.name]
    reference = roles.get(REFERENCE.name)
    return {
        "settings": config.model_dump(mode="json"),
        "model": policy.model.model_dump(mode="json"),
        "prompts": data.fingerprint(),
        "base": _base(policy, config.seed, yaml) if policy.model.adapter else None,
        "reference": reference and reference.path,
        "versions": versions(),
    }


def _base(policy: RoleModel, seed: int, yaml: ModelYaml) -> dict[str, Any]:
    """Describe the base model of the run's adapters; checkpoints do not hold its weights."""
    base = Weights(policy.path, policy.model, seed).base(Partition.every_rank(yaml, policy.model)[0])
    return {"path": base.name, "seed": seed, "fingerprint": base.fingerprint}


def check_identity(checkpoint: Checkpoint, run: Mapping[str, Any], defaults: BaseModel, first: bool) -> None:
    """Refuse a checkpoint of another model, base or prompts; log other changes.

    defaults: the default settings of a run of this kind.
    """
    with checkpoint.understood("run"):
        saved = checkpoint.run
        for problem, right in _misfits(saved, run):
            raise UserError(f"{checkpoint.folder}: {problem}; resume with the {right} of the interrupted run.")
        present = {name: run["versions"].get(name) for name in saved["versions"]}
        changes = [
            *_changes(_completed(saved["settings"], defaults), run["settings"]),
            *_changes({"reference": saved["reference"]}, {"reference": run["reference"]}),
            *_changes(saved["versions"], present),
        ]
    if changes:
        _say(first, f"resuming with changes, so that the run is not the one it would have been: {'; '.join(changes)}")


def _misfits(saved: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (problem, input that differs) for each difference that makes another run."""
    for field, ours in run["model"].items():
        theirs = _without_dropout(saved["model"].get(field, _default_of_model(field)))
        ours = _without_dropout(ours)
        if theirs != ours and field not in _OPEN_FIELDS:
            problem = f"is a checkpoint of a model with {field} {theirs}, and this run's has {ours}"
            yield problem, "model YAMLs and weights"
    theirs = saved.get("base")
    ours = run["base"]
    if theirs and ours and theirs["fingerprint"] != ours["fingerprint"]:
        problem = (
            f"holds adapters of the base model {theirs.get('path')}, whose weights are not those of {ours['path']}"
        )
        yield problem, "base model"
    prompts, now = saved["prompts"], run["prompts"]
    if any(prompts[key] != now[key] for key in ("count", "crc32")):
        counts = f"{prompts['count']} of them, and there are {now['count']} now"
        yield f"was trained on other prompts ({counts})", "dataset"
    truths = now.get("ground_truths_crc32")
    if prompts.get("ground_truths_crc32", truths) != truths:  # earlier checkpoints do not record them
        yield "was trained on the same prompts with other ground truths", "dataset"


def _default_of_model(field: str) -> Any:
    """Return a field's value, as plain JSON, in checkpoints from before it existed."""
    default = ModelConfig.model_fields[field].get_default()
    return list(default) if isinstance(default, tuple) else default


def _completed(saved: Mapping[str, Any], defaults: BaseModel) -> dict[str, Any]:
    """Give settings that came after a checkpoint their defaults.

    They do what was done before these settings existed.
    """
    whole = defaults.model_dump(mode="json") | saved
    groups = {name: value for name, value in defaults if isinstance(value, BaseModel)}
    return whole | {name: _completed(saved.get(name) or {}, group) for name, group in groups.items()}


def _without_dropout(value: Any) -> Any:
    """Remove an adapter's dropout, which a run may change without becoming another one."""
    if not isinstance(value, Mapping):
        return value
    return {key: one for key, one in value.items() if key != "dropout"}


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """List `group.key old -> new` of all relevant changes."""
    saved, now = flatten(saved), flatten(now)
    for name in sorted(saved.keys() | now.keys()):
        old, new = saved.get(name), now.get(name)
        if old != new and (not name.startswith("trainer.") or name in _MATTERS):
            yield f"{name} {old} -> {new}"


def _check_not_in_the_way(folder: Path, checkpoint: Checkpoint, problems: list[str], present: list[Path]) -> None:
    """Refuse to mix new checkpoints with another run's or another branch's."""
    if present and checkpoint.folder.parent != folder.resolve():
        found = f"--save_ckpt_dir {folder}: holds checkpoints already ({present[0].name})"
        raise UserError(f"{found}, and {checkpoint.folder} is elsewhere; give a new folder to continue it in.")
    for path in present:
        whole = (path / MANIFEST_FILE).exists() and not any(str(path.resolve()) in problem for problem in problems)
        if whole and step_of(path) > checkpoint.step:
            found = f"{path}: is newer than {checkpoint.folder.name}, which is to be continued"
            raise UserError(f"{found}; remove the newer ones, or give another --save_ckpt_dir.")


def _say(first: bool, message: str) -> None:
    if first:
        print(printable(message), flush=True)
