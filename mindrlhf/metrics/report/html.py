"""Self-contained HTML file of runs: data, styles and the drawing script.

No text of a run becomes markup: `<`, `>` and `&` are escapes in the JSON, the script puts texts on the page as text,
and the page's own policy lets no other script run and nothing be loaded.
"""

import base64
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from mindrlhf.files.json import finite
from mindrlhf.files.printable import printable, shortened
from mindrlhf.metrics.console import REWARD, ends, short_duration, short_number
from mindrlhf.metrics.diagnosis import diagnose
from mindrlhf.metrics.report.charts import COST, LEARNING, chart_data, curves
from mindrlhf.metrics.report.run import Run, differing

MOST_TEXT = 6000  # characters of one prompt or completion that a report shows
# What HTML or a script's source reads in its own way, and halves of surrogate pairs, which UTF-8 cannot hold.
ESCAPED = {code: f"\\u{code:04x}" for code in (*map(ord, "<>&\u2028\u2029"), *range(0xD800, 0xE000))}


def report_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Collect all data of the page as plain values."""
    shown = [_run_data(run) for run in runs]
    names = sorted({name for run in shown for name in run["metrics"]})
    return finite(
        {
            "runs": shown,
            "learning": chart_data(LEARNING, names),
            "cost": chart_data(COST, names),
            "names": names,
            "differing": differing(runs),
        }
    )


def _run_data(run: Run) -> dict[str, Any]:
    steps, metrics, width = curves(run.rows)
    return {
        "label": run.label,
        "folder": str(run.folder),
        "summary": summary(run.rows),
        "hints": [(hint.step, hint.text) for hint in diagnose(run.rows)],
        "steps": steps,
        "metrics": metrics,
        "width": width,
        "settings": dict(run.settings),
        "rollout_steps": len(run.rollout_steps),
        "groups": [
            {
                **vars(group),
                "prompt": shortened(group.prompt, MOST_TEXT),
                "samples": [_shortened(row) for row in group.samples],
            }
            for group in run.groups
        ],
    }


def _shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten a row's texts; all turns have the room of one completion."""
    turns = row.get("turns") or ()
    same = {"turns": [(drawn, shortened(text, MOST_TEXT // len(turns))) for drawn, text in turns]} if turns else {}
    return {**row, "completion": shortened(row["completion"], MOST_TEXT), **same}


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


def render(runs: Sequence[Run], refresh_s: float | None = None) -> str:
    """Return the page as HTML; refresh_s: seconds until it reloads itself, if it does."""
    page = resources.files(__package__) / "page"
    script, style, template = ((page / f"report.{kind}").read_text("utf-8") for kind in ("js", "css", "html.jinja"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(
        title=printable(", ".join(run.label for run in runs)),
        data=to_json({**report_data(runs), "refresh_s": refresh_s}),
        script=script,
        style=style,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
