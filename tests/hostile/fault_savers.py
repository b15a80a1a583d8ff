"""Let every call that writes fail in turn, over all savers of a run in their order, without graphs.

    gcc -O2 -shared -fPIC tests/hostile/faults.c -o /tmp/faults.so -ldl
    LD_PRELOAD=/tmp/faults.so python tests/hostile/fault_savers.py --library /tmp/faults.so --folder /tmp/savers

Two steps write metrics, TensorBoard's events, responses and checkpoints; then the model is exported. Each case is a
forked process in which one call fails, once or with all later ones; a second process continues from the newest
checkpoint. `fault_runs` does the same with whole runs, which takes a hundred times as long.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import numpy as np
from hostile.fault_runs import Fault, Faults, faults_of, flags
from hostile.sandbox import Child, Outcome
from responses import LOG_PROBS, made_rollout
from training_states import MODEL, stores

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.manifest import step_folders
from mindrlhf.checkpoint.resume import choose, locate
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import clean, make_folder
from mindrlhf.files.folder_lock import lock_folders
from mindrlhf.files.settings_file import write_settings
from mindrlhf.metrics.writers import open_writers
from mindrlhf.models.parameters import parameter_table
from mindrlhf.records.formats import read_record_rows
from mindrlhf.records.writer import RecordParts, ResponseWriter
from mindrlhf.run.outputs import Outputs, forget_after
from mindrlhf.types import Experience, Prompt, RolloutGroup

STEPS = 2
VARIANTS = {"full": False, "async": True}  # whether checkpoints are written alongside
LOGGERS = TrackingSettings(loggers=("jsonl", "tensorboard"))


def experiences(step: int) -> list[Experience]:
    """Two responses to one prompt, other ones at each step."""
    prompt = Prompt(step, np.array([1, 2], np.int32), {"ground_truth": "4"})
    log_probs = np.full(3, -0.5 * step, np.float32)
    ids = np.arange(3, dtype=np.int32) + step
    rollouts = tuple(made_rollout(step, i, ids, **dict.fromkeys(LOG_PROBS, log_probs)) for i in range(2))
    rewards = np.array([step, 0.5], np.float32)
    return [Experience(RolloutGroup(prompt, rollouts), rewards, {"one": rewards}, np.zeros(2, np.float32), step)]


def write_run(output: Path, asynchronous: bool, loggers: TrackingSettings = LOGGERS) -> None:
    """Do what a run does with files, from its newest checkpoint on."""
    checkpoints = output / "ckpt"
    make_folder(checkpoints)
    with lock_folders({"--save_ckpt_dir": checkpoints, "--output_dir": output}):
        for folder in (output, checkpoints, output / "rollouts"):
            clean(folder)
        done = choose(locate(checkpoints))[0].step if step_folders(checkpoints) else 0
        record = RecordParts(output / "rollouts.mindrecord", done)
        outputs = Outputs(output, record.folder)
        writers = open_writers(output, loggers, STEPS, done + 1 if done else 0)
        write_settings(output, {"seed": 5}, resumed=done > 0)
        forget_after(output, done)
        responses = ResponseWriter(output / "rollouts", record, lambda ids: " ".join(map(str, ids)))
        (store,) = stores(checkpoints, keep=1, asynchronous=asynchronous, implied=lambda: _bring(responses, outputs))
        finished = False
        try:
            _steps(done, writers, responses, store)
            tensors = ((spec, np.full(spec.shape, 0.5, np.float32)) for spec in parameter_table(MODEL))
            save_hf(checkpoints / "hf", MODEL, tensors, replace=True)
            finished = True
        finally:
            try:
                writers.close()
            finally:
                responses.close(finished)


def _steps(done: int, writers, responses: ResponseWriter, store: CheckpointStore) -> None:
    from training_states import states

    for step in range(done + 1, STEPS + 1):
        responses.add(step, experiences(step))
        writers.write(step, {"critic/rewards/mean": step / 3})
        (state,) = states(step)
        store.save(state)
        store.settle()
    store.wait()


def _bring(responses: ResponseWriter, outputs: Outputs) -> None:
    responses.flush()
    outputs.sync()


def digest(output: Path) -> dict[str, bytes | list]:
    """Every result."""
    newest = choose(locate(output / "ckpt"))[0]
    newest.verify()
    files = [*newest.folder.rglob("*.safetensors"), *(output / "ckpt" / "hf").iterdir()]
    files += [*(output / "rollouts").iterdir(), output / "metrics.jsonl"]
    found: dict[str, bytes | list] = {str(path.relative_to(output)): path.read_bytes() for path in files}
    rows = read_record_rows(output / "rollouts.mindrecord")
    return found | {"record": [{name: repr(value) for name, value in row.items()} for row in rows]}


def in_child(folder: Path, work) -> Outcome:
    """A piece of work in a forked process; exit code 2 and a sentence for a UserError."""

    def run() -> int:
        try:
            work()
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        return 0

    return Child(run, folder, folder / "log").wait()


def check(folder: Path, faults: Faults, fault: Fault, asynchronous: bool, expected: dict) -> list[str]:
    """Fail, continue, compare; what is not as promised."""
    output = folder / "faulty"
    shutil.rmtree(output, ignore_errors=True)

    def faulty() -> None:
        faults.begin(output, fault)
        write_run(output, asynchronous)

    first = in_child(folder, faulty)
    reasons = [] if first.code in (0, 2) else [f"exit code {first.code}: {first.err[-700:]}"]
    if first.code != 0:
        again = in_child(folder, lambda: write_run(output, asynchronous))
        if again.code != 0:
            return [*reasons, f"does not resume: {again.err[-500:]}"]
    found = digest(output)
    return reasons + [f"{name} differs" for name in expected | found if expected.get(name) != found.get(name)]


def sweep(folder: Path, faults: Faults, every: int, first: int, variants: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each case with what is not as promised."""
    for name in variants:
        asynchronous = VARIANTS[name]
        sound, counted = folder / f"sound_{name}", folder / "counts.json"

        def count(sound: Path = sound, counted: Path = counted, asynchronous: bool = asynchronous) -> None:
            faults.begin(sound)
            write_run(sound, asynchronous)
            counted.write_text(json.dumps(faults.counts()))

        outcome = in_child(folder, count)
        assert outcome.code == 0, outcome.err
        counts, expected = json.loads(counted.read_text()), digest(sound)
        print(f"{name}: {counts}", flush=True)
        for fault in faults_of(counts, every, first):
            yield f"{name}: {fault}", check(folder, faults, fault, asynchronous, expected)


def main() -> int:
    args = flags("Writing calls of all savers that fail in turn.", VARIANTS).parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["GIT_DIR"] = os.devnull  # no look for a commit
    cases = bad = 0
    for case, reasons in sweep(folder, Faults(args.library), args.every, args.first, args.variants):
        cases += 1
        bad += bool(reasons)
        if reasons:
            print(f"{case}: {reasons}", flush=True)
    print(json.dumps({"cases": cases, "failures": bad}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
