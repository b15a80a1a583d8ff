"""Reward functions by name, and the one sentence for each way to get the name wrong."""

import pytest

from mindrlhf.errors import UserError
from mindrlhf.rewards import registry
from mindrlhf.user_functions import absolute

SOURCE = """
import neighbour

NUMBER = 3
calls = 0

def plain(prompt, completion, fields, bonus=0.0):
    return len(prompt) + 10 * len(completion) + 100 * len(fields) + bonus

def short(completion, ground_truth, bonus=0.0):
    return float(ground_truth in completion) + bonus

def own_names(p, c, f):
    return 0.0

def beside(completion):
    return neighbour.VALUE

def counting(prompt, completion, fields):
    global calls
    calls += 1
    return calls

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(ground_truth in solution_str) + bonus, "index": extra_info["index"], "source": data_source}

def three(data_source, solution_str, ground_truth):
    return float(data_source == "mine" and ground_truth in solution_str)

class Judge:
    def __call__(self, prompt, completion, fields):
        return 7.0

judge = Judge()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("VALUE = 4.0\n")
    return tmp_path


def refusal(name, args=None):
    with pytest.raises(UserError) as caught:
        registry.resolve(name, args)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_every_shipped_name_resolves():
    for name in registry.SHIPPED:
        assert callable(registry.resolve(name, {"target": 5} if name == "length" else {}))


def test_a_shipped_function_takes_its_arguments():
    reward = registry.resolve("countdown", {"format_score": 0.1})
    assert reward("", "<answer>1+1</answer>", {"ground_truth": '{"target":5,"numbers":[1,1]}'}) == 0.1


def test_functions_of_a_file(folder, monkeypatch):
    path = folder / "mine.py"
    assert registry.resolve(f"{path}:plain", {"bonus": 0.5})("ab", "c", {"x": ""}) == 112.5
    assert registry.resolve(f"{path}:short", {"bonus": 1})("", "it is 5", {"ground_truth": "5"}) == 2.0
    assert registry.resolve(f"{path}:beside")("", "", {}) == 4.0
    assert registry.resolve(f"{path}:judge")("", "", {}) == 7.0
    monkeypatch.chdir(folder)
    assert registry.resolve("mine.py:beside")("", "", {}) == 4.0
    assert absolute("mine.py:beside") == f"{path}:beside"
    assert absolute("gsm8k") == "gsm8k"


def test_functions_in_verls_form(folder):
    fields = {"ground_truth": "5", "data_source": "mine", "extra_info": '{"index": 3}'}
    scored = registry.resolve(f"{folder / 'mine.py'}:compute_score", {"bonus": 1})("", "it is 5", fields)
    assert scored == {"score": 2.0, "index": 3, "source": "mine"}
    assert registry.resolve(f"{folder / 'mine.py'}:three")("", "it is 5", fields) == 1.0
    assert registry.resolve(f"{folder / 'mine.py'}:three")("", "it is 5", {"ground_truth": "5", "task": "mine"}) == 1.0


def test_what_needs_a_ground_truth(folder):
    """What the registry declares of the shipped functions is what they do, and a signature says it of the others."""
    for name in registry.SHIPPED:
        reward = registry.resolve(name, {"target": 5} if name == "length" else {})
        fields = {"response_length": "5", "max_new_tokens": "10", "data_source": "openai/gsm8k"}
        if reward.needs_ground_truth:
            with pytest.raises(KeyError, match="ground_truth"):
                reward("", "#### 5", fields)
        else:
            reward("", "#### 5", fields)
    (folder / "lenient.py").write_text("def f(completion, ground_truth='none'): return float(ground_truth == 'none')")
    needs = {name: registry.resolve(f"{folder / 'mine.py'}:{name}").needs_ground_truth for name in ("plain", "short")}
    assert needs == {"plain": False, "short": True}
    assert registry.resolve(f"{folder / 'mine.py'}:three").needs_ground_truth
    lenient = registry.resolve(f"{folder / 'lenient.py'}:f")
    assert not lenient.needs_ground_truth
    assert lenient("", "text", {}) == 1.0
    assert lenient("", "text", {"ground_truth": "5"}) == 0.0


def test_a_file_is_imported_once(folder):
    name = f"{folder / 'mine.py'}:counting"
    assert registry.resolve(name)("", "", {}) == 1
    assert registry.resolve(name)("", "", {}) == 2


def test_functions_of_a_module():
    assert registry.resolve("mindrlhf.rewards.gsm8k:gsm8k_strict")("", "#### 5", {"ground_truth": "5"}) == 1.0


def test_unknown_names(folder):
    assert "nearest: 'gsm8k'" in refusal("gsmk8")
    assert "nearest" not in refusal("xyzzy")
    assert "format" in refusal("xyzzy")
    for name in ("", ":", "json:", ":x", f"{folder}/mine.py"):
        assert "is not known" in refusal(name)


def test_files_and_modules_that_are_not_there(folder):
    assert f"there is no file {folder}/none.py" in refusal(f"{folder}/none.py:plain")
    assert "there is no module 'no_such_package'" in refusal("no_such_package.inner:reward")
    assert "there is no module 'json.no_such_module'" in refusal("json.no_such_module:reward")


def test_functions_that_are_not_there(folder):
    path = folder / "mine.py"
    assert "has no 'plian' (nearest: 'plain')" in refusal(f"{path}:plian")
    assert "'NUMBER' in" in refusal(f"{path}:NUMBER")
    assert "not a function, but int" in refusal(f"{path}:NUMBER")
    assert "json has no 'JSONEncodr' (nearest: 'JSONEncoder')" in refusal("json:JSONEncodr")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_files_that_do_not_import(tmp_path, source, expected):
    path = tmp_path / "broken.py"
    path.write_text(source)
    message = refusal(f"{path}:f")
    assert expected in message
    assert f"{path}, line {2 if '1 / 0' in source else 1}" in message


def test_arguments_that_do_not_fit(folder):
    path = folder / "mine.py"
    assert "no call gives the function's parameter 'target'; give it by args: {target: 200}" in refusal("length")
    assert "has no parameter 'bonsu'; take it out of args" in refusal(f"{path}:plain", {"bonsu": 1})
    assert "args has 'completion', which each call gives" in refusal(f"{path}:short", {"completion": 1})
    assert "no call gives the function's parameter 'p'" in refusal(f"{path}:own_names")
    assert "solution_str, extra_info of a sample" in refusal("json:dumps")
