"""Forecast of a step's time: operations by phase over rates measured on this machine.

It counts matrix products, and bytes of the key-value cache and of the optimizer, for responses of the greatest length.
It does not count softmax, norms, sampling, reward functions without a model, transfers between ranks, and compiling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindrlhf.configs.model import ModelConfig
from mindrlhf.memory.activations import ITEMSIZE
from mindrlhf.memory.work import Work
from mindrlhf.metrics.console import short_duration
from mindrlhf.metrics.flops import forward_flops, phase_flops
from mindrlhf.metrics.tower_flops import tower_flops
from mindrlhf.model_roles import BESIDE, ROLES, SCORE, role_of
from mindrlhf.models.parameters import parameter_count, trained_count
from mindrlhf.optimizer_state import BLOCK, moment_bytes
from mindrlhf.phases import PHASES
from mindrlhf.shapes import round_responses
from mindrlhf.units import FLOAT32

MOST_ROWS = 2048  # of a measured product; more rows are no faster
MOST_NUMBERS = 2**24  # of its weights; more than processor caches hold
MOST_OPERATIONS = 2**33
WEIGHT_PASSES = 3  # of the optimizer: reads of weight and gradient, and a write of the weight
MOMENT_PASSES = 2  # a read and a write of each moment
MATRIX = (1, BLOCK)  # stands for all parameters: nearly all numbers are those of matrices
LEAST_SHARE = 0.05  # smallest share of a step for a phase to be named
SHORT_S = 10.0  # no measurement for a run whose products take less


@dataclass(frozen=True)
class Rates:
    """Rates of one process.

    passes: FLOP/s of products with the rows of a micro-batch. decode: FLOP/s of products with a row for each slot.
    memory: bytes/s of weights in a product with one row.
    """

    passes: float
    decode: float
    memory: float

    def shared(self, crowd: float) -> "Rates":
        """Divide by the number of processes that share this one's cores."""
        return Rates(passes=self.passes / crowd, decode=self.decode / crowd, memory=self.memory / crowd)


