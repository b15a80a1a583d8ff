"""Forecast of a step's time from assumed shares of a chip's figures.

Matrix products, bytes of weights and of the cache, and messages between ranks are counted as `step_time` does, which
has the list of what is not. No share was measured: nothing has been run on a device.
"""

from mindrlhf.backend.device import Chip
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.memory.activations import ITEMSIZE
from mindrlhf.memory.step_time import Rates, step_seconds
from mindrlhf.memory.work import Work

PRODUCTS, MEMORY, LINKS = SHARES = (0.4, 0.6, 0.5)  # assumed shares of a chip's figures
FLOAT32 = 0.25  # rate of float32 products, as a share of bfloat16's
SUMS = 2  # of activations over tensor-parallel ranks in a layer, in one direction


def chip_rates(work: Work, chip: Chip) -> Rates:
    """Compute the rates of one rank from a chip's figures."""
    products = chip.flops * PRODUCTS
    memory = chip.memory_rate * MEMORY
    dtype = work.infer.model.compute_dtype
    slots = work.engines("gen")[0].slots if "gen" in work.phases else 1
    return Rates(
        passes=products * _share(work.train),
        # A decode step reads all weights, and multiplies each with a row for each slot.
        decode=min(products * _share(work.infer), 2 * slots * memory / ITEMSIZE[dtype]),
        memory=memory,
    )


def chip_seconds(work: Work, chip: Chip, received: int) -> dict[str, float]:
    """Forecast the seconds of each phase of a step.

    received: most bytes that a rank receives in the online reshard.
    """
    link = chip.link_rate * LINKS
    seconds = step_seconds(work, chip_rates(work, chip))
    for phase, name, kind in work.passes:
        if phase in seconds:
            yaml = work.infer if kind == "generate" else work.yaml(name)
            directions = {"update": 2 + yaml.computes_again}.get(kind, 1)
            seconds[phase] += directions * _sum_bytes(work, yaml) / link
    if received:
        seconds["reshard"] = received / link
    return seconds


def _share(yaml: ModelYaml) -> float:
    return FLOAT32 if yaml.model.compute_dtype == "float32" else 1.0


def _sum_bytes(work: Work, yaml: ModelYaml) -> float:
    """Compute the bytes that a rank receives for tensor-parallel sums, in one direction."""
    parallel = yaml.parallel
    others = (parallel.model_parallel - 1) / parallel.model_parallel
    config = work.config
    tokens = work.lengths.prompt + config.rollout.num_generations * config.rollout.max_new_tokens
    rows = config.data.prompts_per_step * tokens / parallel.data_parallel
    layers = work.model.num_layers / parallel.pipeline_stage
    # Each sum is a scattered one and a gathered one.
    return SUMS * layers * rows * work.model.hidden_size * ITEMSIZE[yaml.model.compute_dtype] * 2 * others
