"""Counter-based random numbers: pure, and as good as random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.random_numbers import uniform

COUNTERS = st.integers(0, 2**40)
GRID = np.meshgrid(np.arange(32), np.arange(16), np.arange(512), indexing="ij")  # prompt, sample, position


GAMMA = 0x9E3779B97F4A7C15


def splitmix(x: int) -> int:
    """The published finaliser over Python's whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_the_finaliser_is_the_published_one():
    # The first outputs of SplitMix64 from state 0, as its authors' C code prints them.
    assert [splitmix(n * GAMMA % 2**64) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@given(st.tuples(*[COUNTERS] * 5))
def test_one_number_is_the_top_bits_of_the_mixed_counters(counters):
    """Recorded rollouts are replayed by their seeds: the numbers may not change from one version to the next."""
    state = 0
    for counter in counters:
        state = splitmix(((state ^ counter) + GAMMA) % 2**64)
    value = uniform(*counters)
    assert value.dtype == np.float32
    assert float(value) == (state >> 41) / 2**23


def test_a_number_depends_on_its_counters_alone():
    whole = uniform(5, 2, *GRID)
    rng = np.random.default_rng(0)
    for prompt, sample, position in rng.integers(0, (32, 16, 512), (50, 3)):
        assert uniform(5, 2, prompt, sample, position) == whole[prompt, sample, position]
    order = rng.permutation(512)
    np.testing.assert_array_equal(uniform(5, 2, 3, 4, order), whole[3, 4, order])
    np.testing.assert_array_equal(uniform(5, 2, np.arange(32)[:, None], 1, np.arange(9)), whole[:, 1, :9])


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_numbers_are_uniform(seed):
    values = uniform(seed, 1, *GRID)
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() <= 1 - 2.0**-23
    counts = np.histogram(values, 256, (0, 1))[0]
    expected = values.size / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6; six on both sides, as too even is suspicious too.
    assert 120 < chi_square < 390


def test_neighbouring_counters_are_unrelated():
    base = uniform(3, 7, *GRID).ravel()
    moved = [
        uniform(4, 7, *GRID),
        uniform(3, 8, *GRID),
        uniform(7, 3, *GRID),
        uniform(3, 7, GRID[0] + 1, *GRID[1:]),
        uniform(3, 7, GRID[0], GRID[1] + 1, GRID[2]),
        uniform(3, 7, GRID[0], GRID[1], GRID[2] + 1),
        uniform(3, 7, GRID[1], GRID[0], GRID[2]),
    ]
    for other in moved[:-1]:
        assert abs(np.corrcoef(base, other.ravel())[0, 1]) < 5 / np.sqrt(base.size)
        assert (base == other.ravel()).mean() < 1e-5
    # Swapped counters agree where the two are equal, and only there.
    same = moved[-1].ravel() == base
    np.testing.assert_array_equal(same, (GRID[0] == GRID[1]).ravel())


def test_the_largest_number_times_a_total_stays_below_it():
    largest = np.float32(1 - 2.0**-23)
    totals = np.random.default_rng(1).uniform(1e-30, 1e30, 10_000).astype(np.float32)
    assert (largest * totals < totals).all()
