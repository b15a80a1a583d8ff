"""One console line per step that shows learning and speed."""

import math
import re
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from mindrlhf.files.printable import printable
from mindrlhf.phases import PHASES

REWARD = "critic/rewards/mean"
LOSSES = ("actor/loss", "actor/pg_loss", "train/loss")  # the first that a step has is shown
ACCURACY = re.compile(r"val-core/(.+)/acc/mean@\d+")
TREND_STEPS = 10  # steps at either end of the run that the trend compares, at most
ETA_STEPS = 20  # recent steps whose median time the estimate of the remaining time uses
LEAST_SHARE = {"always": 0.0, "if long": 0.1}  # of a step, for a phase to be shown
SIZES = ((1e6, 1e6, 1, "M"), (1e3, 1e3, 1, "k"), (100, 1, 0, ""), (10, 1, 1, ""), (0.1, 1, 2, ""))  # from, unit, digits
FIGURES = {"loss": LOSSES, "kl": ("actor/kl_loss",), "entropy": ("actor/entropy",), "grad": ("actor/grad_norm",)}


def short_number(value: float) -> str:
    """Format about three digits: 0.43, 23.1, 3.2k, 1.5M, 2.1e-06."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.1e}"
    for least, unit, digits, name in SIZES:
        if size >= least:
            return f"{value / unit:.{digits}f}{name}"
    return f"{value:.4f}" if size else "0"


def short_duration(seconds: float) -> str:
    """Format seconds: 0.4s, 12s, 3m12s, 1h02m."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds}s"
    return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Compute the means of the first and the last steps, at most 10."""
    window = max(1, min(TREND_STEPS, len(values) // 2))
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:])


def trend(rewards: Sequence[float]) -> float | None:
    """Compute the growth between the `ends` without NaN; None for one step."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    if len(known) < 2:
        return None
    first, last = ends(known)
    return last - first


class ConsoleWriter:
    """Writer of one line per step to the console.

    `step 12/200 | reward 0.43 (+0.02) | loss .. | kl .. | len 23.1 (clip 2%) | gen 0.4s train 0.8s | ...`. In brackets:
    the reward's `trend`. Means of several reward functions follow. `acc` is on held-out data. `same reward 80%` warns,
    from half on, of groups that teach nothing. `eta` leaves out seconds of compiling. A metric without a value is left
    out.
    """

    def __init__(self, total_steps: int, earlier_rewards: Sequence[float] = (), stream: TextIO | None = None):
        """Begin with the mean rewards of earlier steps; stream: standard output without."""
        self._total_steps, self._rewards, self._stream = total_steps, list(earlier_rewards), stream
        self._step_seconds: deque[float] = deque(maxlen=ETA_STEPS)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        line = " | ".join([f"step {step}/{self._total_steps}", *self._learning(values), *self._speed(step, values)])
        print(printable(line), file=self._stream or sys.stdout, flush=True)  # data sources name their accuracy

    def close(self) -> None:
        """Do nothing: every line is out when `write` returns."""

    def _learning(self, values: Mapping[str, float]) -> Iterator[str]:
        if REWARD in values:
            self._rewards.append(values[REWARD])
            change = trend(self._rewards)
            yield f"reward {values[REWARD]:.2f}" + ("" if change is None else f" ({change:+.2f})")
        functions = [(re.fullmatch("reward/(.+)/mean", name), value) for name, value in values.items()]
        means = [f"{name[1]} {value:.2f}" for name, value in functions if name]
        if len(means) > 1:
            yield " ".join(means)
        if values.get("group/zero_std_fraction", 0) >= 0.5:
            yield f"same reward {values['group/zero_std_fraction']:.0%}"
        for name, value in values.items():
            if accuracy := ACCURACY.fullmatch(name):
                yield f"acc {accuracy[1]} {value:.3f}"
        for label, names in FIGURES.items():
            found = [values[name] for name in names if name in values]
            if found:
                yield f"{label} {short_number(found[0])}"
        if "response_length/mean" in values:
            clip = values.get("response_length/clip_ratio")
            yield f"len {values['response_length/mean']:.1f}" + ("" if clip is None else f" (clip {clip:.0%})")
        if "tools/call_frequency" in values:
            failed = values.get("tools/failure_frequency")
            yield f"calls {values['tools/call_frequency']:.2f}" + (f" ({failed:.0%} failed)" if failed else "")

    def _speed(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        whole = values.get("timing_s/step")
        phases = []
        for shown, share in LEAST_SHARE.items():
            for name, phase in PHASES.items():
                seconds = values.get(f"timing_s/{name}") if phase.console == shown else None
                if seconds is not None and (not share or (whole and seconds >= share * whole)):
                    phases.append(f"{phase.label} {short_duration(seconds)}")
        if phases:
            yield " ".join(phases)
        if "perf/throughput" in values:
            yield f"{short_number(values['perf/throughput'])} tok/s"
        if whole is not None:
            self._step_seconds.append(whole - values.get("timing_s/compile", 0.0))
            if step < self._total_steps:
                yield f"eta {short_duration(statistics.median(self._step_seconds) * (self._total_steps - step))}"
