"""`mindrlhf plan` prints what a job would hold and move, and starts nothing."""

import subprocess
import sys

import pytest

from mindrlhf.cli import main


@pytest.fixture
def flags(root):
    folder = root / "model_configs" / "qwen_grpo"
    yamls = {"train": folder / "finetune_qwen2_5_7b.yaml", "infer": folder / "predict_qwen2_5_7b_instruct.yaml"}
    return [part for role, path in yamls.items() for part in (f"--sft_path_{role}", str(path))]


def test_the_plan_of_the_shipped_7b_pair(flags, capsys):
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert "qwen2, 28 layers, 7,615,616,512 parameters" in out
    rows = {line.split()[1]: line.split()[2:] for line in out.splitlines() if line.lstrip().startswith("rank ")}
    assert sorted(rows) == [str(rank) for rank in range(8)]
    # sent in sum is received in sum, which is the least possible and less than an all-gather
    figures = [int(number.replace(",", "")) for number in out.splitlines()[-1].split()[1:]]
    before, after, sent, received, least, gathered = figures
    assert sent == received == least < gathered
    assert after > before >= 7_615_616_512 * 4


def test_every_transfer_is_listed_on_request(flags, capsys):
    main(["plan", *flags])
    short = capsys.readouterr().out
    main(["plan", *flags, "--every_transfer"])
    long = capsys.readouterr().out
    assert long.startswith(short)
    count = int(short.split(" transfers, ")[0].split()[-1])
    assert len(long.splitlines()) - len(short.splitlines()) == count


def test_layouts_of_different_sizes_are_refused(flags, capsys):
    assert main(["plan", *flags, "infer_yaml.parallel_config.data_parallel=1"]) == 2
    assert "both run on the same workers" in capsys.readouterr().err


def test_mindspore_is_not_even_imported(flags):
    code = (
        f"import sys; from mindrlhf.cli import main; main(['plan', *{flags!r}]); assert 'mindspore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
