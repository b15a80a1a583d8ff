"""The sample that made an update impossible is found: by its numbers, or by running parts of a micro-batch again."""

from itertools import product

import numpy as np
import pytest

from mindrlhf.training.bad_samples import BadSample, find_bad_samples
from mindrlhf.training.batch import SequenceGroup, cut, pad
from mindrlhf.training.passes import MicroResult

GROUPS, SAMPLES, BAD_TOKEN = 5, 4, 63


def batches(bad=(), **fields):
    """Micro-batches of 5 groups with 4 samples; `bad` (group, sample) pairs have a token of their own."""
    rng = np.random.default_rng(0)
    groups = []
    for group in range(GROUPS):
        responses = [rng.integers(1, 60, rng.integers(2, 7)).astype(np.int32) for _ in range(SAMPLES)]
        for sample in range(SAMPLES):
            responses[sample][-1] = BAD_TOKEN if (group, sample) in bad else 1
        groups.append(SequenceGroup(rng.integers(1, 60, 4 + group).astype(np.int32), tuple(responses)))
    ones = [[np.ones(len(r), np.float32) for r in g.responses] for g in groups]
    micros = cut(groups, 120, 8)
    assert len(micros) > 1
    fields = {name: change(ones) for name, change in fields.items()}
    given = [pad(micro, groups, ones, {"advantages": ones} | fields) for micro in micros]
    results = [MicroResult(0.0, np.zeros_like(b.weights), {"pg_loss": np.zeros_like(b.weights)}) for b in given]
    return micros, given, results


def graph(calls):
    """A graph whose gradient is not finite where a response with weight holds the bad token."""

    def is_finite(batch):
        calls.append(batch)
        return not ((batch.targets == BAD_TOKEN) & (batch.weights > 0)).any()

    return is_finite


def never(batch):
    raise AssertionError("what is seen at once needs no further run")


@pytest.mark.parametrize("where", list(product(range(GROUPS), range(SAMPLES))))
def test_a_gradient_alone_is_traced_to_its_sample(where):
    calls = []
    assert find_bad_samples(*batches(bad=[where]), graph(calls)) == [BadSample(*where, "its gradient")]
    assert len(calls) < 14  # by halving
    assert len({(c.prefix_ids.shape, c.targets.shape) for c in calls}) <= len(batches()[0])  # no graph of a new shape


def test_one_of_several_in_a_micro_batch_is_named():
    ((group, sample),) = {(c.group, c.sample) for c in find_bad_samples(*batches(bad=[(1, 2), (1, 3)]), graph([]))}
    assert (group, sample) in ((1, 2), (1, 3))


def test_nobody_alone_is_to_blame():
    micros, given, results = batches()
    assert find_bad_samples(micros, given, results, lambda batch: True) == []
    whole = [id(batch) for batch in given]
    assert find_bad_samples(micros, given, results, lambda batch: id(batch) not in whole) == []


def test_what_went_in_is_seen_at_once():
    def spoiled(ones):
        rows = [[row.copy() for row in group] for group in ones]
        rows[3][1][0] = np.nan
        return rows

    assert find_bad_samples(*batches(advantages=spoiled), never) == [BadSample(3, 1, "its advantages")]


def test_what_came_out_is_seen_at_once_and_padding_does_not_count():
    micros, given, results = batches()
    results[0].output[given[0].mask == 0] = np.nan
    results[1].metrics["pg_loss"][2, 0] = np.inf
    expected = BadSample(micros[1].groups[0], 2, "its pg loss")
    assert find_bad_samples(micros, given, results, never) == [expected]
