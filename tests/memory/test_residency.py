"""What a phase does not need leaves memory, and comes back bit by bit, without a graph noticing."""

import ctypes
import mmap
import os
import time

import numpy as np
import psutil
import pytest

from mindrlhf.backend.ascend import ASCEND
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.memory import FileStore, zero_parameter
from mindrlhf.errors import UserError
from mindrlhf.memory.residency import Residency, moving_roles
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.model_roles import INFER, POLICY, REFERENCE, TRAIN
from mindrlhf.phases import CACHE, PHASES
from mindrlhf.units import GIB

(REFERENCE_WEIGHTS,) = REFERENCE.weights
GRADIENTS = POLICY.training.gradients
MOMENTS = POLICY.training.moments

MIB = 2**20


def rss() -> int:
    return psutil.Process().memory_info().rss


def parameter(shape, name="weights", seed=0):
    from mindspore import Parameter, Tensor

    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return Parameter(Tensor(values), name=name)


@pytest.fixture
def moving(tmp_path) -> Residency:
    return Residency(lambda parameters: FileStore(parameters, tmp_path))


def test_memory_falls_and_a_compiled_graph_sees_the_same_weights(moving):
    import mindspore
    from mindspore import Tensor, nn, ops

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")

    class Product(nn.Cell):
        def __init__(self, weight):
            super().__init__(auto_prefix=False)
            self.weight = weight

        def construct(self, x):
            return ops.MatMul()(x, self.weight)

    weight = parameter((4096, 8192))
    x = Tensor(np.ones((2, 4096), np.float32))
    graph = Product(weight)
    expected = graph(x).asnumpy()
    compiled = set(graph.compile_cache)
    before = rss()
    moving.add(TRAIN, [weight])
    assert before - rss() > 0.95 * 128 * MIB
    moving.enter("update_actor")
    assert before - rss() < 0.05 * 128 * MIB
    assert graph(x).asnumpy().tobytes() == expected.tobytes()
    assert set(graph.compile_cache) == compiled, "the graph is the one that was there"
    weight.asnumpy()[...] *= 2.0  # an update
    moving.enter("gen")
    moving.enter("update_actor")
    np.testing.assert_array_equal(graph(x).asnumpy(), 2 * expected)


def test_only_what_has_changed_is_written(moving):
    reference, train = parameter((64, 1024), "reference"), parameter((64, 1024), "train")
    moving.add(REFERENCE_WEIGHTS, [reference])
    moving.add(TRAIN, [train])
    figures = MetricSet()
    moving.report(figures)
    assert figures.results()["swap/out_gb"] > 0
    for phases, written in ((("ref", "gen"), 0), (("old_log_prob", "ref"), 0), (("update_actor", "ref"), 1)):
        for phase in phases:
            moving.enter(phase)
        figures = MetricSet()
        moving.report(figures)
        nbytes = FileStore([train], None).nbytes
        assert figures.results()["swap/out_gb"] * GIB == pytest.approx(written * nbytes)
    assert moving.resident() == {REFERENCE_WEIGHTS: reference.nbytes}


def test_sizes_of_roles_are_reported_without_swap_too():
    moving = Residency(lambda parameters: None, moving_roles(False, ASCEND))
    moving.add(REFERENCE_WEIGHTS, [parameter((64, 1024), "a")])
    moving.add(f"{MOMENTS}.0", [parameter((8, 1024), "b")])
    moving.add(f"{MOMENTS}.1", [parameter((8, 1024), "c")])
    moving.add(GRADIENTS, [])
    figures = MetricSet()
    moving.report(figures)
    expected = {f"swap/role_gb/{REFERENCE_WEIGHTS}": 64 * 4096 / GIB, f"swap/role_gb/{MOMENTS}": 2 * 8 * 4096 / GIB}
    assert figures.results() == pytest.approx(expected)


def test_zeros_and_scratch_need_no_file(moving, tmp_path):
    from mindspore import Parameter, Tensor

    moments, gradients = (Parameter(Tensor(np.zeros((64, 1024), np.float32)), name=name) for name in ("m", "g"))
    moving.add(MOMENTS, [moments], zeros=True)
    moving.add(GRADIENTS, [gradients], zeros=True)
    moving.enter("update_actor")
    moving.use(MOMENTS)
    assert not moments.asnumpy().any()
    moments.asnumpy()[...] = 3.0
    moving.enter("gen")
    figures = MetricSet()
    moving.report(figures)
    assert figures.results()["swap/out_gb"] * GIB == FileStore([moments], None).nbytes
    moving.enter("update_actor")
    moving.use(MOMENTS)
    assert (moments.asnumpy() == 3.0).all()
    assert not gradients.asnumpy().any()
    assert not list(tmp_path.iterdir())  # the file has no name, so that nothing can stay behind


