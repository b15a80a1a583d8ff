"""Makes several runs in this process, one after the other.

python runs.py JOB.json: {"runs": [{"result": FILE, "about": {...}, "arguments": [of `mindrlhf train`]}, ...]}

After each run its figures are in FILE, and a line {"result": FILE, "seconds": S} is printed, or {"result": FILE,
"error": SENTENCE} if the run cannot be made. What the runs themselves print goes to standard error. Nothing is
exported: the trained models are not needed.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measures import read_figures
from start_model import REWARD

from mindrlhf.commands import train
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.flags import TrainFlags
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer.check import check
from mindrlhf.trainer.start import launch_from


def main(argv: Sequence[str]) -> int:
    (path,) = argv
    lines, sys.stdout = sys.stdout, sys.stderr
    for run in json.loads(Path(path).read_text())["runs"]:
        start = time.monotonic()
        try:
            make(run)
            outcome = {"seconds": time.monotonic() - start}
        except UserError as error:
            outcome = {"error": str(error)}
        print(json.dumps({"result": run["result"], **outcome}), file=lines, flush=True)
    return 0


def make(run: Mapping[str, Any]) -> None:
    """Make a run of the job file, and write its result."""
    with tempfile.TemporaryDirectory(prefix="claims_") as folder:
        train_in(Path(folder), run["arguments"])
        figures = read_figures(Path(folder), REWARD)
    with atomic_file(Path(run["result"])) as temporary:
        temporary.write_text(json.dumps(run["about"] | {"figures": figures}, sort_keys=True))


def train_in(folder: Path, arguments: Sequence[str]) -> None:
    """Train with a command line's arguments, and leave metrics and answers in `folder`."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    outputs = ["--output_dir", str(folder), "--save_ckpt_dir", str(folder / "ckpt")]
    job = check(TrainFlags.of(parser.parse_intermixed_args([*outputs, *arguments])))
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(launch_from(job))
        from mindrlhf.trainer.build import build

        for _ in build(job, world, stack, StopSignals()).steps():
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
