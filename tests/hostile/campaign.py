"""Give the suite's commands damaged files and odd inputs, by a seed, and say where an answer is not as promised.

    python tests/hostile/campaign.py --folder /tmp/hostile --seed 0 --corruptions 300 --odd 200

Promised: exit code 0 or 2 (1 where a command documents it), no traceback, an end, no control character on the terminal,
nothing lost; and with 2 one sentence that names the file or the key. Every command runs on sound files first.
`--only corruption:17` runs one case again and keeps its folder.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from hostile.mutations import CORRUPTIONS, Mutation, odd_content
from hostile.odd_arguments import odd_arguments
from hostile.sandbox import Child, Outcome, command
from hostile.world import USES, Use, build

DOCUMENTED_ONES = ("report", "reward-check")  # exit 1: runs that differ, functions that failed
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udcff]")
TRACES = ("Traceback (most recent call last)", "Fatal Python error", "C++ Call Stack", "[ERROR]", "Warning: ")
OUTPUTS = ("out", "run")


@dataclass(frozen=True)
class Case:
    """name: kind:number. file: what is damaged, "" for odd arguments. what: in a few words."""

    name: str
    argv: tuple[str, ...]
    file: str
    what: str


@dataclass(frozen=True)
class Failure:
    """A case whose outcome is not as promised, and why."""

    case: Case
    reasons: tuple[str, ...]
    outcome: Outcome


def prepare(kind: str, number: int, seed: int, folder: Path) -> Case:
    """Damage the folder, a copy of the sound one; `sound:N` leaves it as it is, for the N-th use."""
    rng = random.Random(f"{seed} {kind} {number}")
    name = f"{kind}:{number}"
    if kind == "sound":
        return Case(name, USES[number].argv, "", "nothing")
    if kind == "odd" and number % 5 < 2:
        use = _draw(rng, USES)
        argv, what = odd_arguments(rng, use.argv)
        return Case(name, argv, "", what)
    uses = [use for use in USES if kind == "corruption" or any(map(odd_content, use.files))]
    use = _draw(rng, uses)
    file = rng.choice([file for file in use.files if kind == "corruption" or odd_content(file)])
    mutate = odd_content(file) if kind == "odd" else rng.choice(CORRUPTIONS)
    return Case(name, use.argv, file, _in_a_child(mutate, rng, folder / file))


def _in_a_child(mutate: Mutation, rng: random.Random, file: Path) -> str:
    """Mutate in a forked process, so that nothing that reads or writes the file stays in this one."""
    logs = file.with_name("mutation")

    def run() -> int:
        print(mutate(rng, file))
        return 0

    outcome = Child(run, file.parent, logs).wait()
    for suffix in (".out", ".err"):
        logs.with_suffix(suffix).unlink()
    if outcome.code:
        raise RuntimeError(f"{file} cannot be damaged: {outcome.err}")
    return outcome.out.strip()


def _draw(rng: random.Random, uses: tuple[Use, ...] | list[Use]) -> Use:
    return rng.choices(uses, [use.weight for use in uses])[0]


def judge(case: Case, outcome: Outcome, before: dict[str, bytes | None], after: dict[str, bytes | None]) -> list[str]:
    """What is not as promised."""
    text = outcome.out + outcome.err
    allowed = (0, 1, 2) if case.argv[0] in DOCUMENTED_ONES else (0, 2)
    reasons = []
    if outcome.code is None:
        reasons.append("hung")
    elif outcome.code not in allowed:
        reasons.append(f"exit code {outcome.code}")
    reasons += [f"prints {trace!r}" for trace in TRACES if trace in text]
    if found := CONTROL.search(text):
        reasons.append(f"prints the control character {found[0]!r}")
    kind, number = case.name.split(":")
    if kind == "sound" and outcome.code != USES[int(number)].code:
        reasons.append(f"exit code {outcome.code}, and nothing is wrong with it")
    if outcome.code == 2 and not reasons:
        reasons += _sentence(case, outcome.err)
    for path, content in before.items():
        output = path.split("/")[0] in OUTPUTS and (outcome.code == 0 or case.file == path)
        if not output and after.get(path, b"gone") != content:
            reasons.append(f"{path} was {'changed' if path in after else 'lost'}")
    return reasons


def _sentence(case: Case, err: str) -> list[str]:
    lines = err.splitlines()
    if any(line.startswith("usage: ") for line in lines):  # argparse's own refusal
        return [] if re.match(r"mindrlhf [\w-]+: error: ", lines[-1]) else ["the usage is followed by something else"]
    if len(lines) != 1 or not lines[0].startswith(f"mindrlhf {case.argv[0]}: "):
        return [f"prints {len(lines)} lines on stderr where one sentence belongs"]
    if len(lines[0]) > 1500:
        return [f"a sentence of {len(lines[0])} characters"]
    path = Path(case.file)
    if case.file and not any(
        part in lines[0] for part in (path.name, path.stem, str(path.parent) + "/", path.parent.name)
    ):
        return ["the sentence names neither the file nor its folder"]
    return []


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content; None for what cannot be read, links by their target."""
    found: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink()).encode()
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def run(
    names: list[str], seed: int, folder: Path, workers: int, keep: bool = False
) -> Iterator[tuple[Case, Outcome, list[str]]]:
    """Each case with its outcome and what is wrong with it, as they end."""
    world = folder / "world"
    if not world.is_dir():
        build(world)
    waiting, running = list(reversed(names)), []
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            kind, number = name.split(":")
            place = folder / "cases" / f"{kind}_{number}" / "world"
            shutil.rmtree(place.parent, ignore_errors=True)
            shutil.copytree(world, place, symlinks=True)
            case = prepare(kind, int(number), seed, place)
            running.append((case, place, listing(place), Child(command(case.argv), place, place.parent / "log")))
        for entry in list(running):
            case, place, before, child = entry
            if (outcome := child.poll()) is None:
                continue
            running.remove(entry)
            reasons = judge(case, outcome, before, listing(place))
            if not reasons and not keep:
                shutil.rmtree(place.parent)
            yield case, outcome, reasons
        if len(running) == workers or not waiting:
            time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged files and odd inputs, by a seed.")
    parser.add_argument("--folder", type=Path, required=True, help="everything happens in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corruptions", type=int, default=300)
    parser.add_argument("--odd", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="cases at the same time")
    parser.add_argument("--only", nargs="+", metavar="KIND:NUMBER", help="these cases, and keep their folders")
    args = parser.parse_args()
    import mindspore.mindrecord  # noqa: F401 - once, before the forks

    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(args.folder.resolve() / "cache")  # operators are compiled once
    kinds = {"sound": len(USES), "corruption": args.corruptions, "odd": args.odd}
    names = args.only or [f"{kind}:{number}" for kind, count in kinds.items() for number in range(count)]
    failures, codes = [], {}
    for case, outcome, reasons in run(names, args.seed, args.folder.resolve(), args.workers, keep=bool(args.only)):
        codes[str(outcome.code)] = codes.get(str(outcome.code), 0) + 1
        if reasons or args.only:
            print(f"{case.name}: {case.file}: {case.what}: {reasons} ({outcome.seconds:.1f} s)", flush=True)
        if reasons:
            failures.append(asdict(Failure(case, tuple(reasons), outcome)))
    (args.folder / "failures.json").write_text(json.dumps(failures, indent=1))
    print(json.dumps({"cases": len(names), "failures": len(failures), "codes": codes, "seed": args.seed}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