@pytest.mark.parametrize("shape", [(3,), (1023,), (1024,), (5, 2049), (33, 1024, 3)])
def test_any_size_comes_back_bit_by_bit(tmp_path, shape):
    several = [parameter(shape, f"p{i}", seed=i) for i in range(3)]
    expected = [p.asnumpy().copy() for p in several]
    store = FileStore(several, tmp_path)
    assert 0 <= sum(p.nbytes for p in several) - store.nbytes < 3 * 2 * 4096 + 1
    for _ in range(2):
        store.put_away(keep=True)
        if store.nbytes:
            assert any((p.asnumpy() != e).any() for p, e in zip(several, expected, strict=True))
        store.bring_back()
        for p, e in zip(several, expected, strict=True):
            assert p.asnumpy().tobytes() == e.tobytes()
            p.asnumpy()[...] += 1.0
            e += 1.0


def test_memory_that_is_wholly_written_is_there_at_once(moving):
    """Of gradients, whose phase writes every number; a cache takes what is touched."""
    gradients, cache = (zero_parameter(name, (4096, 2048)) for name in ("gradients", "cache"))
    moving.add(GRADIENTS, [gradients], zeros=True)
    moving.add(CACHE, [cache], zeros=True)
    before = rss()
    moving.enter("gen")
    assert rss() - before < 2 * MIB
    moving.enter("update_actor")
    assert rss() - before > 0.95 * 32 * MIB
    assert not gradients.asnumpy().any()


def test_what_the_next_phase_needs_is_read_ahead(tmp_path):
    """The file is in the operating system's cache before the phase asks, and the process is no larger for it."""
    weight = parameter((1024, 2048))
    expected = weight.asnumpy().copy()
    stores = []

    def open_store(parameters):
        stores.append(FileStore(parameters, tmp_path))
        return stores[-1]

    moving = Residency(open_store)
    moving.add(TRAIN, [weight])
    file = stores[0]._file.fileno()

    pages = np.memmap(f"/proc/self/fd/{file}", np.uint8, "r")
    last = (stores[0].nbytes - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    is_there = ctypes.c_ubyte()

    def at_hand() -> bool:
        """Whether the file's last page is in memory; asking reads nothing."""
        address = ctypes.c_void_p(pages.ctypes.data + last)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(is_there)) == 0
        return bool(is_there.value & 1)

    def forget():
        """Reading ahead that is under way may bring the page back once."""
        for _ in range(100):
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.01)
            if not at_hand():
                break

    try:
        forget()
        if at_hand():
            pytest.skip("this file system's files are always in memory")
    except OSError as error:
        pytest.skip(f"this file system cannot say what it has in memory ({error.strerror})")
    for phase in ("gen", "update_actor", "reshard"):  # a step, from which the order is known
        moving.enter(phase)
    moving.enter("ref")  # nothing follows it so far
    forget()
    assert not at_hand()
    before = rss()
    moving.enter("gen")
    deadline = time.monotonic() + 10
    while not at_hand() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert at_hand()
    assert rss() - before < MIB
    assert moving.resident() == {}
    moving.enter("update_actor")
    np.testing.assert_array_equal(weight.asnumpy(), expected)


def test_zeros_take_no_memory_until_they_are_written_to():
    before = rss()
    zeros = zero_parameter("zeros", (4096, 8192))
    assert rss() - before < 0.1 * 128 * MIB
    assert not zeros.asnumpy()[:64].any()
    zeros.asnumpy()[...] = 1.0
    assert rss() - before > 0.95 * 128 * MIB


def test_a_full_disk_costs_nothing(tmp_path, monkeypatch):
    weight = parameter((64, 1024))
    expected = weight.asnumpy().copy()
    store = FileStore([weight], tmp_path / "swap")
    write, left = os.pwrite, [2]

    def full(file, data, offset):
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(file, data[:4096], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"swap cannot take 0\.00 GB \(No space left on device\); make room"):
        store.put_away(keep=True)
    assert weight.asnumpy().tobytes() == expected.tobytes()


