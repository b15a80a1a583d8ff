"""The fused halves of a layer against the composed ones, values and gradients: with and without biases and norms of
heads, on the first rank of a tensor-parallel group and on another, with padding, and computed again.
"""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from mindspore import GRAPH_MODE, Parameter, ParameterTuple, Tensor, nn, ops, set_context
from small_model import SmallModel
from whole_sequences import batch_inputs

from mindrlhf.backend import native
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.operators import COMPOSED, Operators
from mindrlhf.configs.lora import Adapter
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.weight import collect_gradients

N, P, G, R = 2, 70, 2, 90  # more positions than one block of scores holds
HIDDEN, ROWS = 32, N * P + N * G * R
SOME = Adapter(4, 8, exclude_modules=("k_proj", "up_proj"), rank_pattern={"down_proj": 20}, alpha_pattern={"o_proj": 3})
FEW = Adapter(2, 8, target_modules=("layers.0.self_attn.v_proj",))  # most halves have no trained weight
# (biases, norms of heads, rank, adapter)
CASES = [(True, False, 1, None), (False, True, 0, SOME)]
MORE_CASES = [
    *((True, False, 0, None), (False, True, 1, None), (True, True, 0, Adapter(8, 8)), (True, False, 1, SOME)),
    *((True, True, 1, None), (False, False, 1, None), (False, True, 0, None), (False, True, 0, FEW)),
]
ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)]
PADDED = ([P, 9], [R, 1, 0, 65])
WHOLE = ([P] * N, [R] * (N * G))


@pytest.fixture(scope="module")
def fused() -> Operators:
    found = CPU.operators()
    if not found.fused:
        assert native.library().problem == "g++ is not installed"
        pytest.skip(f"the fused operators cannot be built here: {native.library().problem}")
    return found


def as_rank(rank: int) -> TensorParallel:
    """One rank of a group whose sums are left out."""
    shards = TensorParallel()
    shards.rank = rank
    return shards


class Result(nn.Cell):
    """The sum of the output times d_output, whose gradients are looked at; and the output."""

    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, x, prefix_lengths, lengths, d_output):
        ids = ops.zeros((N, P)).astype("int32"), ops.zeros((N * G, R)).astype("int32")
        out = self.decoder.stage(batch_inputs(ids[0], prefix_lengths, ids[1], lengths), x)[0]
        return (out * d_output).sum(), out


class Gradients(nn.Cell):
    def __init__(self, result, parameters, buffers):
        super().__init__(auto_prefix=False)
        self.run = ops.value_and_grad(result, 0, collect_gradients(result, parameters, buffers), has_aux=True)

    def construct(self, *inputs):
        (_, out), (d_x, done) = self.run(*inputs)
        return out, ops.depend(d_x, done)


class Subject:
    """A decoder of one layer (two with FEW) without its embedding, and what its graph gives for x."""

    def __init__(self, used: Operators, case, recompute: bool = False):
        set_context(mode=GRAPH_MODE, device_target="CPU")
        bias, norms, rank, adapter = case
        layers = 2 if adapter == FEW else 1  # each is compiled for seconds
        self.model = SmallModel.random(attention_bias=bias, qk_norm=norms, adapter=adapter, num_layers=layers)
        parameters = build_parameters(self.model.specs, lambda spec: self.model.arrays[spec.name])
        self.decoder = Decoder(
            self.model.config, parameters, used, P + R, shards=as_rank(rank), is_first=False, recompute=recompute
        )
        inner = [spec for spec in self.model.specs if spec.kind not in ("embedding", "head")]
        self.names = [spec.name for spec in inner if spec.trains]
        own = [parameters[name] for name in self.names]
        buffers = [Parameter(Tensor(np.zeros(one.shape, np.float32)), name=f"d.{one.name}") for one in own]
        self.buffers = ParameterTuple(buffers)
        self.graph = Gradients(Result(self.decoder), own, self.buffers)

    def __call__(self, lengths, x=None) -> dict[str, np.ndarray]:
        """The output's rows that count, and gradients by name."""
        rng = np.random.default_rng(3)
        x = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32) if x is None else x
        counts = (np.arange(R) < np.array(lengths[1])[:, None]).reshape(-1, 1)
        d_output = np.where(counts, rng.normal(size=(N * G * R, HIDDEN)), 0).astype(np.float32)
        for buffer in self.buffers:
            buffer.asnumpy()[...] = 0
        out, d_x = self.graph(Tensor(x), *(Tensor(np.array(part, np.int32)) for part in lengths), Tensor(d_output))
        found = {name: one.asnumpy().copy() for name, one in zip(self.names, self.buffers, strict=True)}
        return {"output": np.where(counts, out.asnumpy(), 0), "x": d_x.asnumpy(), **found}


