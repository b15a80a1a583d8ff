"""Writes the stored answers: figures of the float64 ones, and the CPU's learning curves.

`python -m mindrlhf.acceptance.make_answers`, after a change of the tiny models, the inputs or the runs. Takes some
minutes; run it on a CPU.
"""

import tempfile
from pathlib import Path

from mindrlhf.acceptance.answers import FIGURES, answers, figures_of
from mindrlhf.acceptance.checks import Trial
from mindrlhf.acceptance.runs import CURVES, KEPT, curve_rows
from mindrlhf.backend.devices import DEVICES
from mindrlhf.files.json import write_json

FOLDER = Path(__file__).with_name("answers")


def main() -> None:
    """Compute and write both files."""
    write_json(FOLDER / FIGURES, {name: figures_of(name, answer) for name, answer in answers()})
    host = next(device for device in DEVICES.values() if device.in_host_memory)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(host, Path(folder))
        curves = {
            kind: [{name: row[name] for name in KEPT if name in row} for row in curve_rows(kind, trial)]
            for kind in ("grpo", "sft")
        }
    write_json(FOLDER / CURVES, curves)


if __name__ == "__main__":
    main()
