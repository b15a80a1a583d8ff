"""Recorded rollouts that do not fit the run that is to replay them."""

import numpy as np
import pytest
from small_model import EXPERTS, small_config

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.records.formats import read_record, write_record
from mindrlhf.records.rows import rows_of
from mindrlhf.run.training_data import check_recorded, fits_routing
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


@pytest.fixture
def record(tmp_path):
    """record(response ids): a file with two groups of two equal responses, all of step 1."""

    def write(response: list[int]):
        ids = np.array(response, np.int32)
        numbers = np.zeros(len(ids), np.float32)
        experiences = []
        for prompt_id in range(2):
            prompt = Prompt(prompt_id, np.array([5, 6], np.int32), {"task": "arithmetic"})
            tokens = {"sampled": numbers == 0, "behaviour_log_probs": numbers, "policy_log_probs": numbers}
            rollouts = tuple(Rollout(prompt_id, i, ids, "length", 0, tokens) for i in range(2))
            rewards = np.array([0, 1], np.float32)
            experiences.append(Experience(RolloutGroup(prompt, rollouts), rewards, {"gsm8k": rewards}, np.zeros(2), 1))
        path = tmp_path / "recorded.mindrecord"
        write_record(path, rows_of(1, experiences))
        return path

    return write


def test_longer_than_this_run_allows(task, output, refused, record):
    path = record([7] * 17)
    refused(task.train(output, replay=path), path, "17 tokens", "rollout.max_new_tokens is 16", "set it to 17 or more")


def test_of_another_vocabulary(task, output, refused, record):
    path = record([7, 300])
    refused(task.train(output, replay=path), path, "token id 300", "vocab_size is 300")


def test_steps_that_do_not_divide(task, output, refused, record):
    """Nothing is dropped to make it fit."""
    path = record([7, 8])
    argv = task.train(output, "algorithm.updates_per_iteration=4", replay=path)
    refused(argv, path, "step 1 has 2 prompts", "updates_per_iteration 4 does not divide")


def test_missing_file(task, output, refused, tmp_path):
    refused(task.train(output, replay=tmp_path / "none.mindrecord"), "none.mindrecord: no such MindRecord file")


@pytest.mark.parametrize(
    ("width", "largest", "fits"), [(6, 7, True), (6, 5, True), (6, 8, False), (4, 5, False), (0, 5, False)]
)
def test_routing_is_one_of_the_model_s(width, largest, fits):
    """Of three layers with experts, of which two compute a token; the number of experts, 7, stands for none."""
    model = small_config(**EXPERTS | {"num_experts": 7, "decoder_sparse_step": 1})
    routing = np.zeros((3, width), np.uint8)
    routing[1:, :1] = largest
    tokens = {"routing": routing, "prompt_routing": routing[:1]}
    prompt = Prompt(0, np.array([5, 6], np.int32), {})
    rollouts = (Rollout(0, 0, np.array([7, 8, 9], np.int32), "length", 0, tokens),)
    rewards = np.zeros(1)
    group = Experience(RolloutGroup(prompt, rollouts), rewards, {"gsm8k": rewards}, np.zeros(1, np.float32), 1)
    assert fits_routing(group, model) == fits


def test_without_the_routing_that_is_to_be_replayed(record):
    recorded = read_record(record([7, 8]))
    config = load_grpo_config(None, ["rollout.routing_replay=rollout"])
    model = small_config(**EXPERTS)
    with pytest.raises(
        UserError, match=r"step 1 has a response without the routing of this model's experts, .* set old"
    ):
        check_recorded(recorded, "recorded.mindrecord", 1, config, model)
    check_recorded(recorded, "recorded.mindrecord", 1, load_grpo_config(None, ["rollout.routing_replay=old"]), model)