@pytest.fixture(scope="module")
def subjects(fused):
    """(operators or None for the fused ones, case, recompute) -> a subject, compiled once for all tests."""
    known = {}

    def get(used: Operators | None, case, recompute: bool = False) -> Subject:
        key = (used is None, repr(case), recompute)
        if key not in known:
            known[key] = Subject(used or fused, case, recompute)
        return known[key]

    return get


def unused_rows(lengths) -> np.ndarray:
    """bool[ROWS]: those of padding."""
    used = [np.arange(size) < np.array(part)[:, None] for size, part in zip((P, R), lengths, strict=True)]
    return ~np.concatenate([part.ravel() for part in used])


@pytest.mark.parametrize("case", ALL_CASES)
def test_fused_halves_equal_composed_ones(request, subjects, case):
    """By default those with adapters are computed again, too."""
    expected, found = subjects(COMPOSED, case), subjects(None, case)
    computes_again = case == CASES[1] or request.config.getoption("--slow")
    again = subjects(None, case, recompute=True) if computes_again else None
    assert found.decoder.fused
    for lengths in (PADDED, WHOLE):
        composed, values = expected(lengths), found(lengths)
        for name, array in composed.items():
            assert np.abs(array).max() > 1e-3, name
            scale = np.abs(array).max()
            np.testing.assert_allclose(values[name], array, rtol=0, atol=2e-5 * scale, err_msg=name)
        for name, array in again(lengths).items() if again else ():
            assert array.tobytes() == values[name].tobytes(), name


def test_padding_is_neither_read_nor_left_undefined(subjects):
    subject, unused = subjects(None, CASES[1]), unused_rows(PADDED)
    x = np.random.default_rng(3).normal(size=(ROWS, HIDDEN)).astype(np.float32)
    clean, dirty = subject(PADDED, x), subject(PADDED, np.where(unused[:, None], np.float32(np.nan), x))
    for name, array in clean.items():
        assert array.tobytes() == dirty[name].tobytes(), name
    assert not clean["x"][unused].any()


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_decoded_position_equals_the_composed_one(fused, case):
    """Its output, and what it writes to the caches."""
    slots, size = 5, 24
    found = []
    for used in (fused, COMPOSED):
        subject = Subject(used, case)
        config = subject.model.config
        shape = (slots, config.num_kv_heads, size, config.head_dim)
        rng = np.random.default_rng(0)
        keys, values = (
            ParameterTuple(
                [
                    Parameter(rng.normal(size=shape).astype(np.float32), name=f"{part}{i}")
                    for i in range(config.num_layers)
                ]
            )
            for part in ("key", "value")
        )

        class Decode(nn.Cell):
            def __init__(self, decoder, keys, values):
                super().__init__(auto_prefix=False)
                self.layers, self.decoder, self.keys, self.values = decoder.layers, decoder, keys, values

            def construct(self, x, positions):
                given = self.decoder.decode_inputs(positions, positions + 2, self.keys)
                for i, layer in enumerate(self.layers):
                    x = layer.decode(x, given, self.keys[i], self.values[i])
                return x

        x, positions = rng.normal(size=(slots, HIDDEN)).astype(np.float32), np.array([0, 3, 23, 7, 20], np.int32)
        out = Decode(subject.decoder, keys, values)(Tensor(x), Tensor(positions)).asnumpy()
        found.append([out, *(parameter.asnumpy().copy() for parameter in (*keys, *values))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1, np.abs(other).max()))


PRINT_BYTES = "from test_halves import *; print(digest(Subject(CPU.operators(), CASES[0])))"


def digest(subject: Subject) -> str:
    found = hashlib.sha256()
    for array in subject(PADDED).values():
        found.update(array.tobytes())
    return found.hexdigest()


def test_results_do_not_depend_on_the_number_of_threads(subjects):
    """Here there are one or two; a process of its own has three."""
    assert os.environ["OMP_NUM_THREADS"] in ("1", "2")
    three = {"OMP_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(["tests/models", "tests/helpers", "."])}
    command = [sys.executable, "-c", PRINT_BYTES]
    done = subprocess.run(command, env=os.environ | three, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(subjects(None, CASES[0]))
