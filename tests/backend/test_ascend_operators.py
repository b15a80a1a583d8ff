"""Ascend's operators keep the documented contracts, and compute what the list says: on the CPU, in float16."""

import ast
import inspect
from pathlib import Path
from unittest import mock

import ascend_contracts
import mindspore
import numpy as np
import pytest
from ascend_contracts import CONTRACTS, PLAIN, contracts, on_cpu, platforms
from mindspore import Tensor, nn, ops
from slow_cases import few_of

from mindrlhf import cli
from mindrlhf.acceptance import runs
from mindrlhf.acceptance.checks import Trial
from mindrlhf.acceptance.layers import layer_checks
from mindrlhf.acceptance.models import model_checks
from mindrlhf.acceptance.operators import operator_checks
from mindrlhf.acceptance.worker import findings_of
from mindrlhf.backend import ascend_operators
from mindrlhf.backend.ascend import ASCEND
from mindrlhf.backend.ascend_operators import AscendAttention, AscendOperators
from mindrlhf.backend.operators import ComposedOperators


def name_of(check) -> str:
    return check.name


def called() -> set[str]:
    """The operators of MindSpore that the module calls."""
    tree = ast.parse(Path(ascend_operators.__file__).read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops"
    }


@pytest.fixture(scope="module", autouse=True)
def _graph_mode():
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")


@pytest.fixture
def device():
    with contracts() as found:
        yield found


def checks_of(kinds, slow: tuple[str, ...]) -> list:
    """The checks in float16; those with a word of `slow` in their names are marked slow."""
    with contracts():
        checks = [one for make in kinds for one in make(["float16"])]
    late = [one for one in checks if any(word in one.name for word in slow)]
    return few_of([one for one in checks if one not in late], late)


def test_an_operator_of_ascend_alone_has_a_contract():
    used = called()
    assert {name for name in used if "CPU" not in platforms(name)} == set(CONTRACTS)
    assert used == {*CONTRACTS, *PLAIN}
    assert not hasattr(ascend_contracts, "moe_token_permute"), "any other operator is an error"


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_has_the_documented_arguments(name):
    documented, own = (inspect.signature(getattr(place, name)) for place in (ops, ascend_contracts))
    assert list(own.parameters) == list(documented.parameters)
    defaults = [[one.default for one in place.parameters.values()] for place in (documented, own)]
    assert defaults[0] == defaults[1]


@pytest.mark.parametrize("check", checks_of([operator_checks], ("completions", "prompts")), ids=name_of)
def test_operators_compute_their_answers(device, tmp_path, check):
    failed = [one for one in findings_of(check, Trial(device, tmp_path)) if not one.passed]
    assert failed == []


def test_only_16_bits_have_flash_attention():
    assert type(ASCEND.operators("float32")) is AscendOperators
    assert type(ASCEND.operators("bfloat16")) is type(ASCEND.operators("float16")) is AscendAttention
    assert AscendOperators.group_attention is ComposedOperators.group_attention


HEADS = np.zeros((6, 4, 16))
KEYS = np.zeros((6, 2, 16))
ENDS = Tensor(np.array([6], np.int64))
GOOD = {
    "attn_mask": Tensor(np.triu(np.ones((2048, 2048), bool), 1)),
    "actual_seq_qlen": ENDS,
    "actual_seq_kvlen": ENDS,
    "scalar_value": 0.25,
    "next_tokens": 0,
    "input_layout": "TND",
    "sparse_mode": 3,
}


class Flash(nn.Cell):
    def __init__(self, heads, options):
        super().__init__()
        self.heads = heads
        self.options = tuple(options.items())

    def construct(self, query, key, value):
        return ascend_contracts.flash_attention_score(query, key, value, self.heads, **dict(self.options))


