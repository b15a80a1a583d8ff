"""Cost of saving checkpoints during training: by default for the reference job; flags as for `grpo_step.py`.

OMP_NUM_THREADS=2 python benchmarks/checkpoints.py --fixed-length --rounds 7 trainer.async_save=True
OMP_NUM_THREADS=2 python benchmarks/checkpoints.py --fixed-length --rounds 7 trainer.async_save=False
OMP_NUM_THREADS=2 python benchmarks/checkpoints.py --fixed-length --lora-rank 16 --hidden 896 --layers 24 --heads 14 \
    --kv-heads 2 --intermediate 4864 --model-vocab 151936 --prompts 2 --num-generations 4 --micro-batch 576

Every fourth step is saved. The save falls into the end of this step and, if it is written in the background, into the
next step; the other two steps are undisturbed. The overhead of a round is the extra time of the two disturbed steps
over two undisturbed ones, as a share of an undisturbed step: the cost of saving after every step. All of it happens in
one process, so a slow machine slows both sides. If steps differ by more than a save takes, look at the seconds in which
the loop waits for a save: the whole cost if it is written at once; in the background only its beginning, and the wait
of the next step's update.
"""

import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpo_step
from work import prepare

EVERY = 4


def main() -> int:
    arguments = sys.argv[1:]
    rounds = 5
    if "--rounds" in arguments:
        at = arguments.index("--rounds")
        rounds = int(arguments[at + 1])
        del arguments[at : at + 2]
    steps = EVERY * (rounds + 1) + 2
    settings = (f"trainer.save_freq={EVERY}", f"trainer.total_steps={steps}", "trainer.save_max_ckpt_num=2")
    args = grpo_step.arguments([*arguments, "--steps", str(steps), *settings])
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory(prefix="checkpoints_") as folder:
        work = prepare(args, Path(folder))
        seconds, waits, nbytes = measure(args, work, Path(folder) / "out" / "ckpt")
    overheads, undisturbed = [], []
    for last in range(2 * EVERY, steps - 1, EVERY):  # the first round compiles
        saved, after = seconds[last], seconds[last + 1]
        plain = [seconds[last - 2], seconds[last - 1]]
        undisturbed += plain
        overheads.append((saved + after - sum(plain)) / statistics.mean(plain))
    step, wait = statistics.median(undisturbed), statistics.median(waits[1:])
    print(
        f"undisturbed step {step:.3f} s, checkpoint {nbytes:,} bytes, the loop waits {wait:.3f} s for a save "
        f"({wait / step:.1%}, at most {max(waits[1:]):.3f} s); overhead of saving after every step: median "
        f"{statistics.median(overheads):+.1%} over {len(overheads)} rounds "
        f"({', '.join(f'{share:+.1%}' for share in overheads)})"
    )
    return 0


def measure(args, work, folder: Path) -> tuple[dict[int, float], list[float], int]:
    """Return (step -> seconds with its save, seconds that the loop waited for each save, bytes of one checkpoint)."""
    import argparse

    from mindrlhf.backend.process.launch import launch
    from mindrlhf.commands import train
    from mindrlhf.flags import TrainFlags
    from mindrlhf.trainer.check import check

    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    seconds, waits = {}, []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        job = check(TrainFlags.of(parser.parse_intermixed_args(work.train)))
        world = stack.enter_context(launch("CPU", worker_count=1))
        from mindrlhf.run.stop_signals import StopSignals
        from mindrlhf.trainer.build import build

        settling = settling_seconds()
        trainer = build(job, world, stack, StopSignals())
        for step in range(1, args.steps + 1):
            start = time.perf_counter()
            with trainer.run.timers("step"):
                experiences, figures = trainer.collect(step)
                result = trainer.train(experiences, step, figures)
                trainer.reshard()
            done = time.perf_counter()
            trainer.run.checkpointer.after_step(step, {}, result.updates)
            seconds[step] = time.perf_counter() - start
            if step % EVERY == 0:
                waits.append(time.perf_counter() - done)
            elif step % EVERY == 1 and waits:
                waits[-1] += sum(settling)
            settling.clear()
        trainer.run.checkpointer.finish()
        newest = max(folder.glob("step_*"))
        nbytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return seconds, waits, nbytes


def settling_seconds() -> list[float]:
    """Return a list that collects the seconds of each `CheckpointStore.settle` from now on."""
    from mindrlhf.checkpoint.store import CheckpointStore

    settle, seconds = CheckpointStore.settle, []

    def timed(store) -> None:
        start = time.perf_counter()
        settle(store)
        seconds.append(time.perf_counter() - start)

    CheckpointStore.settle = timed
    return seconds


if __name__ == "__main__":
    sys.exit(main())
