"""Seconds of small parts of a run that people wait for, each the best of a few tries.

python benchmarks/small_parts.py --tokenizer DIR --problems gsm8k/train.jsonl

tokenizer: building it from its files. convert: the problems to a MindRecord. rewards: 512 responses scored by `gsm8k`,
in a process of its own. ceiling: the rate of matrix products that `perf/mfu` is a share of, beside NumPy's.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindrlhf.backend.ceiling import matmul_ceiling
from mindrlhf.backend.cpu import CPU
from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.data.convert_problems import convert
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

TRIES = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with vocab.json and merges.txt")
    parser.add_argument("--problems", type=Path, required=True, help="GSM8K's train.jsonl")
    return parser.parse_args()


def best(work: Callable[[], object]) -> float:
    """Measure seconds of the quickest of `TRIES` calls."""
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def rewards_s() -> float:
    """Measure seconds of scoring 512 responses; the scoring process is already running."""
    sample = Sample("question " * 20, "so 3+4=7 " * 20 + "#### 7", {"ground_truth": "7"})
    with RewardRunner(RewardSettings(functions=[{"name": "gsm8k"}])) as runner:
        return best(lambda: runner.score([sample] * 512))


def numpy_gflop_s() -> float:
    """Measure NumPy's rate for the matrix product of the ceiling."""
    matrix = np.ones((CPU.ceiling_size,) * 2, np.float32)
    return 2e-9 * CPU.ceiling_size**3 / best(lambda: matrix @ matrix)


def main() -> None:
    args = arguments()
    tokenizer = Tokenizer.from_path(args.tokenizer)
    print(f"tokenizer {best(lambda: Tokenizer.from_path(args.tokenizer)):8.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        outputs = (Path(folder) / f"{number}.mindrecord" for number in range(TRIES))
        print(f"convert   {best(lambda: convert(args.problems, next(outputs), tokenizer)):8.3f} s")
    print(f"rewards   {rewards_s():8.3f} s")
    print(f"ceiling   {matmul_ceiling('CPU') / 1e9:8.1f} GFLOP/s, NumPy {numpy_gflop_s():.1f}")


if __name__ == "__main__":
    main()
