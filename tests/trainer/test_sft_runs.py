"""Supervised fine-tuning on two workers equals one process; `tests/commands` shows that it learns."""

import jobs
import numpy as np
import pytest
from workers import run_msrun

SFT = "import sys; from mindrlhf.cli import run; run('sft', *sys.argv[1:])\n"
CUTS = ("train.length_bucket=48", "train.max_tokens_per_micro_batch=200")
SETTINGS = ("trainer.total_steps=4", "optimizer.eps=1e-5", *CUTS)


@pytest.mark.slow
@pytest.mark.msrun
def test_two_workers_equal_one(task, tmp_path):
    alone = jobs.Run(tmp_path / "one")
    result = jobs.start(task.sft(alone.folder, *SETTINGS))
    assert result.returncode == 0, result.stderr
    script = tmp_path / "sft.py"
    script.write_text(SFT)
    two = jobs.Run(tmp_path / "two")
    ranks = "train_yaml.parallel_config.data_parallel=2"
    started = run_msrun(2, [script, *task.sft(two.folder, *SETTINGS, ranks)[1:]])
    assert started.returncode == 0, started.logs
    assert alone.column("train/loss")[-1] < alone.column("train/loss")[0]
    for name in ("train/loss", "actor/grad_norm", "actor/lr", "perf/total_num_tokens"):
        np.testing.assert_allclose(two.column(name), alone.column(name), rtol=1e-5, err_msg=name)
    for name, expected in alone.weights.items():
        difference = np.linalg.norm(two.weights[name] - expected)
        assert difference <= 1e-5 * np.linalg.norm(expected), name
