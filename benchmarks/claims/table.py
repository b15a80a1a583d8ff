"""Table of the claims in Markdown."""

from collections.abc import Sequence
from statistics import fmean

from claim import LESS, MORE, SAME, Claim
from lab import Lab, digest
from measures import window_mean
from verdict import paired_difference, verdict

from mindrlhf.files.settings_file import versions

HEAD = ("claim", "verdict", "difference (95%)", "claimed", "first arm", "second arm", "metric, steps", "made again by")
COMMAND = "bash scripts/claims.sh"


def rows(lab: Lab, claims: Sequence[Claim]) -> list[tuple[str, ...]]:
    """A row of texts for each claim, in HEAD's columns."""
    return [row(lab, claim) for claim in claims]


def row(lab: Lab, claim: Claim) -> tuple[str, ...]:
    """Texts of a claim's row; without all seeds its verdict says how many runs there are."""
    last = min(claim.last_step, lab.steps or claim.last_step)
    first = min(claim.first_step, last)
    columns = []
    for arm in (claim.first, claim.second):
        values = (window_mean(figures, claim.metric, first, last) for figures in lab.figures(arm))
        columns.append([value for value in values if value is not None])
    told = f"{claim.text} ({claim.source})"
    claimed = {MORE: "≥ +", LESS: "≤ -", SAME: "within ±"}[claim.says] + f"{claim.least:g}"
    names = [f"`{arm}`" for arm in (claim.first, claim.second)]
    how = (f"`{claim.metric}`, {first} to {last}", f"`{COMMAND} {claim.name}`")
    seeds = min(map(len, columns))
    if seeds < lab.seeds:
        return (told, f"{seeds} of {lab.seeds} seeds", "", claimed, *names, *how)
    found = paired_difference(*columns)
    interval = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    means = [f"{name} {fmean(column):.3f}" for name, column in zip(names, columns, strict=True)]
    return (told, f"**{verdict(claim, found)}**", interval, claimed, *means, *how)


def markdown(lab: Lab, claims: Sequence[Claim]) -> str:
    """The table's lines."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD)), *map(_line, rows(lab, claims))]
    return "\n".join(lines) + "\n"


def made_by(lab: Lab, claims: Sequence[Claim]) -> str:
    """Versions, digest of the code, and digest of all figures of the runs that the table is made of."""
    arms = dict.fromkeys(arm for claim in claims for arm in (claim.first, claim.second))
    runs = {run.key: run for arm in arms for run in (lab.run(arm, seed) for seed in range(lab.seeds))}
    stored = {key: content for key, run in runs.items() if (content := lab.stored(run))}
    codes = sorted({content["code"] for content in stored.values()})
    figures = digest({key: content["figures"] for key, content in stored.items()})
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    several = " (several: remove the results folder to have all rows of one code)" if len(codes) > 1 else ""
    return f"{len(stored)} runs; {used}; code {', '.join(codes)}{several}; figures {figures}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
