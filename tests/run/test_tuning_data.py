"""Rows that fine-tuning holds out for validation."""

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.run.tuning_data import held_out_share
from mindrlhf.training.batch import SequenceGroup

PAIRS = [SequenceGroup(np.array([row]), (np.array([row]),), None, (row,)) for row in range(40)]


def rows(pairs) -> list[int]:
    return [pair.identity[0] for pair in pairs]


def test_a_share_is_drawn_once_for_a_seed():
    trained, held = map(rows, held_out_share(PAIRS, 0.25, seed=3))
    assert len(held) == 10
    assert trained == sorted(trained)
    assert held == sorted(held)
    assert sorted(trained + held) == list(range(40))
    assert rows(held_out_share(PAIRS, 0.25, seed=3)[1]) == held
    assert rows(held_out_share(PAIRS, 0.25, seed=4)[1]) != held


def test_no_share_holds_out_nothing():
    trained, held = held_out_share(PAIRS, 0.0, seed=0)
    assert rows(trained) == list(range(40))
    assert held == []


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_leaves_rows_on_both_sides(share):
    with pytest.raises(UserError, match=r"data\.val_share is 0\..*of 40 rows"):
        held_out_share(PAIRS, share, seed=0)
