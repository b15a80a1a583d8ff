"""Report of the kit: JSON, and one self-contained page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from mindrlhf.acceptance.checks import LEVELS
from mindrlhf.acceptance.kit import Result
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.json import finite, write_json
from mindrlhf.report.self_contained import fill_page

JSON_FILE, PAGE_FILE = "acceptance.json", "acceptance.html"


def report_data(facts: Mapping[str, str], results: Sequence[Result], seconds: float, command: str) -> dict[str, Any]:
    """Collect everything as plain values; errors that are no numbers are null."""
    levels = []
    for level in LEVELS:
        of_level = [one for one in results if one.level == level]
        if of_level:
            levels.append(
                {
                    "level": level,
                    "checks": len(of_level),
                    "failed": sum(not one.passed for one in of_level),
                    "findings": sum(len(one.findings) for one in of_level),
                    "seconds": sum(one.seconds for one in of_level),
                }
            )
    return finite(
        {
            "passed": all(one.passed for one in results) and bool(results),
            "command": command,
            "seconds": seconds,
            "facts": dict(facts),
            "levels": levels,
            "first_failed": next((one.name for one in results if not one.passed), None),
            "results": [_plain(one) for one in results],
        }
    )


def _plain(result: Result) -> dict[str, Any]:
    findings = [asdict(one) | {"passed": one.passed} for one in result.findings]
    worst = result.worst
    return {
        "check": result.name,
        "level": result.level,
        "ranks": result.ranks,
        "passed": result.passed,
        "seconds": round(result.seconds, 3),
        "memory_gib": round(result.memory_gib, 3),
        "worst": worst.part if worst else None,
        "findings": findings,
    }


def shown(number: float | None) -> str:
    """Format an error or a tolerance."""
    if number is None:
        return "no number"
    return "0" if number == 0 else f"{number:.2g}"


def render(data: Mapping[str, Any]) -> str:
    """Make the page.

    It loads nothing, and its only script is the filter's.
    """
    page = resources.files(__package__) / "page"
    template, style, script = (
        (page / name).read_text("utf-8") for name in ("acceptance.html.jinja", "acceptance.css", "acceptance.js")
    )
    return fill_page(template, style, script, data, {"shown": shown})


def write_report(folder: Path, data: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write both files; returns their paths."""
    paths = folder / JSON_FILE, folder / PAGE_FILE
    with atomic_file(paths[0]) as temporary:
        write_json(temporary, dict(data))
    with atomic_file(paths[1]) as temporary:
        temporary.write_text(render(data), encoding="utf-8")
    return paths