BROKEN = {
    "float32": ({}, HEADS.astype(np.float32), KEYS.astype(np.float32), "dtypes"),
    "layout": ({"input_layout": "BSH"}, HEADS, KEYS, "input_layout"),
    "alignment": ({}, HEADS[..., :8], KEYS[..., :8], "D is 8"),
    "heads": ({}, HEADS[:, :3], KEYS, "no factor"),
    "mask": ({"attn_mask": Tensor(np.ones((6, 6), bool))}, HEADS, KEYS, "2048"),
    "no_lengths": ({"actual_seq_kvlen": None}, HEADS, KEYS, "TND needs"),
    "int32_lengths": ({"actual_seq_qlen": Tensor(np.array([6], np.int32))}, HEADS, KEYS, "Int32"),
    "sparse_mode": ({"sparse_mode": 0}, HEADS, KEYS, "sparse_mode 0"),
    "next_tokens": ({"next_tokens": 5}, HEADS, KEYS, "tokens"),
    "too_many": ({"actual_seq_qlen": Tensor(np.ones(1025, np.int64))}, HEADS, KEYS, "lists of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_the_documentation_does_not_allow_fails(name):
    changes, query, key, words = BROKEN[name]
    tensors = [Tensor(one) if one.dtype == np.float32 else on_cpu(one)[0] for one in (query, key, key)]
    options = GOOD | changes
    with pytest.raises(Exception, match=words):
        ascend_contracts.flash_attention_score(*tensors, query.shape[1], **options)


def test_the_good_call_is_allowed():
    out = ascend_contracts.flash_attention_score(*on_cpu(HEADS, KEYS, KEYS), 4, **GOOD)
    assert out.shape == HEADS.shape


WHOLE = {
    "attn_mask": Tensor(np.zeros((2, 1, 6, 6), bool)),
    "scalar_value": 0.25,
    "input_layout": "BNSD",
    "sparse_mode": 1,
}
BROKEN_WHOLE = {
    "float32": ({}, np.float32, "dtypes"),
    "lengths": ({"actual_seq_qlen": ENDS}, np.float16, "takes no actual_seq"),
    "mask_of_keys": ({"attn_mask": Tensor(np.zeros((2, 1, 1, 6), bool))}, np.float16, "not .B, 1, S1, S2"),
    "float_mask": ({"attn_mask": Tensor(np.zeros((2, 1, 6, 6), np.float16))}, np.float16, "attn_mask is Float16"),
    "no_mask": ({"attn_mask": None}, np.float16, "without attn_mask"),
    "sparse_mode": ({"sparse_mode": 3}, np.float16, "sparse_mode 3"),
}


@pytest.mark.parametrize("name", BROKEN_WHOLE)
def test_a_call_with_a_whole_mask_that_the_documentation_does_not_allow_fails(name):
    changes, dtype, words = BROKEN_WHOLE[name]
    heads = Tensor(np.ones((2, 4, 6, 16), dtype))
    with pytest.raises(Exception, match=words):
        ascend_contracts.flash_attention_score(heads, heads, heads, 4, **WHOLE | changes)


def test_a_query_that_sees_no_key_has_no_result():
    hidden = np.zeros((2, 1, 6, 6), bool)
    hidden[1, :, 2] = True
    (heads,) = on_cpu(np.ones((2, 4, 6, 16)))
    out = ascend_contracts.flash_attention_score(heads, heads, heads, 4, **WHOLE | {"attn_mask": Tensor(hidden)})
    finite = np.isfinite(out.asnumpy()).all((1, 3))
    assert finite.sum() == 11
    assert not finite[1, 2]


def test_more_windows_than_a_call_takes_are_composed(device):
    """They are short then; fewer have no scores in memory."""
    (rows,) = on_cpu(np.random.default_rng(0).normal(size=(2, 4, 2, 16)))
    mask = Tensor(np.zeros((2, 4), np.float32))
    operators = device.operators("float16")
    few = operators.image_attention(rows, rows, rows, mask, 0.25).asnumpy()
    with mock.patch.object(ascend_operators, "MOST_RUNS", 1):
        composed = operators.image_attention(rows, rows, rows, mask, 0.25).asnumpy()
    assert (few.dtype, composed.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(few, composed, atol=2e-3)


def test_lengths_that_break_the_rules_spoil_the_result():
    for ends in ([4], [0, 6], [6, 6]):  # not all rows; an empty sequence, first or last
        lengths = Tensor(np.array(ends, np.int64))
        wrong = GOOD | {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths}
        out = ascend_contracts.flash_attention_score(*on_cpu(HEADS + 1, KEYS + 1, KEYS + 1), 4, **wrong)
        assert not np.isfinite(out.asnumpy()).all()


def test_other_operators_hold_their_rules():
    x, weight = on_cpu(np.ones((3, 16)), np.ones(16))
    with pytest.raises(Exception, match="gamma is Float32"):
        ascend_contracts.rms_norm(x, Tensor(np.ones(16, np.float32)), 1e-6)
    with pytest.raises(Exception, match="epsilon"):
        ascend_contracts.rms_norm(x, weight, 1)
    with pytest.raises(Exception, match="is odd"):
        ascend_contracts.swiglu(on_cpu(np.ones((2, 5)))[0])
    (heads,) = on_cpu(np.ones((1, 3, 2, 16)))
    with pytest.raises(Exception, match="not 1S1D"):
        ascend_contracts.rotary_position_embedding(heads, *on_cpu(np.ones((1, 1, 3, 16)), np.ones((1, 1, 3, 16))))
    with pytest.raises(TypeError, match="head_num"):
        ascend_contracts.flash_attention_score(*on_cpu(HEADS, KEYS, KEYS))


@pytest.mark.parametrize("check", checks_of([layer_checks, model_checks], ("",)), ids=name_of)
def test_models_compute_their_answers(device, tmp_path, check):
    """Training and generation of a tiny model of each family, through all of Ascend's operators."""
    failed = [one for one in findings_of(check, Trial(device, tmp_path)) if not one.passed]
    assert failed == []


@pytest.fixture
def in_process(monkeypatch):
    """Commands of the kit's runs in this process, where the operators are replaced."""

    def run_command(trial, folder, log, *words, ranks=1, faulty=False):
        assert (ranks, trial.fault) == (1, None)
        assert cli.main([str(word) for word in words]) == 0

    monkeypatch.setattr(runs, "run_command", run_command)


@pytest.mark.slow
def test_two_grpo_steps_change_the_weights_as_in_float64(device, tmp_path, in_process):
    (check,) = [one for one in runs.run_checks(1) if one.level == "step"]
    failed = [one for one in findings_of(check, Trial(device, tmp_path)) if not one.passed]
    assert failed == []


@pytest.mark.slow
def test_runs_have_the_curves_of_the_cpu(device, tmp_path, in_process):
    """GRPO, which generates, and fine-tuning; in float16, within the acceptance rules for ports."""
    for check in (one for one in runs.run_checks(1) if one.level == "run"):
        failed = [one for one in findings_of(check, Trial(device, tmp_path)) if not one.passed]
        assert failed == []
