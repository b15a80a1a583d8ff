import mmap
import os

import pytest

from mindrlhf.metrics.metric_set import MetricSet, reduce
from mindrlhf.metrics.performance import (
    add_performance,
    add_training,
    peak_resident_bytes,
    resident_bytes,
)
from mindrlhf.units import GIB


def test_two_ranks_give_verls_definitions():
    ranks = []
    for gen, update, response, total in ((1.0, 3.0, 300, 1000), (2.0, 3.0, 100, 600)):
        metrics = MetricSet()
        add_performance(metrics, {"gen": gen, "update_actor": update, "step": 5.0}, response, total, ranks=2)
        ranks.append(metrics)
    values = reduce(ranks[0], lambda own: [own, ranks[1]]).results()
    assert values["timing_s/gen"] == 1.5
    assert values["timing_s/update_actor"] == 3.0
    assert values["timing_per_token_ms/gen"] == pytest.approx(1500 / 400)
    assert values["timing_per_token_ms/update_actor"] == pytest.approx(3000 / 1600)
    assert "timing_per_token_ms/step" not in values
    assert values["perf/total_num_tokens"] == 1600
    assert values["perf/time_per_step"] == 5.0
    assert values["perf/throughput"] == pytest.approx(1600 / (5.0 * 2))


def test_memory_of_the_process_and_its_peak():
    size = 256 * 1024**2  # beside which what other threads of the process take is little
    before = resident_bytes()
    with mmap.mmap(-1, size) as memory:
        memory.write(os.urandom(4096) * (size // 4096))
        assert resident_bytes() - before == pytest.approx(size, rel=0.1)
        inside = resident_bytes()
    assert peak_resident_bytes() >= inside - 4 * 1024**2, "the peak outlives what was freed"
    metrics = MetricSet()
    add_performance(metrics, {"step": 1.0}, 5, 10)
    values = metrics.results()
    assert values["perf/max_memory_allocated_gb"] == pytest.approx(peak_resident_bytes() / GIB)
    assert values["perf/cpu_memory_used_gb"] == pytest.approx(resident_bytes() / GIB, rel=0.05)


def test_training_is_not_summed_over_ranks():
    metrics = MetricSet()
    add_training(metrics, 12, 0.5)
    values = reduce(metrics, lambda own: [own] * 4).results()
    assert values == {"training/global_step": 12.0, "training/epoch": 0.5}
