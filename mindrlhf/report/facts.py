"""Facts of a run's start for people: date, host, model, data, software and commit."""

from collections.abc import Mapping
from datetime import datetime
from math import prod
from pathlib import Path

from mindrlhf.metrics.console import short_number
from mindrlhf.report.run import RunOutputs

LAYOUT = ("data_parallel", "model_parallel", "pipeline_stage")
SOFTWARE = ("mindrlhf", "mindspore")
MOST_DIGITS = 15  # of a number in the settings
PATH_PARTS = 2  # last parts of a path, which name a model or dataset


def facts(run: RunOutputs) -> list[tuple[str, str]]:
    """List (name, text) of a run's start; unknown facts are left out."""
    first = run.starts[0] if run.starts else {}
    settings = run.flat_settings
    software = [name for name in SOFTWARE if f"versions.{name}" in settings]
    found = {
        "started": _dates([str(start.get("date", "")) for start in run.starts]),
        "host": ", ".join(str(first[key]) for key in ("host", "system") if key in first),
        "model": _model(settings),
        "data": _path(settings.get("flags.mind_dataset_dir")),
        "layout": _layout(settings),
        "software": ", ".join(f"{name} {settings[f'versions.{name}']}" for name in software),
        "commit": str(first.get("commit") or ""),
    }
    return [(name, text) for name, text in found.items() if text]


def _dates(dates: list[str]) -> str:
    """Format the first date, and for a resumed run how often and when last."""
    try:
        first, *again = [datetime.fromisoformat(date).strftime("%Y-%m-%d %H:%M %Z") for date in dates]
    except ValueError:
        return ""
    if not again:
        return first
    times = "once" if len(again) == 1 else f"{len(again)} times"
    return f"{first}; resumed {times}, last {again[-1]}"


def _model(settings: Mapping[str, str]) -> str:
    path = settings.get("flags.load_sft_checkpoint_train") or settings.get("flags.load_sft_checkpoint_infer")
    shape = [settings["model.family"]] if "model.family" in settings else []
    shape += [f"{settings['model.num_layers']} layers"] if "model.num_layers" in settings else []
    if _is_count(settings.get("parameters", "")):
        shape.append(f"{short_number(int(settings['parameters']))} parameters")
    return ", ".join([_path(path) or "random weights", *shape]) if path or shape else ""


def _layout(settings: Mapping[str, str]) -> str:
    """Format the device and the number of processes."""
    counts = [settings.get(f"train_yaml.parallel.{axis}", "1") for axis in LAYOUT]
    if "train_yaml.context.device_target" not in settings or not all(map(_is_count, counts)):
        return ""
    processes = prod(map(int, counts))
    device = settings["train_yaml.context.device_target"]
    return f"{device}, {processes} process{'es' if processes > 1 else ''}"


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= MOST_DIGITS


def _path(path: str | None) -> str:
    return "/".join(Path(path).parts[-PATH_PARTS:]) if path else ""
