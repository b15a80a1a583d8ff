"""Seconds of generation with tools that sleep, beside the same number of tokens without tools.

OMP_NUM_THREADS=2 python benchmarks/conversations.py --rounds 7
OMP_NUM_THREADS=2 python benchmarks/conversations.py --turn-tokens 16 16   # all conversations wait at the same time

Of each round, in turn in one process and by one engine: `plain`, no conversations; `tools`, a function without state;
`environment`, a process for each conversation, from its beginning to its reward. It is what a training job runs, but
for two things. The model is random. And random numbers are replaced where a turn is to end, by numbers that draw one of
the two stop tokens; the first of these stands for a call. So all sides have responses of the same lengths. The tools'
answers are a part of these, which is not drawn, but computed all the same.

overhead: seconds, without the tools' latency once for each call of a conversation, over those of `plain`; the goal is
1.15 at most. Rounds in which other processes used more than --max-others cores count only if all are such.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo_step
from machine import Moment
from work import Work, prepare

GOAL = 1.15
SLEEPING = Path(__file__).with_name("sleeping_tool.py")
SIDES = {"tools": ({"": ""}, [f"{SLEEPING}:look_up"]), "environment": ({"": f"{SLEEPING}:Library"}, [])}
FIRST, LAST = 0.0, 1.0 - 2.0**-23  # random numbers that draw the first and the last token of the vocabulary


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--calls", type=int, default=3, help="of a conversation, one after the other (default 3)")
    add("--latency", type=float, default=0.05, help="seconds that a call sleeps (default 0.05)")
    add("--turn-tokens", type=int, nargs=2, default=(8, 24), help="fewest and most of a turn (default 8 24)")
    add("--workers", type=int, default=64, help="calls at a time, as rollout.tool_workers (default 64)")
    add("--max-others", type=float, default=0.15, help="cores that other processes may use (default 0.15)")
    add("flags", nargs="*", help="behind --: of grpo_step.py, for the model and the numbers of prompts and samples")
    return parser.parse_args()


@dataclass(frozen=True)
class Script:
    """Places at which turns end, and random numbers that end them there.

    calls: int[rows, calls], index of the tokens that end a turn with a call. lengths: int[rows], tokens of responses.
    """

    calls: np.ndarray
    lengths: np.ndarray

    @classmethod
    def random(cls, rows: int, calls: int, turn_tokens: tuple[int, int], answer: int) -> "Script":
        """Draw lengths of turns, with answers of this many tokens between them."""
        least, most = turn_tokens
        ends = np.random.default_rng(0).integers(least, most + 1, (rows, calls + 1)).cumsum(1)
        return cls(ends[:, :-1] - 1 + answer * np.arange(calls), ends[:, -1] + answer * calls)

    def numbers(self, with_calls: bool) -> np.ndarray:
        """Make random numbers float32[rows, limit] that draw a stop token only at these places."""
        shape = len(self.lengths), int(self.lengths.max())
        numbers = np.random.default_rng(1).uniform(0.02, 0.98, shape).astype(np.float32)
        if with_calls:
            np.put_along_axis(numbers, self.calls, np.float32(FIRST), 1)
        numbers[np.arange(shape[0]), self.lengths - 1] = LAST
        return numbers


class Bench:
    """Engine with a partner for each side, and the script of their turns."""

    def __init__(self, args: argparse.Namespace, shape: argparse.Namespace, work: Work, stack: contextlib.ExitStack):
        from mindrlhf.backend.cpu import CPU
        from mindrlhf.checkpoint.weights import Weights
        from mindrlhf.configs.grpo import SamplingSettings
        from mindrlhf.data.turns import TurnTemplate
        from mindrlhf.models.decoder import Decoder
        from mindrlhf.rollout.engine import Engine
        from mindrlhf.shapes import longest_position
        from mindrlhf.types import Prompt

        self.args, self.samples, self._tokenizer = args, shape.num_generations, work.tokenizer
        self._template = TurnTemplate(work.tokenizer)
        self.partners = {side: self._partner(*where, stack) for side, where in SIDES.items()}
        said = [{"role": "tool", "content": "The answer is 42."}]
        rows, answer = shape.prompts * self.samples, len(self._template.answers(said, [0]))
        self.script = Script.random(rows, args.calls, args.turn_tokens, answer)
        ids = np.random.default_rng(2).integers(1, work.tokenizer.size, (shape.prompts, shape.max_prompt))
        self.prompts = [Prompt(number, row.astype(np.int32)) for number, row in enumerate(ids)]
        sampling = SamplingSettings(max_new_tokens=int(self.script.lengths.max()))
        positions = longest_position(shape.max_prompt, sampling.max_new_tokens, 32)
        parameters = Weights(None, work.model, seed=0).parameters()
        decoder = Decoder(work.model, parameters, CPU.operators(), positions)
        stops = (0, work.model.vocab_size - 1)
        self.engine = Engine(work.model, decoder, sampling, rows, shape.max_prompt, stops, seed=0)

    def _partner(self, environments, tools, stack: contextlib.ExitStack):
        from mindrlhf.data.tool_formats import ToolCall
        from mindrlhf.environments.conversations import Conversations
        from mindrlhf.environments.pool import EnvironmentPool

        call = self._template.tool_format.render(ToolCall("look_up", {"seconds": self.args.latency}))

        def text(ids):
            """Return a drawn turn's text, with the call that its stop token stands for."""
            said = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return said.replace("<tool_call>", "") + (call if ids[-1] == 0 else "")

        pool = stack.enter_context(EnvironmentPool(environments, tools, self.args.workers))
        return Conversations(pool, self._template, text, seed=0, max_turns=self.args.calls + 1)

    def generate(self, side: str) -> tuple[float, float]:
        """Return seconds of one side, and the cores that other processes used meanwhile."""
        partner = self.partners.get(side)
        with scripted(self.script.numbers(with_calls=partner is not None), self.samples):
            start = Moment.now()
            groups = self.engine.generate(self.prompts, self.samples, step=0, partner=partner)
            rewards = partner.rewards() if partner else []
            end = Moment.now()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if [len(rollout.response_ids) for rollout in rollouts] != self.script.lengths.tolist():
            raise RuntimeError(f"{side}: a response has not the tokens that it should have")
        made = partner.statistics.calls - partner.statistics.failures if partner else 0
        if (partner and made != self.script.calls.size) or any(map(given, rewards)) != (side == "environment"):
            raise RuntimeError(f"{side}: calls have failed, or rewards are not those of the environment")
        return end.clock - start.clock, end.cores_since(start)[1]


