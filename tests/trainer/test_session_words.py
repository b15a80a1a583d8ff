"""Weights that decode steps round are packed once for a session, with the bits of packing them in each call."""

import jobs
import numpy as np
import pytest

from mindrlhf.backend import native
from mindrlhf.models.packed import PackedWeights
from mindrlhf.phases import WORDS
from mindrlhf.roles.generator import Generator

SETTINGS = (
    *(f"{role}_yaml.model.model_config.compute_dtype=bfloat16" for role in ("train", "infer")),
    *("trainer.total_steps=2", "trainer.test_freq=2", "optimizer.lr=1e-2", "algorithm.beta=0", "rollout.max_slots=6"),
    *("trainer.progress=False", "trainer.loggers=[jsonl]", *jobs.ONE_LAYER),
)


def finished(task: jobs.Task, folder, *settings: str) -> jobs.Run:
    held_out = f"data.val_dataset={task.folder}/test.mindrecord"
    assert jobs.call(task.train(folder, *SETTINGS, held_out, *settings)) == 0
    return jobs.Run(folder)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("rollout.top_k=20",), marks=pytest.mark.slow),  # halves decode, one token a call
        pytest.param(("lora.rank=3", "memory.swap=True"), marks=pytest.mark.slow),
    ],
)
def test_packing_for_a_session_changes_no_bit(task, tmp_path, monkeypatch, settings):
    if not native.library().bfloat16:
        pytest.skip("this processor has no fast bfloat16 products")
    packs = []
    refresh = PackedWeights.refresh
    monkeypatch.setattr(PackedWeights, "refresh", lambda self: (packs.append(len(self.packed)), refresh(self)))
    run = finished(task, tmp_path / "session", *settings)
    assert len(packs) == 2 + 2, "once for each step's answers, and for the held-out problems before and after"
    assert min(packs) > 1
    assert run.metrics[-1][f"swap/role_gb/{WORDS}"] > 0
    monkeypatch.setattr(Generator, "_open_words", lambda *_: None)
    each = finished(task, tmp_path / "call", *settings)
    assert len(packs) == 4
    assert run.responses == each.responses
    for name, weight in each.weights.items():
        np.testing.assert_array_equal(run.weights[name], weight, err_msg=name)
