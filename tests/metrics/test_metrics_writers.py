import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.errors import UserError
from mindrlhf.files.json import json_line, read_json_lines
from mindrlhf.metrics.writers import JsonlWriter, TensorBoardWriter, Writers, read_metrics

STEPS = {1: {"a": 1.5, "b/c": 0.25}, 2: {"a": -2.0, "b/c": 1e-9}, 3: {"a": 3.0, "b/c": 7.0}}


def strict(text: str | bytes) -> dict:
    """Parse JSON as other languages do: NaN and Infinity are errors."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def write_steps(writer, steps):
    for step in steps:
        writer.write(step, STEPS[step])
    writer.close()


def events(folder: Path) -> list:
    """The events of all files in a folder, parsed from TensorFlow's record format."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def test_jsonl_is_in_the_file_after_each_step(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step, values in STEPS.items():
        writer.write(step, values)
        lines = path.read_text().splitlines()
        assert strict(lines[-1]) == {"step": step, **values}
        assert len(lines) == step
    writer.close()
    assert read_metrics(path) == [{"step": step, **values} for step, values in STEPS.items()]


def test_jsonl_stays_valid_with_nan_and_infinities(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    writer.close()
    assert strict(path.read_text()) == {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}
    (row,) = read_metrics(path)
    assert math.isnan(row["a"])
    assert row["d"] == 1.0


def test_resumed_jsonl_has_no_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonlWriter(path), (1, 2, 3))
    with path.open("a") as file:
        file.write('{"step": 4, "a": 0.')  # killed while writing
    write_steps(JsonlWriter(path, start_step=3), (3,))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[1] == {"step": 2, **STEPS[2]}
    write_steps(JsonlWriter(path), (1,))
    assert [row["step"] for row in read_metrics(path)] == [1], "a run that starts anew begins an empty file"


def test_damaged_jsonl_is_refused_by_line_and_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ('{"step": 1}\n{"step": \n{"step": 3}\n', '{"step": 1}\n[2]\n', '{"step": 1}\n{"a": 2}\n'):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
            JsonlWriter(path, start_step=2)
        assert path.read_text() == damaged


def test_reader_names_a_missing_file_and_passes_over_a_torn_last_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*absent\.jsonl"):
        read_json_lines(tmp_path / "absent.jsonl")
    path = tmp_path / "torn.jsonl"
    path.write_bytes('{"text": "步"}\n{"text": "步"}'.encode()[:-3])  # in the middle of a character
    assert read_json_lines(path) == [{"text": "步"}]


json_values = st.recursive(
    st.none() | st.floats() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner, max_size=3)
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_json_line_is_always_one_valid_line(fields):
    line = json_line(fields)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert strict(line).keys() == fields.keys()


def test_tensorboard_events_read_back_and_resume_purges(tmp_path, caplog):
    write_steps(TensorBoardWriter(tmp_path), (1, 2, 3))
    resumed = TensorBoardWriter(tmp_path, start_step=3)
    resumed.write(3, {"a": math.nan})
    resumed.close()
    found = events(tmp_path)
    scalars = {(event.step, value.tag): value.simple_value for event in found for value in event.summary.value}
    expected = {(step, name): value for step, values in STEPS.items() for name, value in values.items()}
    assert scalars.pop((3, "a")) != scalars.get((3, "b/c")), "the resumed step was written again"
    expected.pop((3, "a"))
    assert scalars == pytest.approx(expected)
    starts = [event.step for event in found if event.HasField("session_log")]
    assert sorted(starts) == [0, 3], "TensorBoard hides earlier events from these steps on"
    assert not caplog.records
    assert len(list(tmp_path.iterdir())) == 2


class Recorder:
    def __init__(self, trouble=None):
        self.seen, self.closed, self.trouble = [], False, trouble

    def write(self, step, values):
        self.seen.append((step, values))

    def close(self):
        self.closed = True
        if self.trouble:
            raise self.trouble


def test_all_writers_get_the_same_and_each_step_once():
    first, second = Recorder(), Recorder()
    with Writers([first, second]) as writers:
        writers.write(1, STEPS[1])
        writers.write(2, STEPS[2])
        with pytest.raises(ValueError, match="step 2 after step 2"):
            writers.write(2, STEPS[2])
    assert first.seen == second.seen == [(1, STEPS[1]), (2, STEPS[2])]
    assert first.closed
    assert second.closed


def test_one_writer_that_cannot_close_does_not_keep_others_open():
    first, second = Recorder(OSError("disk full")), Recorder()
    with pytest.raises(OSError, match="disk full"):
        Writers([first, second]).close()
    assert second.closed


@pytest.mark.parametrize("writer", [JsonlWriter, TensorBoardWriter])
def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path, writer):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*cannot be written|cannot create the folder .*file"):
        writer(tmp_path / "file" / "below" / "metrics")
