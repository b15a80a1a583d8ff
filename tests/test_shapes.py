"""Sizes of graphs and caches: whole buckets, never less than what has to fit."""

import pytest

from mindrlhf.shapes import cache_positions, longest_position, padded_prefix, pool_size
from mindrlhf.units import GIB, MIB, size


@pytest.mark.parametrize("bucket", [1, 16, 64])
def test_padded_sizes_are_whole_buckets_and_hold_the_longest(bucket):
    for prompt, response in ((1, 1), (2, 16), (16, 17), (17, 1), (65, 64)):
        prefix, cache = padded_prefix(prompt, bucket), cache_positions(prompt, response, bucket)
        longest = longest_position(prompt, response, bucket)
        assert prefix % bucket == cache % bucket == longest % bucket == 0
        assert max(1, prompt - 1) <= prefix < max(1, prompt - 1) + bucket
        assert prompt + response <= cache <= longest < prompt + response + 2 * bucket


def test_a_pool_fills_all_slots():
    assert [pool_size(slots, 4) for slots in (1, 4, 5, 64)] == [1, 1, 2, 16]


def test_sizes_are_written_in_the_larger_unit_that_fits():
    assert [size(nbytes) for nbytes in (0, 340 * MIB, GIB, 5 * GIB // 4)] == [
        "0.0 MiB",
        "340.0 MiB",
        "1.00 GiB",
        "1.25 GiB",
    ]
