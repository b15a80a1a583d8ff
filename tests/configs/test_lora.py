"""Settings of adapters, and the modules that an adapter has by PEFT's rules."""

from contextlib import suppress
from math import sqrt

import pytest
from small_model import small_config

from mindrlhf.configs import lora
from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.configs.lora import Adapter, matches
from mindrlhf.configs.model_names import MODULES
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table

QUERY, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "lm_head"


def modules(**matching) -> list[str]:
    """The modules of three that an adapter has."""
    adapter = Adapter(4, 8, **matching)
    return [path for path in (QUERY, DOWN, HEAD) if adapter.of(path)]


def test_all_linear_is_every_linear_module_but_the_head():
    assert modules() == [QUERY, DOWN]


def test_names_are_ends_of_paths_behind_a_dot():
    assert modules(target_modules=("q_proj",)) == [QUERY]
    assert modules(target_modules=("self_attn.q_proj", "layers.11.mlp.down_proj")) == [QUERY, DOWN]
    assert modules(target_modules=("proj", "1.mlp.down_proj")) == []
    assert modules(target_modules=(QUERY,)) == [QUERY]


def test_a_text_is_a_regular_expression_of_whole_paths():
    assert modules(target_modules="q_proj") == []
    assert modules(target_modules=r".*\.(q|down)_proj") == [QUERY, DOWN]
    assert modules(target_modules=r"model\.layers\.0\..*") == [QUERY]


def test_excluded_modules_have_none():
    assert modules(exclude_modules=("q_proj",)) == [DOWN]
    assert modules(exclude_modules=r".*mlp.*") == [QUERY]
    assert modules(target_modules=("q_proj",), exclude_modules=(QUERY,)) == []


def test_ranks_and_scales():
    assert Adapter(4, 8).of(QUERY) == (4, 2.0)
    assert Adapter(4, 8, use_rslora=True).of(QUERY) == (4, 4.0)
    adapter = Adapter(8, 4, True, rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 16})
    assert adapter.of(QUERY) == (2, 4 / sqrt(2))
    assert adapter.of(DOWN) == (8, 16 / sqrt(8))


def test_a_pattern_is_the_end_of_a_path_and_the_first_one_counts():
    found = Adapter(8, 8, rank_pattern={"roj": 1, r"layers\.\d\.self_attn\.q_proj": 2, "q_proj": 3, "proj|mlp": 4})
    assert found.of(QUERY)[0] == 2
    assert found.of(DOWN)[0] == 8
    assert Adapter(8, 8, rank_pattern={"^model.layers.0.self_attn.q_proj": 2}).of(QUERY)[0] == 2


@pytest.mark.parametrize("load", [load_grpo_config, load_sft_config])
def test_adapters_are_off_by_default_and_on_with_a_rank_or_a_folder(load):
    assert not load().lora.enabled
    settings = load(None, ["lora.rank=16", "lora.alpha=8", "lora.target_modules=[q_proj, v_proj]"]).lora
    assert settings.enabled
    assert settings.adapter() == Adapter(16, 8, target_modules=("q_proj", "v_proj"))
    assert load(None, ["lora.adapter_path=somewhere"]).lora.enabled


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.target_modules=5", "lora.target_modules is 5, and must be text or a list"),
        ("lora.exclude_modules='('", r"lora.exclude_modules: '\(' is no regular expression .*; give a list of names"),
        ("lora.rank=-1", "lora.rank is -1, and must be a whole number, at least 0"),
        ("lora.alpha=0", "lora.alpha is 0, and must be a number, above 0"),
        ("lora.lora_rank=4", "unknown key lora.lora_rank; did you mean lora.rank"),
    ],
)
def test_mistakes_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        load_grpo_config(None, [override])


def test_names_of_mindformers_are_those_of_the_parameter_table():
    table = parameter_table(small_config())
    matrices = [spec for spec in table if spec.kind == "matrix" and spec.layer == 0]
    names = {
        spec.name.split(".0.")[1].removesuffix(".weight"): spec.hf_tensors[0].module.rpartition(".")[2]
        for spec in matrices
    }
    assert names == MODULES


@pytest.mark.parametrize("pattern", [r"(?:[a-z]+[._0-9]*)+~?[A-Z]", r"(.+)+(.+)+(.+)+!", r"(.*)*(.*)*(.*)*q_prox"])
def test_a_pattern_that_takes_for_ever(pattern):
    """It has an end: no module, or a sentence."""
    adapter = Adapter(4, 8.0, target_modules=pattern)
    with suppress(UserError):
        assert all(adapter.of(f"model.layers.{layer}.self_attn.q_proj") is None for layer in range(20))


def test_the_limit_of_a_pattern(monkeypatch):
    monkeypatch.setattr(lora, "MATCH_S", 1e-6)
    slow = "|".join(f"(a{{0,{n}}}b?)*(a|ab)*c" for n in range(200))
    with pytest.raises(UserError, match=r"the pattern .* takes longer than 1e-06 s on a+"):
        matches(slow, "a" * 4000)
