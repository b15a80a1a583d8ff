"""The lists of known keys hold every key of the installed MindFormers."""

import ast
import importlib.util
from pathlib import Path

import pytest

from mindrlhf.configs.model_names import SPELLINGS
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import FIXED, UNUSED, ContextSettings, ParallelSettings, RecomputeSettings


def _arguments(module: str, name: str) -> set[str]:
    """Arguments of `name.__init__` in an installed MindFormers, read from its source without importing it."""
    found = importlib.util.find_spec("mindformers")
    if found is None or found.origin is None:
        pytest.skip("mindformers is not installed")
    tree = ast.parse((Path(found.origin).parent / module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            init = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
            return {argument.arg for argument in init.args.args} - {"self"}
    raise AssertionError(f"{name} is not in {module}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("models/llama/llama_config.py", "LlamaConfig"),
        ("models/qwen2/configuration_qwen2.py", "Qwen2Config"),
        ("models/qwen3/configuration_qwen3.py", "Qwen3Config"),
        ("models/qwen3_moe/configuration_qwen3_moe.py", "Qwen3MoeConfig"),
    ],
)
def test_every_key_of_mindformers_model_classes_is_known(module, name):
    known = {*ModelSettings.model_fields, *SPELLINGS, *FIXED, *UNUSED["model_config"]}
    assert _arguments(module, name) <= known


@pytest.mark.parametrize(
    ("name", "settings", "unused"),
    [
        ("TransformerOpParallelConfig", ParallelSettings, UNUSED["parallel_config"]),
        ("TransformerRecomputeConfig", RecomputeSettings, UNUSED["recompute_config"]),
    ],
)
def test_every_key_of_mindformers_layout_classes_is_known(name, settings, unused):
    assert _arguments("modules/transformer/transformer.py", name) <= {*settings.model_fields, *unused}


def test_no_key_is_both_read_and_unused():
    for settings, unused in (
        (ModelSettings, {*UNUSED["model_config"], *FIXED, *SPELLINGS}),
        (ParallelSettings, UNUSED["parallel_config"]),
        (RecomputeSettings, UNUSED["recompute_config"]),
        (ContextSettings, UNUSED["context"]),
    ):
        assert not set(settings.model_fields) & set(unused)
    assert set(SPELLINGS.values()) <= set(ModelSettings.model_fields)
