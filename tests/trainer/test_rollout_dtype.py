"""Correction for rollouts of another dtype than the trained policy's."""

import pytest

from mindrlhf.backend import native
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.flags import TrainFlags
from mindrlhf.trainer.check import correction_defaults, read_settings


def level(infer: str, overrides=()):
    """The level of a run that trains in bfloat16."""
    yamls = (ModelYaml(path=dtype, model=ModelSettings(compute_dtype=dtype)) for dtype in ("bfloat16", infer))
    return load_grpo_config(None, overrides, correction_defaults(*yamls)).rollout_correction.level


def test_rollouts_of_another_dtype_are_corrected_for():
    assert level("float32") == "token"
    assert level("bfloat16") is None
    assert level("float32", ["rollout_correction.level=sequence"]) == "sequence"


@pytest.mark.parametrize("given", ["null", "token"])
def test_a_run_without_correction_is_warned_of(monkeypatch, caplog, given):
    monkeypatch.setattr(native, "library", lambda: native.Library(None, bfloat16=True))
    dtype = "train_yaml.model.model_config.compute_dtype=bfloat16"
    flags = TrainFlags(load_sft_checkpoint_train="model", overrides=(dtype, f"rollout_correction.level={given}"))
    assert read_settings(flags)[1].rollout_correction.level == (None if given == "null" else given)
    assert ("rollout_correction.level is null" in caplog.text) == (given == "null")
