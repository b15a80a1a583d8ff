"""What makes a run this one: a checkpoint is refused when what its prompts are compared with has changed."""

import json

import numpy as np
import pytest

from mindrlhf.checkpoint.manifest import Manifest
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError
from mindrlhf.model_roles import RoleModel
from mindrlhf.run.identity import check_identity, run_identity
from mindrlhf.run.training_data import TrainingData
from mindrlhf.types import Prompt

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
ROLES = {"policy": RoleModel(None, MODEL)}


def identity(*truths, ids=(1, 2, 3)):
    tokens = np.array(ids, np.int32)
    fields = [{} if truth is None else {"ground_truth": truth} for truth in truths]
    prompts = [Prompt(row, tokens, given) for row, given in enumerate(fields)]
    data = TrainingData("data.jsonl", None, [], len(prompts), prompts, [], len(ids), len(ids), 1)
    return run_identity(GRPOSettings(), ROLES, ModelYaml(path="train.yaml"), data)


@pytest.fixture
def check(tmp_path):
    """A function that checks a saved identity against that of the run to resume."""
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()

    def check(saved, run, first=False):
        state = {"counters": {}, "run": saved, "groups": {}, "layouts": []}
        (checkpoint / "state.json").write_text(json.dumps(state))
        check_identity(Checkpoint(checkpoint, Manifest(step=2, files={})), run, GRPOSettings(), first)

    return check


def test_the_same_prompts_and_ground_truths_go_on(check):
    check(identity("5", "7", None), identity("5", "7", None))


@pytest.mark.parametrize("truths", [("5", "8"), ("57", ""), ("7", "5"), ("5", None)])
def test_other_ground_truths_are_refused(check, truths):
    with pytest.raises(
        UserError, match=r"step_000002: was trained on the same prompts with other ground truths; resume"
    ):
        check(identity("5", "7"), identity(*truths))


def test_other_prompts_are_refused_first(check):
    with pytest.raises(UserError, match="was trained on other prompts"):
        check(identity("5"), identity("7", ids=(1, 2)))


def test_dropout_may_change_and_ranks_may_not(check):
    def with_adapter(**changes):
        model = MODEL.model_copy(update={"adapter": Adapter(**{"rank": 4, "alpha": 8} | changes)})
        return {**identity("5"), "model": model.model_dump(mode="json")}

    check(with_adapter(), with_adapter(dropout=0.1))
    earlier = with_adapter()
    del earlier["model"]["adapter"]["dropout"]
    check(earlier, with_adapter())
    with pytest.raises(UserError, match="is a checkpoint of a model with adapter"):
        check(with_adapter(), with_adapter(rank=8))


def test_an_earlier_checkpoint_says_nothing_of_them(check):
    saved = identity("5")
    del saved["prompts"]["ground_truths_crc32"]
    check(saved, identity("7"))


def test_settings_that_came_later_are_no_change(check, capsys):
    now = identity("5")
    earlier = json.loads(json.dumps(now))
    del earlier["settings"]["trainer"]["staleness"], earlier["settings"]["train"]["freeze_router"]
    check(earlier, now, first=True)
    assert capsys.readouterr().out == ""
    now["settings"]["train"]["freeze_router"] = True
    check(earlier, now, first=True)
    assert "resuming with changes" in (said := capsys.readouterr().out)
    assert said.strip().endswith(": train.freeze_router False -> True")
