"""Demonstrations in forms of other suites, and problems with answers, are the conversations that they stand for."""

import json

import numpy as np
import pytest

from mindrlhf.data.convert_problems import convert
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.mindrecord import read_pairs

ASKED, ANSWERED = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
RESPONSE = "<tool_response>\n{}\n</tool_response>"
SAID = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": SAID}, [ASKED, ANSWERED]),
        ({"conversations": SAID, "system": "Be brief."}, [SYSTEM, ASKED, ANSWERED]),
        ({"conversations": [{"from": "system", "value": "Be brief."}, *SAID]}, [SYSTEM, ASKED, ANSWERED]),
        ({"conversations": [ASKED, ANSWERED], "id": 3}, [ASKED, ANSWERED]),
        ({"instruction": "Hi", "input": "", "output": "Hello."}, [ASKED, ANSWERED]),
        ({"instruction": "H", "input": "i", "output": "Hello."}, [{"role": "user", "content": "H\ni"}, ANSWERED]),
        ({"instruction": "Hi", "output": "Hello.", "system": "Be brief."}, [SYSTEM, ASKED, ANSWERED]),
        ({"messages": [{"role": "user", "content": PARTS}, ANSWERED]}, [ASKED, ANSWERED]),
        ({"prompt": [{"role": "user", "content": PARTS}], "completion": [ANSWERED]}, [ASKED, ANSWERED]),
        (
            {"conversations": [*SAID, SAID[0], SAID[1] | {"weight": 0}, *SAID]},
            [ASKED, ANSWERED, ASKED, ANSWERED | {"weight": 0}, ASKED, ANSWERED],
        ),
        (
            {"messages": [ASKED, ANSWERED | {"loss": False}, ASKED, ANSWERED | {"loss": 0.25, "train": True}]},
            [ASKED, ANSWERED | {"weight": 0}, ASKED, ANSWERED],
        ),
        (
            {
                "conversations": [
                    *SAID,
                    {"from": "tool", "value": f"{RESPONSE.format(1)}\n{RESPONSE.format(2)}\n"},
                    SAID[1],
                ]
            },
            [ASKED, ANSWERED, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, ANSWERED],
        ),
        (
            {"conversations": [*SAID, {"from": "tool", "value": f"see {RESPONSE.format(1)}"}, SAID[1]]},
            [ASKED, ANSWERED, {"role": "tool", "content": f"see {RESPONSE.format(1)}"}, ANSWERED],
        ),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, *SAID], "system": "Be brief."},
            [SYSTEM, ASKED, ANSWERED],
        ),
        ({"messages": [ASKED, ANSWERED], "instruction": "other", "output": "other"}, [ASKED, ANSWERED]),
    ],
)
def test_forms_of_other_suites(small, row, messages):
    (found,), (expected,) = (read_demonstrations("rows", small, given=[one]) for one in (row, {"messages": messages}))
    np.testing.assert_array_equal(found.prompt_ids, expected.prompt_ids)
    np.testing.assert_array_equal(found.response_ids, expected.response_ids)
    np.testing.assert_array_equal(found.sampled, expected.sampled)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1 + 1?", "answer": "1+1=2\n#### 2"},
        {"task": "arithmetic", "question": "1 + 1?", "answer": "1+1=2 #### 2"},
        {"factors": [3, 4], "answer": "3*4=12 #### 12"},
        {"nums": [3, 4], "target": 7, "answer": "<answer>3+4</answer>"},
        {"prompt": "1 + 1 = ", "answer": "2"},
        {"prompt": [ASKED], "reward_model": {"ground_truth": 2}, "extra_info": {"answer": "#### 2"}},
    ],
    ids=["gsm8k", "arithmetic", "multiplication", "countdown", "text", "verl"],
)
def test_problems_with_answers_are_those_of_a_mindrecord(small, tmp_path, row):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(row) + "\n")
    convert(source, tmp_path / "a.mindrecord", small, progress=False)
    ((prompt, answer),) = read_pairs(tmp_path / "a.mindrecord")
    source.write_text(f"{json.dumps(row)}\n{json.dumps({'messages': [ASKED, ANSWERED]})}\n")
    found, talk = read_demonstrations(source, small)
    np.testing.assert_array_equal(found.prompt_ids, prompt)
    np.testing.assert_array_equal(found.response_ids, answer)
    assert found.sampled.all()
    assert small.decode(talk.response_ids) == "Hello.<|im_end|>"