def given(reward: float | None) -> bool:
    """Test for a reward that an environment has computed."""
    return reward is not None and np.isfinite(reward)


@contextlib.contextmanager
def scripted(numbers: np.ndarray, samples: int) -> Iterator[None]:
    """Give the engine these random numbers, by response."""
    from mindrlhf.rollout import slots

    def scripted_numbers(seed, step, prompt_id, sample, position):
        return numbers[(prompt_id * samples + sample)[:, 0]]

    known, slots.uniform = slots.uniform, scripted_numbers
    try:
        yield
    finally:
        slots.uniform = known


def main() -> int:
    args = arguments()
    shape = grpo_step.arguments(args.flags)
    os.environ["OMP_NUM_THREADS"] = str(shape.threads)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="conversations_"))
        work = prepare(shape, Path(folder))
        from mindrlhf.backend.process.launch import launch

        stack.enter_context(launch("CPU", worker_count=1))
        bench = Bench(args, shape, work, stack)
        sides = ["plain", *SIDES]
        for side in sides:  # builds graphs and starts processes
            bench.generate(side)
        rounds = []
        for number in range(args.rounds):
            order = sides if number % 2 else sides[::-1]
            rounds.append({side: bench.generate(side) for side in order})
    print(report(args, bench.script, rounds))
    return 0


def report(args: argparse.Namespace, script: Script, rounds: list[dict[str, tuple[float, float]]]) -> str:
    """Format the seconds of the rounds and their median."""
    sleeping = args.calls * args.latency
    lines = [
        f"{len(script.lengths)} conversations of {args.calls} calls, {int(script.lengths.sum()):,} tokens; "
        f"{args.latency:g} s a call, {args.workers} at a time",
        "round     plain" + "".join(f"{side:>13} overhead" for side in SIDES) + "   others",
    ]
    quiet, every = [], []
    for number, measured in enumerate(rounds, 1):
        plain, others = measured["plain"][0], max(cores for _, cores in measured.values())
        overheads = {side: (measured[side][0] - sleeping) / plain for side in SIDES}
        every.append(overheads)
        if others <= args.max_others:
            quiet.append(overheads)
        cells = "".join(f"{measured[side][0]:13.3f} {overheads[side]:8.2f}" for side in SIDES)
        lines.append(f"{number:5d}{' ' if others <= args.max_others else '!'} {plain:8.3f}{cells} {others:8.2f}")
    lines.append(f"(! others were busy: {len(quiet)} of {len(rounds)} rounds count)")
    for side in SIDES:
        median = statistics.median(overheads[side] for overheads in quiet or every)
        lines.append(f"{side}: {median:.2f} times plain, without {sleeping:g} s of sleep; the goal is {GOAL} at most")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
