"""Weights that are packed for a session of generation, in the plan."""

from dataclasses import replace

import pytest
from planned_job import MODEL, SMALL, work

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.memory.estimate import rank_plan
from mindrlhf.memory.work import Work
from mindrlhf.models.parameters import parameter_table


def test_words_of_a_session_are_there_while_it_generates_where_decode_steps_round():
    plain = work()
    if not plain.fused:
        pytest.skip("no operators could be built here")
    rounded = {
        name: yaml.model_copy(update={"model": ModelSettings(compute_dtype="bfloat16")})
        for name, yaml in plain.yamls.items()
    }
    job = Work.of(plain.config, plain.roles, rounded, plain.lengths)
    rows = [spec.shape for spec in parameter_table(MODEL) if len(spec.shape) == 2][1:]  # the embedding is looked up
    assert rank_plan(job, 0).roles["session_weights"] == sum(outputs * inputs * 2 for outputs, inputs in rows)
    holding = {phase for phase, held in rank_plan(job, 0).phases.items() if "session_weights" in held}
    assert holding == {"gen"}
    for other in (plain, replace(job, config=load_grpo_config(None, [*SMALL, "rollout.weights=bfloat16"]))):
        assert "session_weights" not in rank_plan(other, 0).roles
