"""A run of commit 3388d95, four steps with a critic and saved after the second: read, resumed and replayed today.

`earlier_run.tar.xz` has its task, the checkpoint of step 2, its records, and the weights that it ended with.
"""

import tarfile
from pathlib import Path

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

from mindrlhf.records.formats import read_record

SETTINGS = (
    *("data.prompts_per_step=4", "rollout.num_generations=4", "rollout.max_new_tokens=8", "trainer.total_steps=4"),
    *("reward.functions=[{name: 'task/reward.py:variety'}]", "optimizer.lr=1e-2", "trainer.save_freq=2"),
    *("trainer.save_rollouts=True", "algorithm.advantage=gae", "algorithm.beta=0.05"),
)
CLOSE = 1e-5  # a thousandth of an update: the order of sums has changed since, by 1.5e-8 where this was measured
MODELS = ("hf", "critic")


def train(output: str, *flags: str) -> None:
    models = ("--sft_path_train", "task/model.yaml", "--sft_path_infer", "task/model.yaml", "--tokenizer_path", "task")
    outputs = ("--save_ckpt_dir", f"{output}/ckpt", "--save_data_file", f"{output}/rollouts.mindrecord")
    data = ("--mind_dataset_dir", "task/train.jsonl")
    assert jobs.call(["train", *models, *data, *outputs, *flags, *SETTINGS]) == 0


@pytest.fixture
def ended(tmp_path, monkeypatch) -> dict[str, dict[str, np.ndarray]]:
    """The weights that the run ended with, by model; what else it left is in the working directory."""
    with tarfile.open(Path(__file__).with_name("earlier_run.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return {name: load_file(f"whole/ckpt/{name}/model.safetensors") for name in MODELS}


def check(output: str, ended: dict[str, dict[str, np.ndarray]]) -> None:
    for name in MODELS:
        found = load_file(f"{output}/ckpt/{name}/model.safetensors")
        assert found.keys() == ended[name].keys()
        for tensor, array in ended[name].items():
            np.testing.assert_allclose(found[tensor], array, rtol=0, atol=CLOSE, err_msg=f"{name} {tensor}")


def tokens(path: str) -> dict[int, list[list[int]]]:
    return {
        step: [rollout.response_ids.tolist() for e in experiences for rollout in e.group.rollouts]
        for step, experiences in read_record(Path(path))
    }


def test_its_checkpoint_goes_on_to_the_weights_that_it_had(ended):
    recorded = tokens("whole/rollouts.mindrecord")
    saved = load_file("whole/ckpt/step_000002/rank_0/model.safetensors")["model.tok_embeddings.embedding_weight"]
    assert np.abs(saved - ended["hf"]["model.embed_tokens.weight"]).max() > 100 * CLOSE  # two steps are left
    for name in MODELS:
        Path(f"whole/ckpt/{name}/model.safetensors").unlink()
    train("whole", "--resume_training", "auto")
    check("whole", ended)
    drawn = tokens("whole/rollouts.mindrecord")
    assert {3, 4} <= drawn.keys()
    assert drawn == {step: recorded[step] for step in drawn}


@pytest.mark.slow
def test_its_record_trains_to_the_same_weights(ended):
    train("replayed", "--replay", "whole/rollouts.mindrecord")
    check("replayed", ended)


def test_its_responses_are_shown(ended, capsys):
    assert jobs.call(["show", "whole", "--step", "2"]) == 0
    assert "step 2 · prompt " in capsys.readouterr().out
