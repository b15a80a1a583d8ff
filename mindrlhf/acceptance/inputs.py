"""Numbers and tiny models that the checks compute with.

All are drawn by a generator that NumPy has promised never to change, and rounded to bfloat16, so that every dtype holds
them exactly: what differs then is the computation.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from mindrlhf.acceptance.reference import Rows
from mindrlhf.checkpoint.stored_tensor import decode, encode
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.unsupported import SERVED
from mindrlhf.models.families import DEFAULT, Family
from mindrlhf.models.parameters import parameter_table
from mindrlhf.training.batch import SequenceGroup

# Of all tiny models: within the limits of every device's operators.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
}
EXPERT_SIZES = {
    "num_layers": 3,
    "decoder_sparse_step": 2,  # the second layer has experts
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
LARGEST = {"norm": 0.2, "bias": 0.5, "embedding": 1.0}  # deviations by kind of parameter; of others 1.5 / sqrt(inputs)
ROUTER_DEVIATION = 8.0  # over sqrt(inputs): experts that are chosen stand clear of the others

PROMPTS, COMPLETIONS = (7, 4), (6, 8, 1, 5)  # tokens of two prompts, with two completions each
SPLIT = (2, 8, 2, 8)
GROUPS = ((6, (7, 3)), (1, (5, 8)), (4, (1, 2)))  # tokens of prompts and their responses, for updates


def exact(array: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16 numbers, as float32."""
    return decode(encode(np.asarray(array, np.float32), "bfloat16", "numbers"), "bfloat16").reshape(np.shape(array))


def numbers(name: str, *shape: int, deviation: float = 1.0) -> np.ndarray:
    """Draw normal numbers float32[shape] that depend on the name alone."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    return exact(state.standard_normal(shape) * deviation)


def whole_numbers(name: str, end: int, *shape: int) -> np.ndarray:
    """Draw int32[shape] from 0 to below `end`, which depend on the name alone."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    return (state.random_sample(shape) * end).astype(np.int32)


def tiny_config(family: Family, **changes) -> ModelConfig:
    """Return the tiny model of a family."""
    kind = {"family": family.name, "attention_bias": family.attention_bias, "qk_norm": family.qk_norm}
    return ModelConfig(**SIZES | kind | (EXPERT_SIZES if family.experts else {}) | changes)


def tiny_models() -> dict[str, ModelConfig]:
    """Return one tiny model of each family without images.

    By the family's name; the default family's has a tied head.
    """
    return {name: tiny_config(family, tie_word_embeddings=name == DEFAULT.name) for name, family in SERVED.items()}


def tiny_weights(config: ModelConfig, name: str) -> dict[str, np.ndarray]:
    """Draw weights by our names such that every parameter matters.

    Log-probs spread over several nats.
    """
    found = {}
    for spec in parameter_table(config):
        inputs = spec.shape[-1] ** -0.5
        deviation = ROUTER_DEVIATION * inputs if spec.kind == "router" else LARGEST.get(spec.kind, 1.5 * inputs)
        drawn = numbers(f"{name} {spec.name}", *spec.shape, deviation=deviation)
        found[spec.name] = exact(drawn + 1.0) if spec.kind == "norm" else drawn
    return found


def tiny_rows(name: str, vocabulary: int) -> Rows:
    """Draw a batch of two prompts with two completions each, all padded."""
    n, p, g, r = SPLIT
    ids = whole_numbers(f"{name} ids", vocabulary, n * p + n * g * r)
    starts = np.repeat(PROMPTS, g)[:, None]
    positions = np.concatenate([np.tile(np.arange(p), n), (starts + np.arange(r)).ravel()]).astype(np.int32)
    return Rows(split=SPLIT, lengths=(PROMPTS, COMPLETIONS), ids=ids, positions=positions)


def batch_arrays(rows: Rows) -> tuple[np.ndarray, ...]:
    """List the arrays of a decoder's graphs, in the order of `models.inputs.NAMES`."""
    n, p, g, r = rows.split
    prefixes, completions = np.split(rows.ids, [n * p])
    lengths = [np.array(part, np.int32) for part in rows.lengths]
    return prefixes.reshape(n, p), lengths[0], completions.reshape(n * g, r), lengths[1], rows.positions


def rows_of(prompt: Sequence[int], response: Sequence[int]) -> Rows:
    """Return one prompt and response without padding; the response's rows predict its tokens."""
    before = len(prompt) - 1
    count = len(response)
    ids = np.array([*prompt, *response[:-1]], np.int32)
    return Rows(split=(1, before, 1, count), lengths=((before,), (count,)), ids=ids, positions=np.arange(ids.size))


def groups_of(name: str, vocabulary: int) -> list[SequenceGroup]:
    """Draw prompts with two responses each."""
    groups = []
    for i, (prompt, responses) in enumerate(GROUPS):
        ids = [whole_numbers(f"{name} {i} {j}", vocabulary, count) for j, count in enumerate((prompt, *responses))]
        groups.append(SequenceGroup(ids[0], tuple(ids[1:])))
    return groups
