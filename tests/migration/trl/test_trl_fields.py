"""Every field of TRL 1.16's configurations has a place here, and TRL's defaults written out give the preset."""

from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from trl_fields import NOT_LITERAL, configurations, folder

from mindrlhf.api.config import GRPOConfig, SFTConfig
from mindrlhf.errors import UserError
from mindrlhf.migration.trl.translation import RunSizes

FIELDS = yaml.safe_load(Path(__file__).with_name("trl_1_16.yaml").read_text())
KINDS = {"GRPOConfig": GRPOConfig, "SFTConfig": SFTConfig}
# TRL and transformers give these another value before a run, or the trainer does.
NOT_GIVEN = {"output_dir", "seed", "learning_rate"}


def of(kind: str) -> dict:
    return {key: value for key, value in (FIELDS["shared"] | FIELDS[kind]).items() if key not in NOT_GIVEN}


def test_the_list_is_that_of_the_wheel():
    trl, transformers = folder("trl"), folder("transformers")
    if trl is None:
        pytest.skip("trl is not installed; its fields are in trl_1_16.yaml")
    assert configurations(trl, transformers) == FIELDS


def test_their_number():
    assert [len(of(kind)) + len(NOT_GIVEN) for kind in KINDS] == [191, 135]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_known(kind):
    for key in of(kind):
        words = ""
        with suppress(TypeError, AttributeError):  # a number is a wrong value of some
            try:
                KINDS[kind]("o", **{key: 7})
            except UserError as error:
                words = str(error)
        assert "unknown key" not in words, key


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_written_out_change_nothing(kind):
    written = {key: value for key, value in of(kind).items() if value != NOT_LITERAL}
    if kind == "SFTConfig":
        written["assistant_only_loss"] = True  # all turns are trained on there, answers here
    plain, config = KINDS[kind]("o"), KINDS[kind]("o", **written)
    around = RunSizes(devices=1, rows=1000)
    assert config.resolve(around).flags == plain.resolve(around).flags
    differing = differences(plain.settings().model_dump(), config.settings().model_dump())
    # Our null stands for what a method has of itself; outputs are not TRL's.
    own = {"advantage_std", "epsilon_low", "epsilon_high", "importance_level", "max_new_tokens"}
    assert {name.rpartition(".")[2] for name in differing} <= own | {"loggers", "log_every", "project_name"}


def test_fine_tuning_draws_rows_as_trl_s_sampler():
    assert SFTConfig("o", shuffle_dataset=False).settings().data.shuffle
    assert not SFTConfig("o", train_sampling_strategy="sequential").settings().data.shuffle


def differences(first: dict, second: dict, prefix: str = "") -> set[str]:
    found = set()
    for name, one in first.items():
        if isinstance(one, dict):
            found |= differences(one, second[name], f"{prefix}{name}.")
        elif one != second[name]:
            found.add(f"{prefix}{name}")
    return found


def test_the_bounds_of_the_importance_weights():
    def correction(**keys):
        config = GRPOConfig("o", use_vllm=True, **{f"vllm_importance_sampling_{key}": keys[key] for key in keys})
        return config.settings().rollout_correction

    assert correction(clip_max=2.0, clip_min=0.5).model_dump() == {
        "level": "sequence",
        "mode": "mask",
        "upper": 2.0,
        "lower": 0.5,
    }
    assert (correction(clip_max=None, clip_min=0.5).upper, correction(cap=4.0).upper) == (1e9, 4.0)
    assert correction(cap=None).level is None
    assert correction(correction=False, clip_max=2.0).level is None