def test_a_phase_or_role_without_a_row_is_refused(moving):
    with pytest.raises(ValueError, match="does not say what the phase 'elsewhere' needs"):
        moving.enter("elsewhere")
    with pytest.raises(ValueError, match="no phase needs the role elsewhere"):
        moving.add("elsewhere", [parameter((8,))])
    moving.add(INFER, [parameter((8,))])
    with pytest.raises(ValueError, match="has its parameters already"):
        moving.add(INFER, [parameter((8,))])


def test_without_swap_only_caches_come_and_go(tmp_path):
    cache, weight = parameter((1024, 2048), "cache"), parameter((64, 1024), "weight")
    gradient = parameter((64, 1024), "gradient")
    expected = weight.asnumpy().copy()
    moving = Residency(lambda parameters: FileStore(parameters, tmp_path), moving_roles(False, CPU))
    moving.add(CACHE, [cache], zeros=True)
    moving.add(TRAIN, [weight])
    moving.add(GRADIENTS, [gradient])
    moving.enter("gen")
    cache.asnumpy()[...] = 1.0
    held = rss()
    moving.enter("update_actor")
    moving.use(MOMENTS)
    assert held - rss() > 0.95 * 8 * MIB
    assert weight.asnumpy().tobytes() == expected.tobytes()
    assert gradient.asnumpy().all()
    assert not list(tmp_path.iterdir())
    figures = MetricSet()
    moving.report(figures)
    sizes = {f"swap/role_gb/{CACHE}": 8 * MIB / GIB}
    sizes |= {f"swap/role_gb/{role}": MIB / 4 / GIB for role in (TRAIN, GRADIENTS)}
    assert figures.results() == sizes, "nothing has moved"


def test_phases_that_disturb_what_is_read_elsewhere():
    """Without swap those that change the weights; with swap all that move anything."""
    still, moving = (Residency(lambda parameters: None, moving_roles(swap, CPU)) for swap in (False, True))
    saved = PHASES["save_checkpoint"].groups
    disturbing = {phase for phase in PHASES if still.disturbs(phase, saved)}
    assert disturbing == {"update_actor", "update_critic", "sync_ref", "load_checkpoint"}
    assert {phase for phase in PHASES if moving.disturbs(phase, saved)} == {
        phase for phase in PHASES if PHASES[phase].groups
    }
    assert {"gen", "update_actor"} <= {phase for phase in PHASES if PHASES[phase].groups}


def test_without_swap_everything_stays_on_a_device(tmp_path):
    weight = parameter((64, 1024))
    expected = weight.asnumpy().copy()
    idle = Residency(lambda parameters: pytest.fail("opened a store"), moving_roles(False, ASCEND))
    idle.add(TRAIN, [weight])
    idle.enter("gen")
    assert weight.asnumpy().tobytes() == expected.tobytes()
    figures = MetricSet()
    idle.report(figures)
    assert figures.results() == {f"swap/role_gb/{TRAIN}": MIB / 4 / GIB}, "nothing has moved"


def test_a_role_in_parts_has_one_part_in_memory(moving):
    parts = {f"{MOMENTS}.{i}": parameter((64, 1024), f"m{i}", seed=i) for i in range(3)}
    expected = {name: part.asnumpy().copy() for name, part in parts.items()}
    for name, part in parts.items():
        moving.add(name, [part])
    for _ in range(2):
        moving.enter("update_actor")
        assert moving.resident() == {}
        for name, part in parts.items():
            moving.use(name)
            assert list(moving.resident()) == [name]
            np.testing.assert_array_equal(part.asnumpy(), expected[name])
            part.asnumpy()[...] += 1.0
            expected[name] += 1.0
        moving.enter("gen")
    with pytest.raises(ValueError, match="the phase 'gen' does not use moments in parts"):
        moving.use(f"{MOMENTS}.0")
    moving.enter("save_checkpoint")
    assert list(moving.resident()) == list(parts)
    for name, part in parts.items():
        np.testing.assert_array_equal(part.asnumpy(), expected[name])
    figures = MetricSet()
    moving.report(figures)
    assert figures.results()[f"swap/role_gb/{MOMENTS}"] * GIB == 3 * 64 * 1024 * 4


def test_every_group_has_a_phase_that_brings_it_and_one_that_does_not():
    needed = [phase.groups for phase in PHASES.values() if phase.groups]
    for group in set().union(*needed):
        assert any(group in groups for groups in needed)
        assert not all(group in groups for groups in needed)
