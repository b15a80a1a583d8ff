"""Model card of a trained model, for later readers: text and picture."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from mindrlhf.checkpoint.hf import CARD_FILE, CURVE_FILE
from mindrlhf.checkpoint.weights import hf_folder
from mindrlhf.configs.base import Settings
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.layers import flatten
from mindrlhf.files.printable import printable
from mindrlhf.hub.names import id_of, is_id
from mindrlhf.metrics.console import guide
from mindrlhf.metrics.writers import read_metrics
from mindrlhf.types import Prompt
from mindrlhf.version import __version__

BASE = "base_model: "
START = "trainer.resume_"  # settings of one start, not of the whole run
POINTS = 11  # of a curve, at most
DRAWN = 5  # points of which a picture says more than the table; to draw takes seconds
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

    base: hub id of the model that it descends from, if known. start, method, data: in words; start is the origin of the
    initial weights. settings: dotted name -> value, for settings that are not the defaults. metrics: of the last step.
    curve: step -> value that the run improves, at a few steps. picture: the run's curves as a PNG, of several steps.
    """

    base: str | None
    start: str
    method: str
    data: str
    seed: int
    settings: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    picture: bytes = b""

    def measured(self, metrics: Mapping[str, float], path: Path | None) -> "ModelCard":
        """Add metrics of the last step, and curves.

        path: the run's metrics file, which need not exist.
        """
        rows = read_metrics(path) if path and path.is_file() else []
        relevant = {name: value for name, value in metrics.items() if name.startswith(METRICS)}
        points = [(row["step"], value) for row in rows if (value := guide(row)) is not None]
        chosen = np.unique(np.linspace(0, len(points) - 1, min(len(points), POINTS)).round().astype(int))
        curve = dict(points[index] for index in chosen)
        return replace(self, metrics=relevant, curve=curve, picture=_picture(path) if len(curve) >= DRAWN else b"")

    def files(self) -> dict[str, bytes]:
        """Return the card's files by name."""
        return {CARD_FILE: str(self).encode(), **({CURVE_FILE: self.picture} if self.picture else {})}

    def __str__(self) -> str:
        environment = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
        environment.filters["cell"] = _cell
        template = environment.from_string((resources.files(__package__) / "model_card.md.jinja").read_text("utf-8"))
        metrics = {name: f"{value:.6g}" for name, value in sorted(self.metrics.items())}
        curve = {step: f"{value:.4g}" for step, value in self.curve.items()}
        facts = {"metrics": metrics, "curve": curve, "quoted": json.dumps(self.base), "version": __version__}
        return template.render(vars(self) | facts | {"picture": CURVE_FILE if self.picture else None})


def _cell(value: Any) -> str:
    """Write a value as one cell of a Markdown table, without markup."""
    return printable(html.escape(" ".join(str(value).split()), quote=False)).replace("|", "&#124;")


def _picture(path: Path) -> bytes:
    from mindrlhf.metrics.plot import draw_runs  # matplotlib takes a second to import

    return draw_runs([path]).png()


def read_card(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder's card; {} without one."""
    return {name: (folder / name).read_bytes() for name in (CARD_FILE, CURVE_FILE) if (folder / name).is_file()}


def adapter_card(card: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make an adapter's card from the card of the model with the adapter."""
    text = card.get(CARD_FILE, b"").replace(b"library_name: transformers", b"library_name: peft", 1)
    return {**card, CARD_FILE: text} if card else {}


def card_of_run(
    config: GRPOSettings, path: str | None, source: Path | str, prompts: Sequence[Prompt], total: int
) -> ModelCard:
    """Make the card of a GRPO run of `total` steps.

    path: of the first weights. source: of the prompts.
    """
    algorithm = config.algorithm
    kl = f", KL ({algorithm.kl_estimator}) with weight {algorithm.beta:g}" if algorithm.beta else ""
    method = (
        f"reinforcement learning: {algorithm.advantage} advantages, {algorithm.policy_loss} loss{kl}; {total} steps of "
        f"{config.data.prompts_per_step} prompts with {config.rollout.num_generations} answers each"
    )
    tasks = [prompt.fields.get("task", "") for prompt in prompts]
    return describe(path, method, source, f"{len(prompts)} prompts", tasks, config)


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
    base, start = origin(path)
    data = f"{Path(file).name}: {count}{of}"
    return ModelCard(base=base, start=start, method=method, data=data, seed=seed, settings=changed)


def origin(path: str | None) -> tuple[str | None, str]:
    """Find the hub id that initial weights descend from, and describe their place.

    A local folder's id is the id that its card names, if any.
    """
    if path is None:
        return None, "random weights"
    if own := id_of(path):
        return own, own
    folder = Path(path).resolve()
    card = read_card(hf_folder(path) or folder).get(CARD_FILE, b"").decode("utf-8", "replace")
    names = [line.removeprefix(BASE).strip("\"' ") for line in card.splitlines() if line.startswith(BASE)]
    base = next((name for name in names if is_id(name)), None)
    place = f"the local folder {folder.parent.name}/{folder.name}"
    return base, f"{place}, trained from {base}" if base else place
