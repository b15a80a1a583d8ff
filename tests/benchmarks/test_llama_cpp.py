"""The comparison with llama.cpp: every weight is in its file, and the table has the ratio of what was measured."""

import sys

import pytest
from workers import ROOT

from mindrlhf.models.parameters import parameter_table

sys.path.insert(0, str(ROOT / "benchmarks"))
import llama_cpp


@pytest.mark.parametrize("shape", llama_cpp.SHAPES)
def test_each_weight_has_a_name_in_the_file(shape):
    model = llama_cpp.model_of(shape)
    assert set(llama_cpp.names(model).values()) == {spec.name for spec in parameter_table(model)}


def test_the_table_has_ratios_of_generation():
    theirs = {"prompts": 9.0, "generation": 100.0, "others": 0.24}
    rows = {"ours": {"prompts": 1.0, "generation": 150.0, "others": 0.0}, "llama.cpp": theirs}
    *_, row = llama_cpp.table({"int8 64": rows}).splitlines()
    assert row == "| int8, Q8_0 | 64 | 100 | 150 | 1.50 | 1.5 | 0.2 | - | - | - |"
    rows["ours"]["step_ms"], theirs["step_ms"] = 40.0, 100.0
    *_, row = llama_cpp.table({"int8 64": rows}).splitlines()
    assert row.endswith("| 100 | 40 | 2.50 |")


def test_sides_are_measured_one_after_the_other_and_join_earlier_figures(monkeypatch, tmp_path, capsys):
    order = []
    monkeypatch.setattr(llama_cpp, "model_file", lambda cache, shape, dtype: order.append((shape, dtype)))
    for side, rate in (("ours", 30.0), ("theirs", 20.0)):

        def measured(cache, load, side=side, rate=rate):
            order.append((side, load.dtype, load.sequences))
            return {"prompts": 1.0, "generation": rate, "processor_s": load.tokens / rate}

        monkeypatch.setattr(llama_cpp, side, measured)
    for dtype in ("float32", "bfloat16"):
        assert llama_cpp.main([str(tmp_path), "--dtype", dtype, "--sequences", "8"]) == 0
    assert order[-3:] == [("dense", "bfloat16"), ("ours", "bfloat16", 8), ("theirs", "bfloat16", 8)]
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split(" | ")[0] for row in rows] == ["| float32", "| bfloat16"]
    assert "| 20 | 30 | 1.50 | 1.0 |" in rows[0]
    assert llama_cpp.main([str(tmp_path), "--shape", "experts", "--dtype", "float32", "--sequences", "64"]) == 0
    *_, dense, row = capsys.readouterr().out.splitlines()
    assert dense.startswith("| bfloat16 | 8 |")
    assert row.startswith("| float32, experts | 64 | 20 | 30 | 1.50 | 1.0 |")


def test_processor_time_of_a_step_leaves_out_what_both_runs_have(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(llama_cpp, "model_file", lambda cache, shape, dtype: None)
    for side, step_s in (("ours", 0.25), ("theirs", 0.5)):
        monkeypatch.setattr(
            llama_cpp, side, lambda cache, load, step_s=step_s: {"processor_s": 7.0 + step_s * load.tokens}
        )
    command = [str(tmp_path), "--dtype", "int8", "--sequences", "64", "--processor-time"]
    assert llama_cpp.main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 500 | 250 | 2.00 |")


def test_unknown_numbers_are_refused(capsys):
    with pytest.raises(SystemExit):
        llama_cpp.main(["cache", "--dtype", "int4"])
    assert "int4" in capsys.readouterr().err
