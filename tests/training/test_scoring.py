"""Token log-probs of whole groups against the float64 oracle."""

import numpy as np
import pytest
from small_model import SmallModel

from mindrlhf.backend.compile.graph import compile_seconds
from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer

TEMPERATURE = 0.7
LENGTHS = [(1, (6, 1)), (9, (3,)), (2, (1, 2, 12)), (17, (5, 5, 5))]  # prompt, responses


@pytest.fixture(scope="module")
def model():
    return SmallModel.random(2)


@pytest.fixture(scope="module")
def decoder(model):
    return model.build()[0]


@pytest.fixture(scope="module")
def groups():
    rng = np.random.default_rng(0)
    ids = lambda count: rng.integers(0, 64, count).astype(np.int32)  # noqa: E731
    return [SequenceGroup(ids(prompt), tuple(ids(length) for length in responses)) for prompt, responses in LENGTHS]


@pytest.fixture(scope="module")
def scorer(decoder):
    """Small enough a budget for two micro-batches."""
    return Scorer(PolicyLogProbs(decoder, TEMPERATURE), TrainSettings(max_tokens_per_micro_batch=200, length_bucket=16))


def assert_are_the_oracle_s(model, groups, scored):
    assert len(scored) == len(groups)
    for group, rows in zip(groups, scored, strict=True):
        assert len(rows) == len(group.responses)
        for response, row in zip(group.responses, rows, strict=True):
            assert row.dtype == np.float32
            expected = model.log_probs(group.prompt_ids, response, TEMPERATURE)
            np.testing.assert_allclose(row, expected, rtol=0, atol=2e-5)


def test_log_probs_are_those_of_the_oracle(model, groups, scorer):
    assert_are_the_oracle_s(model, groups, scorer(groups))


def test_order_and_company_do_not_matter(model, groups, scorer):
    others = [groups[i] for i in (3, 0, 2)]
    assert_are_the_oracle_s(model, others, scorer(others))


def test_one_micro_batch_in_other_buckets_gives_the_same(model, groups, decoder):
    scorer = Scorer(PolicyLogProbs(decoder, TEMPERATURE), TrainSettings(length_bucket=4))
    assert_are_the_oracle_s(model, groups, scorer(groups))


def test_compiling_is_counted_once_for_each_shape(groups, scorer):
    scorer(groups)
    compiled = compile_seconds()
    assert compiled > 0
    scorer(groups)
    assert compile_seconds() == compiled


def test_no_groups(scorer):
    assert scorer([]) == []
