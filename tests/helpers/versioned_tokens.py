"""Runs whose tokens are drawn by weights of several steps: against the checkpoints' weights, and against each other."""

from collections.abc import Callable

import jobs
import numpy as np
import reference_model
from safetensors.numpy import load_file

from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.models.parameters import parameter_table


def assert_drawn_by_their_weights(task: jobs.Task, run: jobs.Run, steps: int) -> int:
    """Compare each drawn token's log-prob with float64 after everything before it; returns the number of tokens.

    Of a model of one layer whose every step was saved; those of the first weights are left out.
    """
    config = load_model_yaml(task.folder / "train.yaml").architecture().model_copy(update={"num_layers": 1})
    folders = {step + 1: run.folder / f"ckpt/step_{step:06}/rank_0" for step in range(1, steps)}
    arrays = {step: load_file(folder / "model.safetensors") for step, folder in folders.items()}
    table = parameter_table(config)
    weights = {step: dict(one for spec in table for one in split(spec, arrays[step][spec.name])) for step in arrays}
    groups = [e.group for _, experiences in run.rollouts for e in experiences]
    checked = 0
    for prompt, rollout in ((group.prompt, one) for group in groups for one in group.rollouts):
        ids = np.concatenate([prompt.token_ids, rollout.response_ids])
        versions = rollout.row("policy_steps")
        for version in {*versions} - {1}:
            logits = reference_model.logits(config, weights[version], ids[:-1])[-len(versions) :]
            log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            own = (versions == version) & rollout.sampled
            expected = log_probs[np.arange(len(versions)), rollout.response_ids][own]
            np.testing.assert_allclose(rollout.row("policy_log_probs")[own], expected, atol=2e-4)
            checked += int(own.sum())
    return checked


# Metrics that differ between placements: the numbers of tokens do not.
PLACED = ("reshard/", "swap/", "trainer/", "generator/", "tools/seconds")


def measured(run: jobs.Run) -> list[dict[str, float]]:
    """What is measured, wherever ranks are."""
    return [{name: row[name] for name in row if not name.startswith(PLACED)} for row in run.kept_metrics]


def assert_same(run: jobs.Run, other: jobs.Run, rows: Callable[[jobs.Run], list]) -> None:
    """To the last bit: responses, rows of their tokens, metrics, weights."""
    assert run.responses == other.responses
    assert rows(run) == rows(other)
    np.testing.assert_equal(measured(run), measured(other))
    name = "ckpt/hf/model.safetensors"
    assert (run.folder / name).read_bytes() == (other.folder / name).read_bytes()
