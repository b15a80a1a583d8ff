"""Translation of MindRLHF's GRPO settings: `--grpo_config grpo_config.yaml`, and its names on the command line.

Every key becomes a setting, a flag or a key of a model YAML, or is needless here, and the report says which; others
are refused by name. The file of 0.4.0 has one flat group, which is read as `rl_config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mindrlhf.configs.layers import leaves, merge, parse_override
from mindrlhf.configs.model_yaml import ParallelSettings
from mindrlhf.configs.yaml_file import Layer, read_yaml
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest
from mindrlhf.migration.mindrlhf.table import COPIED, FLAT, FLAT_NAMES, GROUPS, KNOWN, NEEDLESS, PASSED, REWARDS
from mindrlhf.migration.other_names import is_trl_key
from mindrlhf.migration.translation import Translation

BATCH = ("rl_config.num_rollouts", "rl_config.chunk_size", "rl_config.batch_size", "rl_config.pack_num")
VERIFIERS = "verifier_function", "verifier_weight"  # flags go over the file
LONGEST_DECAY = 10_000  # updates; a longer decay is constant over a run


@dataclass
class MindRLHFTranslation(Translation):
    """MindRLHF's settings as settings of this suite."""

    suite = "MindRLHF"

    def batch(self, train: ParallelSettings, infer: ParallelSettings) -> list[str]:
        """Compute a step's prompts and updates from both layouts, as overrides.

        MindRLHF updates on batch_size x data_parallel rows (x micro_batch_num in a pipeline); an update here has whole
        groups of answers, so there are at most as many as prompts.
        """
        if not any(key in self.given for key in (*BATCH, "rl_config.num_generations")):
            return []
        rollouts, chunk, rows, packed = (int(self.given.get(key) or 1) for key in BATCH)
        prompts = rollouts * chunk * infer.data_parallel
        rows *= train.data_parallel * (train.micro_batch_num if train.pipeline_stage > 1 else 1) * packed
        asked = max(1, prompts * int(self.given.get("rl_config.num_generations", 8)) // rows)
        updates = next(count for count in range(min(asked, prompts), 0, -1) if prompts % count == 0)
        limit = f"; {asked} updates of {rows} answers there, whole groups here" if asked != updates else ""
        earlier = len(self.overrides)
        self.put("data.prompts_per_step", prompts, *BATCH, words=", and data_parallel of generation")
        self.put("algorithm.updates_per_iteration", updates, *BATCH, words=limit)
        return self.overrides[earlier:]

    def __str__(self) -> str:
        needless = [
            f"{words}: {', '.join(key for key, found in self.needless.items() if found == words)}"
            for words in dict.fromkeys(self.needless.values())
        ]
        return self.report({", needless here": needless})


def is_mindrlhfs(path: str | None) -> bool:
    """Tell whether a file of settings is MindRLHF's."""
    if path is None or not Path(path).is_file():
        return False
    top = read_yaml(path).values
    return any(group in top for group in GROUPS if group != "context") or len(top.keys() & FLAT_NAMES) > 2


def is_mindrlhfs_name(override: str) -> bool:
    """Tell whether an override has a name of MindRLHF's alone: `chunk_size=4`, `rl_config.beta=0.1`."""
    name = override.partition("=")[0].strip()
    return name.partition(".")[0] in GROUPS or (name in FLAT_NAMES and not is_trl_key(name))


def translate(path: str | None, overrides: Sequence[str]) -> MindRLHFTranslation:
    """Translate a file of MindRLHF's, and overrides of its names.

    Raises UserError for a key that is not known, and for one that asks for something that is not done here.
    """
    layers = [] if path is None else [_grouped(read_yaml(path))]
    named = [text if text.partition("=")[0].partition(".")[0] in GROUPS else f"{FLAT}.{text}" for text in overrides]
    for text in named:
        parse_override(text)
    merged = merge(layers or [Layer({}, {(): "command line"})], named)
    result = MindRLHFTranslation({key: value for key, value in leaves(merged.values) if value is not None})
    _copy(result, Path(path or "").parent)
    _decide(result, merged)
    for key in result.given:
        if key in result.used:
            continue
        reason = next(
            (words for words, names in NEEDLESS.items() if any(fnmatchcase(key, name) for name in names)), None
        )
        if reason is None:
            near = nearest(key, KNOWN)
            hint = f"did you mean {near}?" if near else "remove it."
            raise UserError(f"{merged.where(tuple(key.split('.')))}: unknown key {key} of MindRLHF's settings; {hint}")
        result.needless[key] = reason
    return result


def _grouped(layer: Layer) -> Layer:
    """Put a flat file's keys into `rl_config`; keys of groups stay."""
    if any(group in layer.values for group in GROUPS if group != "context"):
        return layer
    places = {((FLAT, *key) if key else key): place for key, place in layer.places.items()}
    return Layer({FLAT: layer.values}, places)


def _copy(result: MindRLHFTranslation, folder: Path) -> None:
    """Copy values.

    A model YAML may lie in the working directory or in `folder`, the file's.
    """
    for ours, names in COPIED.items():
        given = [name for name in names if result.given.get(name) not in (None, "")]
        if given:
            value = result.given[given[0]]
            beside = folder / str(value)
            moved = given[0].endswith(".model_config") and not Path(value).exists() and beside.exists()
            result.put(ours, beside if moved else value, *given)
        result.used.update(name for name in names if result.given.get(name) == "")
    for ours, theirs in PASSED.items():
        for key, value in result.given.items():
            if key.startswith(f"{theirs}."):
                result.put(f"{ours}{key.removeprefix(theirs)}", value, key)


def _decide(result: MindRLHFTranslation, merged: Layer) -> None:
    """Apply the rules whose values differ from ours."""
    given = result.given
    result.used.update(BATCH)
    offload = "rl_config.reshard_mem_opt_level", "actor_config.optimizer.opt_offload", "rl_config.opt_offload"
    if any(key in given for key in offload):
        result.put("memory.swap", any(map(given.get, offload)), *offload)
    top_k = "generate_config.sampling_config.top_k"
    if top_k in given:
        result.put("rollout.top_k", max(0, given[top_k]), top_k)
    for group in ("ref_config", FLAT):
        sync = f"{group}.sync_ref_model"
        steps = f"{group}.ref_model_sync_steps"
        if given.get(sync) is True:
            result.put("algorithm.reference_sync_steps", given.get(steps, 50), sync, steps)
        result.used |= {sync, steps}
    if given.get("rl_config.enable_compile_cache") is True:
        result.put("--enable_compile_cache", True, "rl_config.enable_compile_cache")
    if given.get("rl_config.resume_training") is True:
        result.put("--resume_training", "auto", "rl_config.resume_training")
    result.used |= {"rl_config.enable_compile_cache", "rl_config.resume_training"}
    for key in ("actor_config.optimizer.type", "rl_config.optimizer"):
        if given.get(key, "adamw").lower() != "adamw":
            where = merged.where(tuple(key.split(".")))
            raise UserError(f"{where}: {key} is {given[key]!r}, and the optimizer here is AdamW; set it to adamw.")
        result.used.add(key)
    protection = "monitor_config.host_memory_protection"
    if given.get(protection) is True:
        right = "give trainer.max_host_memory_gb, the GiB of one process, in its place"
        raise UserError(f"{merged.where(tuple(protection.split('.')))}: {protection} is a share of the host; {right}.")
    _decay(result)
    _rewards(result, merged)


def _decay(result: MindRLHFTranslation) -> None:
    """Choose the shape of the learning rate: constant under a long decay."""
    style = "actor_config.lr_schedule.lr_decay_style"
    steps = "actor_config.lr_schedule.decay_steps"
    steps = steps if steps in result.given else "rl_config.decay_steps"
    if steps in result.given or style in result.given:
        shape = "cosine" if result.given.get(style, "cosine") == "cosine" else "linear"
        long = result.given.get(steps, 0) > LONGEST_DECAY
        result.put("optimizer.lr_decay", "constant" if long else shape, style, steps)


def _rewards(result: MindRLHFTranslation, merged: Layer) -> None:
    names, weights = (_given_first(result, f"{FLAT}.{name}", f"reward_config.{name}") for name in VERIFIERS)
    functions, shares = (_listed(result.given.get(key)) for key in (names, weights))
    if not functions:
        return
    unknown = [name for name in functions if name not in REWARDS and ":" not in name]
    shares = shares or [1.0] * len(functions)
    place = merged.where(tuple(names.split(".")))
    if unknown:
        right = f"give {', '.join(REWARDS)}, or file.py:function"
        raise UserError(f"{place}: {names} has {unknown[0]!r}, which is not known here; {right}.")
    if len(shares) != len(functions):
        raise UserError(f"{place}: {names} has {len(functions)} functions, and {weights} {len(shares)}; give one each.")
    pairs = zip(functions, shares, strict=True)
    value = [{"name": REWARDS.get(name, name), "weight": float(share)} for name, share in pairs]
    result.put("reward.functions", value, names, weights)


def _given_first(result: MindRLHFTranslation, *names: str) -> str:
    """Find the first given name, else the last one, and note all as used."""
    result.used.update(names)
    return next((name for name in names if name in result.given), names[-1])


def _listed(value: Any) -> list[Any]:
    """Read a list, or text with commas, as flags have it."""
    return value.split(",") if isinstance(value, str) else [] if value is None else list(value)
