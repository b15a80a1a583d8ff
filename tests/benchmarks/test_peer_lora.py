"""The peer's script with adapters, by stand-ins for torch, PEFT and the script, which starts itself anew as well."""

import subprocess
import sys

import pytest
from workers import ROOT

TORCH = """
from dataclasses import dataclass

@dataclass(eq=False)
class Linear:
    in_features: int
    out_features: int

class nn: Linear = Linear
"""
PEFT = "def LoraConfig(**settings): return settings"
SCRIPT = """
import os, sys
if "ANEW" not in os.environ:
    os.execve(sys.executable, [sys.executable] + sys.argv, {**os.environ, "ANEW": "1"})
from torch.nn import Linear

class Parameter:
    def __init__(self, size, trains): self.numel, self.requires_grad = lambda: size, trains

class Model:
    head, parts = Linear(in_features=4, out_features=50), [Linear(in_features=4, out_features=6)] * 3
    rows = [("wte", 200, True)]
    def get_output_embeddings(self): return self.head
    def modules(self): return [self, *self.parts, self.head]
    def named_parameters(self):
        return [(name, Parameter(n, trains)) for name, n, trains in self.rows]
    def parameters(self): return [parameter for _, parameter in self.named_parameters()]

class GRPOTrainer:
    def __init__(self, model, peft_config, args):
        print(sys.argv, args, peft_config)
        self.model, frozen = model, "--leaky" not in sys.argv
        self.ref_model = model if "--reference" in sys.argv else None
        model.rows = [(name, n, not frozen) for name, n, _ in model.rows]
        for number, part in enumerate(model.parts):
            for letter, size in (("A", part.in_features), ("B", part.out_features)):
                model.rows.append((f"{number}.lora_{letter}.default", peft_config["r"] * size, True))

def main():
    GRPOTrainer(model=Model(), args="settings")
"""


@pytest.fixture
def run(tmp_path):
    for name, content in (("torch/__init__", TORCH), ("torch/nn", "from torch import Linear"), ("peft", PEFT)):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*flags):
        command = [sys.executable, ROOT / "benchmarks" / "peer_lora.py", "script.py", *flags]
        return subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": "."}, capture_output=True, text=True)

    return run


def test_the_trainer_gets_adapters_and_the_script_its_own_flags(run):
    done = run("--steps", "2", "--lora-rank", "8", "--load", "folder")
    assert (done.returncode, done.stderr) == (0, "")
    config = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    assert done.stdout.splitlines() == [
        f"{['script.py', '--steps', '2', '--load', 'folder']} settings {config}",
        "240 of 440 parameters train, in 3 adapters of rank 8",
    ]


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--leaky", "peer_lora: 440 parameters train, not 240 of adapters: ['wte']"),
        ("--reference", "peer_lora: the trainer has a reference model, and adapters off are to be the reference"),
    ],
)
def test_a_peer_that_does_other_work_is_refused(run, flag, sentence):
    done = run("--lora-rank", "8", flag)
    assert (done.returncode, done.stderr) == (1, f"{sentence}\n")
