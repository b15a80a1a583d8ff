"""Self-contained HTML page of runs: data, styles and the drawing script.

No text of a run becomes markup: `<`, `>` and `&` are escapes in the JSON, the script puts texts on the page as text,
and the page's own policy allows no further scripts except those that it loads itself: packed answers of a large report.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mindrlhf.files.json import finite
from mindrlhf.files.printable import printable
from mindrlhf.metrics.console import REWARD, ends, short_duration, short_number
from mindrlhf.metrics.diagnosis import diagnose
from mindrlhf.phases import PHASES
from mindrlhf.report.charts import COST, LEARNING, chart_data, curves
from mindrlhf.report.distributions import distributions
from mindrlhf.report.facts import facts
from mindrlhf.report.run import RunOutputs, differing
from mindrlhf.report.self_contained import fill_page

MOST_INSIDE = 16 * 2**20  # characters of packed answers in the page itself; more are files in a folder next to it
# The parts of the page's script, in order: together they are one function.
SCRIPTS = ("base", "figures", "export", "charts", "step", "answers", "tokens", "groups", "rollouts", "page")
# Characters that are special in HTML or in a script, and halves of surrogate pairs, which UTF-8 cannot hold.
ESCAPED = {code: f"\\u{code:04x}" for code in (*map(ord, "<>&\u2028\u2029"), *range(0xD800, 0xE000))}


@dataclass(frozen=True)
class Page:
    """HTML, and the files of the folder next to it."""

    html: str
    files: Mapping[str, str]


def report_data(runs: Sequence[RunOutputs]) -> dict[str, Any]:
    """Collect all data of the page except the packed answers, as plain values."""
    shown = [_run_data(run) for run in runs]
    names = sorted({name for run in shown for name in run["metrics"]})
    answers = any(run["distributions"] for run in shown)
    return finite(
        {
            "runs": shown,
            "learning": chart_data(LEARNING, names, answers),
            "cost": chart_data(COST, names, answers),
            "phases": {f"timing_s/{name}": phase.label for name, phase in PHASES.items() if name != "step"},
            "names": names,
            "differing": differing(runs),
        }
    )


def _run_data(run: RunOutputs) -> dict[str, Any]:
    steps, metrics, width = curves(run.rows)
    return {
        "label": run.label,
        "folder": str(run.folder),
        "summary": summary(run.rows),
        "facts": facts(run),
        "command": str(run.starts[-1].get("command", "")) if run.starts else "",
        "hints": [(hint.step, hint.text) for hint in diagnose(run.rows)],
        "steps": steps,
        "metrics": metrics,
        "width": width,
        "settings": run.flat_settings,
        "distributions": distributions(run.answers.steps),
        "answers": {
            "steps": [one.step for one in run.answers.steps],
            "all_steps": run.answers.all_steps,
            "chunks": list(run.answers.chunks),
            "index": run.answers.index,
        },
    }


def summary(rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Summarise a run as (name, value) pairs."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value == value:  # not NaN
                columns.setdefault(name, []).append(value)
    figures = [("steps", str(int(rows[-1]["step"])) if rows else "none yet")]
    if rewards := columns.get(REWARD):
        first, last = ends(rewards)
        figures.append(("reward", f"{first:.3f} → {last:.3f}"))
    for name in sorted(name for name in columns if name.startswith("val-core/") and "/acc/mean@" in name):
        label = name.removeprefix("val-core/").replace("/acc/", " ")
        figures.append((f"accuracy {label}", f"{columns[name][0]:.3f} → {columns[name][-1]:.3f}"))
    if seconds := columns.get("timing_s/step"):
        alone = [row["timing_s/step"] - row.get("timing_s/compile", 0.0) for row in rows if "timing_s/step" in row]
        figures.append(("step, median", short_duration(statistics.median(alone))))
        figures.append(("all steps", short_duration(sum(seconds))))
    if throughput := columns.get("perf/throughput"):
        figures.append(("tokens/s, median", short_number(statistics.median(throughput))))
    if memory := columns.get("perf/max_memory_allocated_gb"):
        figures.append(("peak memory", f"{max(memory):.2f} GiB"))
    return figures


def to_json(data: Mapping[str, Any]) -> str:
    """Format JSON for a `<script>` element, without characters special to HTML."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(ESCAPED)


def render(
    runs: Sequence[RunOutputs], folder: str, refresh_s: float | None = None, most_inside: int = MOST_INSIDE
) -> Page:
    """Build the page; it contains its answers if they have at most `most_inside` characters.

    folder: name of the folder for files. refresh_s: seconds until the page reloads itself, if it does.
    """
    chunks = {name: packed for run in runs for name, packed in run.answers.chunks.items()}
    inside = sum(map(len, chunks.values())) <= most_inside
    page = resources.files(__package__) / "page"
    template, style = ((page / name).read_text("utf-8") for name in ("report.html.jinja", "report.css"))
    parts = [(page / "script" / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    values = {
        "title": printable(", ".join(run.label for run in runs)),
        "data": to_json({**report_data(runs), "folder": folder, "refresh_s": refresh_s}),
        "chunks": chunks if inside else {},
    }
    html = fill_page(template, style, script, values)
    files = {} if inside else {f"{name}.js": f'reportChunk("{name}","{packed}")\n' for name, packed in chunks.items()}
    return Page(html, files)
