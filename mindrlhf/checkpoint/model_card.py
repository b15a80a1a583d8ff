"""`README.md` of a trained model: its origin and training, for later readers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from mindrlhf.checkpoint.hf import CARD_FILE
from mindrlhf.checkpoint.open import hf_folder
from mindrlhf.configs.base import Settings
from mindrlhf.hub.names import id_of
from mindrlhf.job import Job
from mindrlhf.metrics.console import guide
from mindrlhf.metrics.report.run import flatten
from mindrlhf.types import Prompt
from mindrlhf.version import __version__

BASE = "base_model: "
START = "trainer.resume_"  # settings of a start, not of the run
POINTS = 11  # of a curve, at most
METRICS = (
    "critic/rewards/mean",
    "response_length/mean",
    "actor/kl_loss",
    "actor/entropy",
    "train/loss",
    "val/",
    "val-core/",
)


@dataclass(frozen=True)
class ModelCard:
    """Facts for the model card of a trained model.

    base: name of the model whose weights were the first; None for random ones. method, data: in words.
    settings: dotted name -> value, for settings that are not the defaults. metrics: of the last step. curve: step ->
    what the run improves, at a few steps.
    """

    base: str | None
    method: str
    data: str
    seed: int
    settings: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)

    def measured(self, metrics: Mapping[str, float], rows: Sequence[Mapping[str, float]]) -> "ModelCard":
        """Add metrics of the last step, and the curve from rows of steps."""
        relevant = {name: value for name, value in metrics.items() if name.startswith(METRICS)}
        points = [(row["step"], value) for row in rows if (value := guide(row)) is not None]
        chosen = np.unique(np.linspace(0, len(points) - 1, min(len(points), POINTS)).round().astype(int))
        return replace(self, metrics=relevant, curve=dict(points[index] for index in chosen))

    def __str__(self) -> str:
        environment = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
        template = environment.from_string((resources.files(__package__) / "model_card.md.jinja").read_text("utf-8"))
        metrics = {name: f"{value:.6g}" for name, value in sorted(self.metrics.items())}
        quoted = json.dumps(self.base)
        curve = {step: f"{value:.4g}" for step, value in self.curve.items()}
        return template.render(
            vars(self) | {"metrics": metrics, "curve": curve, "quoted": quoted, "version": __version__}
        )


def adapter_card(card: str) -> str:
    """Make the card of the adapter from that of the model with it."""
    return card.replace("library_name: transformers", "library_name: peft", 1)


def card_of_run(job: Job, prompts: Sequence[Prompt], total: int) -> ModelCard:
    """Make the card of a GRPO run of `total` steps."""
    algorithm, config = job.config.algorithm, job.config
    kl = f", KL ({algorithm.kl_estimator}) with weight {algorithm.beta:g}" if algorithm.beta else ""
    method = (
        f"reinforcement learning: {algorithm.advantage} advantages, {algorithm.policy_loss} loss{kl}; {total} steps of "
        f"{config.data.prompts_per_step} prompts with {config.rollout.num_generations} answers each"
    )
    file = job.flags.replay or job.flags.mind_dataset_dir
    tasks = [prompt.fields.get("task", "") for prompt in prompts]
    return describe(job.policy_path, method, file, f"{len(prompts)} prompts", tasks, config)


def describe(
    path: str | None, method: str, file: Path | str, count: str, tasks: Sequence[str], settings: Settings
) -> ModelCard:
    """Make the card of a run from its first weights' path and its dataset."""
    defaults = flatten(type(settings)().model_dump(mode="json"))
    given = flatten(settings.model_dump(mode="json"))
    changed = {
        name: value for name, value in given.items() if defaults.get(name) != value and not name.startswith(START)
    }
    seed = changed.pop("seed", given["seed"])
    of = f" ({', '.join(sorted(set(tasks)))})" if any(tasks) else ""
    return ModelCard(base_name(path), method, f"{Path(file).name}: {count}{of}", seed, changed)


def base_name(path: str | None) -> str | None:
    """Find a model's name: its id, its folder's card's, or the folder's."""
    if path is None or id_of(path):
        return path and id_of(path)
    card = (hf_folder(path) or Path(path)) / CARD_FILE
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    named = next((line.removeprefix(BASE).strip("\"' ") for line in lines if line.startswith(BASE)), None)
    return named or Path(path).resolve().name
