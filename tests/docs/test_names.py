"""Names in README.md and docs/ are those of the program: settings, flags, files, and YAML that loads."""

import re

import documentation
import pytest
from documentation import settings

from mindrlhf.cli import COMMANDS
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ContextSettings, ParallelSettings, RecomputeSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.migration.verl.table import ELSEWHERE, NEEDLESS, NOT_DONE

PAGES = documentation.pages()
YAML_GROUPS = {
    "parallel_config": ParallelSettings,
    "recompute_config": RecomputeSettings,
    "context": ContextSettings,
    "model_config": ModelSettings,
}
METRICS = {"tools/call_frequency", "tools/failure_frequency", "tools/seconds"}  # they look like files
FLAGS_ELSEWHERE = {
    "--minutes",
    *(
        "--seed",
        "--out",
        "--steps",
        "--split",
        "--cut",
        "--processes",
        "--slow",
        "--dev",
        "--mindspore",
        "--help",
        "--check",
        "--dry-run",
    ),  # of scripts/, the tests, ruff
    *("--peer-python", "--train", "--test"),  # of benchmarks/
    *("--max-lora-rank", "--enable-lora", "--lora-modules"),  # of vLLM
    *("--node_rank", "--master_addr", "--master_port", "--worker_num", "--local_worker_num", "--log_dir"),  # of msrun
}


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Our settings, and verl's names as the descriptions and the translation have them."""
    generated = documentation.generated_pages()
    ours = settings(GRPOSettings) | settings(SFTSettings)
    verl = {key for names in generated.verl_rows() for key in names.split(", ")}
    verl |= set(" ".join((*ELSEWHERE.values(), *NEEDLESS.values())).split())
    verl |= {key for feature in NOT_DONE for key in feature.asking}
    verl |= {name for text in ours.values() for name in re.findall(r"(?:verl|,) ([a-z_]+(?:\.[a-z_]+)+)", text)}
    groups = {key.rpartition(".")[0] for key in {*ours, *verl}}
    for name, group in YAML_GROUPS.items():
        ours |= {f"{name}.{key}": "" for key in group.model_fields}
    return {*ours, *verl, *groups, "data.chat_template_kwargs.chat_template"}  # a key of free variables with a meaning


@pytest.mark.parametrize("page", PAGES)
def test_settings(page, keys):
    groups = "|".join((*GRPOSettings.model_fields, *YAML_GROUPS))
    for text in documentation.named(page):
        found = re.fullmatch(rf"(?:train_yaml\.|infer_yaml\.|model\.)?((?:{groups})(?:\.[a-z_0-9]+)+)(?:[=:].*)?", text)
        if found and not re.fullmatch(r".*\.(?:py|md|yaml|json)", text):
            assert found[1] in keys, f"{page}: `{text}` is no setting"


@pytest.mark.parametrize("page", PAGES)
def test_flags(page):
    parser = documentation.generated_pages().command_parser
    known = {option for name in COMMANDS for action in parser(name)._actions for option in action.option_strings}
    for text in documentation.named(page):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
            assert flag in known | FLAGS_ELSEWHERE, f"{page}: {flag} in `{text}` is no flag"


@pytest.mark.parametrize("page", PAGES)
def test_files(page, root):
    folders = "benchmarks|docs|examples|mindrlhf|model_configs|scripts|tests|tools"
    inside = "algorithms|checkpoint|memory|parallel|reshard|rollout|trainer|training"
    for text in documentation.named(page):
        for name in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+", text):
            assert (root / name).exists() or name in METRICS, f"{page}: there is no {name}"
        if re.fullmatch(rf"(?:{inside})/[\w./-]+\.py", text):
            assert (root / "mindrlhf" / text).is_file(), f"{page}: there is no mindrlhf/{text}"


def test_the_page_in_chinese_has_the_commands_and_quick_starts(root):
    texts = [(root / page).read_text(encoding="utf-8") for page in ("README.md", "docs/zh/quickstart.md")]
    readme, chinese = (set(re.findall(r"^\| `([a-z-]+)` \||bash (scripts/\w+)", text, re.M)) for text in texts)
    assert {("sft", ""), ("", "scripts/quickstart_tools")} <= readme
    assert readme - chinese == {("", "scripts/run_tests"), ("", "scripts/setup")}  # for those who change it


def test_rooms(root):
    """The README's table has every room of the package, and no other."""
    named = re.findall(r"^\| `([a-z]+)/` \|", (root / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(path.parent.name for path in (root / "mindrlhf").glob("*/__init__.py"))


@pytest.mark.parametrize("page", PAGES)
def test_yaml(page, tmp_path):
    """Blocks of settings load."""
    for block in documentation.blocks(page):
        if block.language == "yaml":
            file = tmp_path / "block.yaml"
            file.write_text(block.text)
            load_grpo_config(file)
