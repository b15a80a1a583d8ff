"""Parquet columns with values that Python lacks: converted or left out with a warning, never a traceback."""

import math
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

from mindrlhf.data.convert_problems import convert_rows
from mindrlhf.data.parquet import read_parquet, write_parquet
from mindrlhf.data.source import read_source
from mindrlhf.errors import UserError
from mindrlhf.rewards.columns import value_of

STAMP = 1_600_000_000_000_000_001  # with a nanosecond
WHEN = datetime(2020, 9, 13, 12, 26, 40)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
ODD = pa.array([b"\xff", b"ok"]).view(pa.string())
NESTED = pa.struct([("at", pa.timestamp("ns")), ("name", pa.string())])
TWO = "Python has no such value"

COLUMNS = {
    "timestamp": (pa.array([STAMP, None], pa.timestamp("ns")), [WHEN, None], "has nanoseconds"),
    "whole": (pa.array([STAMP - 1, None], pa.timestamp("ns")), [WHEN, None], None),
    "time": (pa.array([5, 6000], pa.time64("ns")), [time(0), time(0, 0, 0, 6)], "has nanoseconds"),
    "duration": (pa.array([5000, None], pa.duration("ns")), [timedelta(microseconds=5), None], None),
    "zone": (pa.array([0, None], pa.timestamp("us", "Mars/Phobos")), [EPOCH, None], "time zone that is not known"),
    "text": (ODD, [b"\xff", "ok"], "not UTF-8, and are given as bytes"),
    "texts": (pa.ListArray.from_arrays([0, 1, 2], ODD), [[b"\xff"], ["ok"]], "not UTF-8, and are given as bytes"),
    "nested": (pa.array([{"at": STAMP, "name": "a"}, None], NESTED), [{"at": WHEN, "name": "a"}, None], "nanoseconds"),
    "listed": (pa.array([[STAMP], None], pa.list_(pa.timestamp("ns"))), [[WHEN], None], "has nanoseconds"),
    "category": (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"], None),
    "decimal": (pa.array([Decimal("1.10"), None]), [Decimal("1.10"), None], None),
    "number": (pa.array([math.nan, 1.0]), [None, 1.0], None),
    "bytes": (pa.array([b"\xff", None]), [b"\xff", None], None),
    "year": (pa.array([2**61, 1], pa.timestamp("us")), None, f"is left out: {TWO}"),
    "day": (pa.array([3 * 10**8 * 86_400_000, 0], pa.date64()), None, f"is left out: {TWO}"),
    "span": (pa.array([2**62, 1], pa.duration("s")), None, f"is left out: {TWO}"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_odd_columns(tmp_path, small, caplog, name):
    """A column that nobody asked for ends nothing, and reaches the functions where Python has its values."""
    column, values, note = COLUMNS[name]
    answers = {"question": ["1 + 1?"] * 2, "answer": ["#### 2"] * 2}
    parquet.write_table(pa.table(answers | {name: column}), tmp_path / "x.parquet")
    rows = read_parquet(tmp_path / "x.parquet")
    assert [row.get(name, "left out") for row in rows] == (values or ["left out"] * 2)
    assert bool(caplog.messages) == (note is not None)
    assert all(f"x.parquet: column {name!r} " in message and note in message for message in caplog.messages)
    prompts = convert_rows(read_source(tmp_path / "x.parquet"), small)
    for prompt, value in zip(prompts, values or (), strict=bool(values)):
        assert (value is None) == (name not in prompt.fields)
        assert value is None or value_of(prompt.fields, name) == value


def test_a_question_that_is_not_utf_8_is_refused_by_its_row(tmp_path, small):
    parquet.write_table(pa.table({"question": ODD, "answer": ["#### 2"] * 2}), tmp_path / "x.parquet")
    with pytest.raises(
        UserError, match=r"x\.parquet, row 0: not a gsm8k row: key 'question' should be text, and is b'"
    ):
        convert_rows(read_source(tmp_path / "x.parquet"), small)


def test_two_columns_of_a_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["question", "question"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet: has two columns called 'question'; rename one of them"):
        read_parquet(tmp_path / "x.parquet")


def test_the_first_rows_alone(tmp_path):
    write_parquet(tmp_path / "x.parquet", [{"question": str(number)} for number in range(3000)])
    for limit in (1, 1024, 2000, 5000, None):
        found = read_source(tmp_path / "x.parquet", limit)
        assert [row.values["question"] for row in found] == [str(number) for number in range(3000)][:limit]
    assert found[-1].where == f"{tmp_path / 'x.parquet'}, row 2999"


def test_columns_of_several_types_are_not_written(tmp_path):
    for rows in ([{"a": 1}, {"a": "text"}], [{"a": {}}]):
        with pytest.raises(UserError, match=r"x\.parquet: parquet cannot hold these columns, whose values should be a"):
            write_parquet(tmp_path / "x.parquet", rows)
    assert not (tmp_path / "x.parquet").exists()
