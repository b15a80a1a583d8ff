import time
from itertools import count

import mindspore
import pytest

from mindrlhf.backend import ceiling
from mindrlhf.backend.ceiling import LEAST_S, matmul_ceiling, product_rate
from mindrlhf.backend.cpu import CPU


@pytest.fixture
def measured_anew():
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    product_rate.cache_clear()
    yield
    product_rate.cache_clear()


@pytest.mark.parametrize(("took", "products"), [(2**-3, 1), (2**-8, int(2**8 * LEAST_S))])
def test_the_ceiling_is_the_work_of_products_by_the_clock(measured_anew, monkeypatch, took, products):
    """A clock by which everything between two looks at it takes as long."""
    looks = count()
    with monkeypatch.context() as patch:
        patch.setattr(ceiling, "time", type("Clock", (), {"perf_counter": lambda: next(looks) * took}))
        found = matmul_ceiling("CPU")
    assert found == pytest.approx(2 * CPU.ceiling_size**3 * products / took)
    assert matmul_ceiling("CPU") == found, "measured once"


def test_the_ceiling_by_the_real_clock_is_a_number(measured_anew):
    start = time.perf_counter()
    found = matmul_ceiling("CPU")
    operations = found * (time.perf_counter() - start)
    assert operations > 2 * CPU.ceiling_size**3, "the product that was timed fits into the time"


@pytest.mark.parametrize("decoded", ["float32", "bfloat16", "int8"])
def test_products_of_a_decode_step_have_rates_of_their_own(measured_anew, fused, decoded):
    start = time.perf_counter()
    found = product_rate("CPU", "float32", 8, 100, 70, decoded)
    assert found * (time.perf_counter() - start) > 2 * 8 * 100 * 70
