"""The list of token arrays: it names every array that a part of a step makes or reads, and batches follow it."""

import numpy as np
import pytest
from step_parts import experience

from mindrlhf.algorithms.losses import policy_loss
from mindrlhf.model_roles import ROLES
from mindrlhf.records.rows import SCHEMA
from mindrlhf.token_arrays import RECORDED, TOKEN_ARRAYS, TokenArray
from mindrlhf.training.batch import SequenceGroup, cut, pad
from mindrlhf.training.objective import policy_objective, value_objective


def read_by(reader: str) -> set[str]:
    return {name for name, array in TOKEN_ARRAYS.items() if reader in array.readers}


def test_objectives_read_the_arrays_that_the_list_gives_them():
    everything = {"on_policy": False, "kl": "k3", "beta": None, "correction": lambda old, drawn, mask: (1.0, mask)}
    assert set(policy_objective(policy_loss("kl_cov"), **everything).fields) == read_by("policy loss")
    assert set(value_objective(0.5).fields) == read_by("value loss")


def test_roles_score_the_arrays_that_the_list_gives_them():
    for name, role in ROLES.items():
        if role.scoring and role.scoring.array:
            assert TOKEN_ARRAYS[role.scoring.array].maker == name


def test_recorded_arrays_are_columns_and_come_from_the_rollout():
    assert {array.name for array in RECORDED} <= SCHEMA.keys()
    assert {array.maker for array in RECORDED} == {"engine", "environments"}
    # Records that miss any other column are of an earlier version.
    assert {one.name for one in RECORDED if one.absent is None} == {"behaviour_log_probs", "policy_log_probs"}
    for array in RECORDED:
        if array.column == "json":  # which leaves NaN out
            assert np.isnan(array.absent)


def test_an_absent_array_has_the_value_of_the_list():
    one = experience(1, [0.0, 1.0], lengths=[2, 3])
    assert [row.tolist() for row in one.rows("old_log_probs")] == [[1, 1], [1, 1, 1]]
    assert all(np.isnan(row).all() for row in one.rows("turn_rewards"))
    for name in ("reference_log_probs", "values", "unknown"):
        with pytest.raises(KeyError, match=name):
            one.rows(name)
    given = tuple(np.zeros(n, np.float32) for n in (2, 3))
    assert one.with_tokens(old_log_probs=given).rows("old_log_probs") is given


def test_a_batch_has_the_type_and_padding_of_the_list(monkeypatch):
    monkeypatch.setitem(TOKEN_ARRAYS, "versions", TokenArray("versions", "engine", (), np.int32, padding=-1))
    groups = [SequenceGroup(np.arange(3), (np.arange(2), np.arange(4)))]
    (micro,) = cut(groups, 100, 4)
    fields = {"versions": [[np.int32([7, 8]), np.int32([9] * 4)]], "values": [[np.ones(2), np.ones(4)]]}
    batch = pad(micro, groups, fields=fields)
    assert batch.fields["versions"].dtype == np.int32
    assert batch.fields["versions"].tolist() == [[7, 8, -1, -1], [9, 9, 9, 9]]
    assert batch.fields["values"].dtype == np.float32
    assert batch.fields["values"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