def measured_rates(work: Work) -> Rates:
    """Measure this process's rates at the shapes of a job, in about a second.

    Products have as many weights as the model, up to `MOST_NUMBERS`, so that these come from memory if the model's do.
    """
    from mindrlhf.backend.ceiling import product_rate

    model = work.model
    dtype = work.train.model.compute_dtype
    target = work.train.context.device_target
    inner = model.hidden_size
    weights = work.config.rollout.weights
    decoded = work.infer.model.compute_dtype if weights == "train" else weights

    def rate(rows: int, numbers: int, dtype: str, *decoded: str) -> float:
        columns = max(1, min(numbers, MOST_OPERATIONS // (2 * rows)) // inner)
        return product_rate(target, dtype, rows, inner, columns, *decoded)

    rows = min(MOST_ROWS, work.micro_batches("update")[0].rows)
    return Rates(
        passes=rate(rows, inner * max(model.inner_widths.values()), dtype),
        decode=rate(work.engines("gen")[0].slots, min(MOST_NUMBERS, parameter_count(model)), dtype, decoded),
        memory=rate(1, MOST_NUMBERS, "float32", "float32") * FLOAT32 / 2,
    )


def step_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Compute seconds of each phase of a step that runs a model."""
    seconds: dict[str, float] = {}
    for phase, name, kind in work.passes:
        if PHASES[phase].per_token:
            took = _generating(work, name, rates) if kind == "generate" else _passing(work, phase, name, rates)
            seconds[phase] = seconds.get(phase, 0.0) + took
    return seconds


def _passing(work: Work, phase: str, name: str, rates: Rates) -> float:
    """Compute seconds of a rank's passes over prompts and responses, with updates.

    Each tensor-parallel rank of the first stage computes its prompts' images alone.
    """
    config = work.config
    train = work.yaml(name)
    text, whole = (
        phase_flops({name: work.roles[name]}, [group], config.algorithm.num_iterations)[phase]
        for group in (work.group._replace(images=()), work.group)
    )
    if work.keeps_tower(name):  # the images have been computed
        whole = text
    alike = sum(part.first_of_replica for part in work.models[name].values())
    flops = config.data.prompts_per_step * (text / len(work.models[name]) + (whole - text) / alike)
    if PHASES[phase].kind != "update":
        return flops / rates.passes
    passes = 1 + train.computes_again / PHASES[phase].passes
    updates = config.algorithm.num_iterations * config.algorithm.updates_per_iteration
    moments = 2 * moment_bytes(role_of(name).optimizer(config).state, MATRIX) / BLOCK
    each = WEIGHT_PASSES * FLOAT32 + MOMENT_PASSES * moments
    moved = each * trained_count(work.model) / train.parallel.model_parallel
    updating = updates * moved / train.parallel.pipeline_stage / rates.memory
    return flops * passes / rates.passes + updating


def _generating(work: Work, name: str, rates: Rates) -> float:
    """Compute seconds of a rank's prompts and responses, or of its verdicts."""
    config = work.config
    one = work.roles[name]
    samples = config.rollout.num_generations
    length = config.rollout.max_new_tokens
    prompt = work.lengths.prompt
    if one.verdict_tokens:
        conversations = config.data.prompts_per_step * samples / len(work.models[name])
        return _drawing(one.model, rates, conversations, prompt + length, prompt + length, one.verdict_tokens)
    parallel = work.infer.parallel
    cached = ITEMSIZE["bfloat16" if work.packed else "float32"]
    kept = prompt / samples if work.fused else prompt
    counts = [count for count in round_responses(config, parallel.data_parallel) if count]
    total = sum(_drawing(one.model, rates, count, prompt, kept, length, samples, cached) for count in counts)
    # Each tensor-parallel rank computes the images alone.
    seeing = sum(counts) / samples * sum(tower_flops(one.model, work.group.images)) / rates.passes
    return total / parallel.model_parallel + seeing


def _drawing(
    model: ModelConfig,
    rates: Rates,
    responses: float,
    prompt: int,
    kept: float,
    length: int,
    samples: int = 1,
    cached: int = FLOAT32,
) -> float:
    """Compute seconds of responses of one length.

    kept: positions of a prompt in the cache, for each of its responses. samples: responses to a prompt. cached: bytes
    of a number in the cache.
    """
    position = 2 * cached * model.num_layers * model.num_kv_heads * model.head_dim
    read = responses * length * (kept + length / 2) * position
    reading = responses / samples * forward_flops(model, prompt, []) / rates.passes
    return reading + (responses * length * forward_flops(model, 0, [1]) / rates.decode + read / rates.memory)


def run_rates(work: Work, steps: int | None, ceiling: float) -> Rates | None:
    """Measure rates for a run; None for a short run.

    steps: None if unknown. ceiling: FLOP/s of large products, the highest rate of any product.
    """
    least = sum(step_seconds(work, Rates(ceiling, ceiling, float("inf"))).values())
    return None if steps is not None and steps * least < SHORT_S else measured_rates(work)


def forecast(work: Work, ranks: Sequence[Rates | None]) -> dict[str, float] | None:
    """Compute seconds of each phase of a step; None for a short run.

    ranks: see `run_rates`; all wait for the slowest.
    """
    if None in ranks:
        return None
    slowest = Rates(
        passes=min(rates.passes for rates in ranks),
        decode=min(rates.decode for rates in ranks),
        memory=min(rates.memory for rates in ranks),
    )
    return step_seconds(work, slowest)


def side_seconds(work: Work, seconds: Mapping[str, float], kind: str | None = None) -> dict[str, float]:
    """Add up the seconds of a `forecast` on the ranks of each layout.

    Those that train and those that generate bring the updated weights over. Ranks that generate and score have one sum.
    kind: of phases, by default all.
    """
    sides = dict.fromkeys(work.yamls, 0.0)
    for phase, took in seconds.items():
        if kind in (None, PHASES[phase].kind):
            own = ROLES[PHASES[phase].role].layout_in(sides)
            for side in ("train", "infer") if phase == "reshard" else (own,):
                sides[side] += took
    sides["infer"] += sides.pop(BESIDE, 0.0)
    return sides


def length_of_step(work: Work, seconds: Mapping[str, float]) -> float:
    """Compute a step's seconds from a `forecast`.

    Split ranks overlap with a staleness. Ranks that only score do so while the policy scores, and train while it does.
    """
    sides = side_seconds(work, seconds)
    hidden = 0.0
    if work.scorers:
        parts = [side_seconds(work, seconds, kind) for kind in ("score", "update")]
        hidden = sum(min(part["train"], part[SCORE]) for part in parts)
    overlaps = work.infer.first_rank and work.config.trainer.staleness
    if overlaps:
        return max(sides["infer"], sum(took for side, took in sides.items() if side != "infer") - hidden)
    return sum(seconds.values()) - hidden


def idle_shares(work: Work, seconds: Mapping[str, float]) -> dict[str, float]:
    """Compute the share of a step that each layout's ranks wait.

    Colocated ranks have none: the mapping is empty.
    """
    step = length_of_step(work, seconds)
    if not work.infer.first_rank or not step:
        return {}
    return {side: 1 - took / step for side, took in side_seconds(work, seconds).items()}


def time_line(work: Work, steps: int | None, seconds: Mapping[str, float] | None) -> str:
    """Describe the time of a step and of a run from a `forecast`."""
    if seconds is None:
        return f"short: the matrix products of all steps take less than {short_duration(SHORT_S)}"
    step = length_of_step(work, seconds)
    named = ", ".join(
        f"{PHASES[phase].label} {short_duration(took)}" for phase, took in seconds.items() if took >= LEAST_SHARE * step
    )
    whole = "" if steps is None else f", {short_duration(steps * step)} for {steps:,} steps"
    idle = ""
    if waits := idle_shares(work, seconds):
        idle = f"; ranks that train wait {waits['train']:.0%} of it, and ranks that generate {waits['infer']:.0%}"
        idle += f", ranks that score {waits[SCORE]:.0%}" if work.scorers else ""
    sampling = work.config.dynamic_sampling
    rounds = ""
    if sampling.enabled and sampling.max_rounds > 1:
        rounds = f" and one round of generation is enough (dynamic_sampling.max_rounds {sampling.max_rounds})"
    return (
        f"about {short_duration(step)} a step ({named}){whole}{idle}, if every answer has "
        f"{work.config.rollout.max_new_tokens:,} tokens{rounds}; compiling graphs comes on top"
    )
