"""What the commands of this folder are tried on: a practice task, a model for it, and a check for refused input."""

import jobs
import pytest


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> jobs.Task:
    return jobs.make_task(tmp_path_factory.mktemp("task"), layers=1)


@pytest.fixture(scope="session")
def model(task, tmp_path_factory):
    """An HF directory with random weights and the tokenizer of the task."""
    return jobs.write_model(task, tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture
def output(tmp_path):
    """The output folder of an earlier run, with everything that a run writes (the contents do not matter)."""
    folder = tmp_path / "output"
    for name in ("metrics.jsonl", "rollouts.mindrecord", "rollouts.mindrecord.db", "answers.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of an earlier run\n")
    for name in ("config.json", "model.safetensors"):
        (folder / "ckpt" / "hf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "ckpt" / "hf" / name).write_text(f"{name} of an earlier run\n")
    return folder


@pytest.fixture
def refused(output, capfd):
    """refused(argv, *texts): exit code 2, one line on stderr with all the texts, and nothing of `output` touched."""

    def check(argv, *texts: str) -> None:
        before = jobs.files(output)
        capfd.readouterr()
        assert jobs.call(argv) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"mindrlhf {argv[0]}: ")
        for text in texts:
            assert str(text) in lines[0], lines[0]
        assert jobs.files(output) == before

    return check
