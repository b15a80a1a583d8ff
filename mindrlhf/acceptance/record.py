"""Record of two GRPO steps to replay, and the model to train."""

from pathlib import Path

import numpy as np

from mindrlhf.acceptance.grpo64 import AdamSettings, ScoredGroup
from mindrlhf.acceptance.inputs import exact, numbers, tiny_models, tiny_weights, whole_numbers
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.families import DEFAULT
from mindrlhf.models.parameters import parameter_table
from mindrlhf.records.formats import write_record
from mindrlhf.records.rows import rows_of
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup

VOCABULARY = 320  # of the tokenizer that `synthesize` trains
STEPS, RECORDED_PROMPTS, RECORDED_SAMPLES, LONGEST = 2, 4, 4, 12
SCALES = {"norm": 1.0, "embedding": 0.1}  # of the first weights, by kind of parameter
BETA = 0.1
# A large epsilon: updates are nearly proportional to gradients, where a small one would make signs of them.
ADAM = AdamSettings(rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-2, decay=0.1, max_norm=1.0)


def run_config() -> ModelConfig:
    """Return the model of the runs."""
    return tiny_models()[DEFAULT.name].model_copy(update={"vocab_size": VOCABULARY})


def first_weights() -> dict[str, np.ndarray]:
    """Draw the first weights of runs.

    They are smaller than those of other checks, so that answers are diverse.
    """
    config = run_config()
    drawn = tiny_weights(config, "runs")
    scales = {spec.name: SCALES.get(spec.kind, 0.5) for spec in parameter_table(config)}
    return {name: exact(array * scales[name]) for name, array in drawn.items()}


def recorded_steps() -> list[list[ScoredGroup]]:
    """Draw the groups of the record."""
    steps = []
    for step in range(STEPS):
        groups = []
        for i in range(RECORDED_PROMPTS):
            name = f"record {step} {i}"
            lengths = 1 + whole_numbers(f"{name} lengths", LONGEST, RECORDED_SAMPLES)
            prompt = whole_numbers(f"{name} prompt", VOCABULARY, 3 + i)
            responses = [whole_numbers(f"{name} {j}", VOCABULARY, count) for j, count in enumerate(lengths)]
            groups.append(
                ScoredGroup(prompt, responses, numbers(f"{name} rewards", RECORDED_SAMPLES).astype(np.float64))
            )
        steps.append(groups)
    return steps


def write_steps(path: Path) -> None:
    """Write the record as `--save_data_file` does."""
    rows = []
    for step, groups in enumerate(recorded_steps(), start=1):
        rows += rows_of(step, [_experience(i, group, step) for i, group in enumerate(groups)])
    write_record(path, rows)


def _experience(prompt_id: int, group: ScoredGroup, step: int) -> Experience:
    rollouts = []
    for j, ids in enumerate(group.responses):
        zeros = np.zeros(len(ids), np.float32)
        tokens = {"sampled": np.ones(len(ids), bool), "behaviour_log_probs": zeros, "policy_log_probs": zeros}
        rollouts.append(Rollout(prompt_id, j, ids, "length", 0, tokens))
    return Experience(
        group=RolloutGroup(Prompt(prompt_id, group.prompt), tuple(rollouts)),
        rewards=group.rewards,
        rewards_by_function={"recorded": group.rewards},
        advantages=np.zeros(RECORDED_SAMPLES, np.float32),
        policy_step=step,
    )
