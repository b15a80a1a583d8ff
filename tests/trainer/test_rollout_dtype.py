"""Correction for rollouts of another dtype than the trained policy's."""

import re

import numpy as np
import pytest
from step_parts import experience

from mindrlhf.algorithms.losses import POLICY_LOSSES, policy_loss
from mindrlhf.backend import native
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.metrics.timer import Timers
from mindrlhf.roles.parts import Parts
from mindrlhf.roles.policy import Policy
from mindrlhf.roles.policy_updates import policy_log_probs
from mindrlhf.run.run import Run
from mindrlhf.trainer.check import correction_defaults, read_settings
from mindrlhf.trainer.credit import Credit
from mindrlhf.trainer.grpo import GRPOLoop


def level(infer: str, overrides=(), weights: str = "train"):
    """The level of a run that trains in bfloat16."""
    yamls = (ModelYaml(path=dtype, model=ModelSettings(compute_dtype=dtype)) for dtype in ("bfloat16", infer))
    return load_grpo_config(None, overrides, correction_defaults(*yamls, weights)).rollout_correction.level


def test_rollouts_of_another_dtype_are_corrected_for():
    assert level("float32") == "token"
    assert level("bfloat16") is None
    assert level("float32", ["rollout_correction.level=sequence"]) == "sequence"
    assert level("bfloat16", weights="int8") == "token"


@pytest.mark.parametrize("given", ["null", "token"])
def test_a_run_without_correction_is_warned_of(monkeypatch, caplog, given):
    monkeypatch.setattr(native, "library", lambda: native.Library(None, bfloat16=True))
    dtype = "train_yaml.model.model_config.compute_dtype=bfloat16"
    flags = TrainFlags(load_sft_checkpoint_train="model", overrides=(dtype, f"rollout_correction.level={given}"))
    assert read_settings(flags)[1].rollout_correction.level == (None if given == "null" else given)
    assert ("rollout_correction.level is null" in caplog.text) == (given == "null")


@pytest.mark.parametrize("given", [None, "null", "sequence"])
def test_packed_weights_are_corrected_for_or_warned_of(monkeypatch, caplog, given):
    monkeypatch.setattr(native, "library", lambda: native.Library(None))
    correction = () if given is None else (f"rollout_correction.level={given}",)
    flags = TrainFlags(load_sft_checkpoint_train="model", overrides=("rollout.weights=int8", *correction))
    found = read_settings(flags)[1].rollout_correction
    assert found.level == {None: "token", "null": None, "sequence": "sequence"}[given]
    assert found.upper == 2.0
    warned = "rollout_correction.level is null, with rollout.weights int8 and training in float32" in caplog.text
    assert warned == (given == "null")


@pytest.mark.parametrize(
    ("device", "problem", "reason"),
    [
        ("CPU", "g++ is not installed", "g++ is not installed"),
        ("Ascend", "", "Ascend has no products of packed weights"),
    ],
)
def test_packed_weights_take_fused_operators(monkeypatch, device, problem, reason):
    monkeypatch.setattr(native, "library", lambda: native.Library(None, problem))
    flags = TrainFlags(load_sft_checkpoint_train="model", device_target=device, overrides=("rollout.weights=bfloat16",))
    with pytest.raises(UserError, match=rf"rollout.weights is bfloat16, .* \({re.escape(reason)}\); set train"):
        read_settings(flags)


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        (["algorithm.beta=0.1"], False),
        (["algorithm.beta=0.1", "algorithm.kl_in_reward=True"], True),
        (["algorithm.beta=0.1", "algorithm.kl_target=0.1"], True),
        (["algorithm.beta=0", "algorithm.kl_target=0.1"], False),
        (["algorithm.advantage=distillation"], True),
        (["algorithm.policy_loss=kl_cov"], True),
        (["algorithm.policy_loss=clip_cov"], True),
    ],
)
def test_what_reads_the_policy_before_updates(overrides, reads):
    assert load_grpo_config(None, overrides).algorithm.reads_policy == reads


def test_log_probs_for_credit_are_the_policy_s_own_where_they_were_scored():
    rows = {name: tuple(np.full(3, value, np.float32) for _ in range(2)) for name, value in (("own", -1), ("old", -2))}
    drawn = experience(1, [0.0, 1.0])
    carried = drawn.with_tokens(old_log_probs=rows["old"])
    assert policy_log_probs(drawn) == tuple(rollout.row("policy_log_probs") for rollout in drawn.group.rollouts)
    assert policy_log_probs(carried) is rows["old"]
    assert policy_log_probs(carried.with_tokens(scored_log_probs=rows["own"])) is rows["own"]


@pytest.mark.parametrize("scores_old", [False, True])
def test_scored_log_probs_are_the_old_ones_only_of_several_updates(scores_old):
    """Else the old policy is the one that the first update has: a pass of its own differs in the last digits."""
    own = tuple(np.full(3, -1, np.float32) for _ in range(2))
    policy = Policy.__new__(Policy)
    policy.scorer, policy.scores_old = (lambda groups: [own] * len(groups)), scores_old
    run = Run.__new__(Run)
    run.timers = Timers()
    config = load_grpo_config(None, [])
    loop = GRPOLoop(config, None, Parts(policy=policy), Credit(config, None), run)
    kept = tuple(np.full(3, -2, np.float32) for _ in range(2))
    fresh, carried = loop.with_log_probs([experience(1, [0, 1]), experience(2, [0, 1], old_log_probs=kept)])
    assert fresh.rows("scored_log_probs") is carried.rows("scored_log_probs") is own
    assert fresh.tokens.get("old_log_probs") is (own if scores_old else None)
    assert carried.rows("old_log_probs") is kept


def test_losses_that_choose_tokens_say_so():
    for name, method in POLICY_LOSSES.items():
        assert method.selects == (policy_loss(name).select is not None), name
