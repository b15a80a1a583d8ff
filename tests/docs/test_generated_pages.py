"""What the documentation takes from the package: complete, and the same as what the package does."""

import ast
import re
from pathlib import Path

import documentation
import pytest
from documentation import settings

from mindrlhf.cli import COMMANDS
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.migration.trl.names import trl_names
from mindrlhf.migration.verl import rules, table


@pytest.fixture(scope="module")
def generated():
    return documentation.generated_pages()


def rows(page: str) -> dict[str, list[str]]:
    """First cell without its code signs -> the other cells."""
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in page.split("\n") if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in cells}


def test_every_setting_is_there(generated):
    page = generated.settings_page()
    grpo, sft = page.split("## Fine-tuning")
    for part, config in ((grpo, GRPOSettings), (sft.split("## Model YAMLs")[0], SFTSettings)):
        found, expected = rows(part), settings(config)
        assert found.keys() == expected.keys()
        for key, description in expected.items():
            assert found[key][-1].replace("&lt;", "<").replace("\\|", "|") == description
    assert rows(page.split("## Model YAMLs")[1])["parallel_config.model_parallel"][:2] == ["int, from 1", "`1`"]


def test_defaults_are_those_of_the_group(generated):
    grpo, sft = (rows(part) for part in generated.settings_page().split("## Fine-tuning"))
    assert grpo["optimizer.lr"][:2] == ["float, from 0", "`1e-06`"]
    assert grpo["critic.optimizer.lr"][1] == sft["optimizer.lr"][1] == "`1e-05`"
    assert grpo["rollout.top_p"][:2] == ["float, above 0 to 1", "`1`"]
    assert grpo["trainer.loggers"][1] == "`[console, jsonl, tensorboard]`"
    assert grpo["reward.functions"][:2] == ["list of group of `name`, `weight`, `args`", '`[{"name": "gsm8k"}]`']
    assert grpo["data.shuffle"][:2] == ["bool", "`true`"]


def test_every_command_and_flag_is_there(generated):
    page = generated.commands_page()
    sections = dict(re.findall(r"## `mindrlhf ([\w-]+)`\n(.*?)(?=\n## |\Z)", page, re.DOTALL))
    assert sections.keys() == COMMANDS.keys()
    for name, text in sections.items():
        for action in generated.command_parser(name)._actions:
            if action.option_strings and action.help != "==SUPPRESS==":
                assert f"`{action.option_strings[0]}`" in text, (name, action.option_strings)
    assert "**`--checkpoint`**" in sections["export"], "it has to be given"
    assert "--pre_store_data" not in page, "it has no effect"


def test_every_key_of_verl_is_in_its_table(generated):
    """Every key that a rule reads or that is copied is in the table of what is translated, or in another one."""
    constants = {
        node.value
        for node in ast.walk(ast.parse(Path(rules.__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    groups = "actor|rollout|data|algorithm|critic|trainer|ref|model|custom_reward_function|reward_model"
    keys = {text for text in constants if re.fullmatch(rf"(?:{groups})(?:\.[a-z_0-9]+)+", text)}
    copied = [table.COPIED, table.COPIED_OR_NULL, *table.COPIED_WITH.values()]
    keys |= {key for settings in copied for names in settings.values() for key in names.split()}
    assert len(keys) > 60
    translated = {key for names in generated.verl_rows() for key in names.split(", ")}
    known = translated | settings(GRPOSettings).keys() | table.VERL_DEFAULTS.keys() | table.FILE_DEFAULTS.keys()
    known |= set(" ".join((*table.ELSEWHERE.values(), *table.NEEDLESS.values())).split())
    beginnings = {key for key in keys if any(name.startswith(key) and name != key for name in known)}
    assert keys - known - beginnings == set()


def test_every_key_of_verl_in_a_description_is_translated(generated):
    """`(verl x.y)` in a setting's description is a promise that `--from-verl` keeps."""
    rows = [(keys.split(", "), ours) for keys, ours in generated.verl_rows().items()]
    named = 0
    for setting, description in settings(GRPOSettings).items():
        if setting.startswith("critic.optimizer."):  # described for the actor's optimizer
            continue
        for part in re.findall(r"verl ((?:(?!TRL|MindRLHF)[^)])*)", description):
            for key in re.findall(r"(?<![\w.])[a-z_]+(?:\.[a-z_0-9]+)+", part):
                key = key.removeprefix("actor_rollout_ref.")
                named += 1
                assert any(
                    any(name.startswith(setting) for name in ours)
                    and any(f".{theirs}.".find(f".{key}.") >= 0 for theirs in keys)
                    for keys, ours in rows
                ), (setting, key)
    assert named > 50


def test_tables_name_settings_that_exist(generated):
    known = settings(GRPOSettings).keys()
    for tables in (generated.verl_rows(), trl_names(GRPOSettings)):
        assert len(tables) > 30
        for names in tables.values():
            assert {name for name in names if not name.startswith("--")} <= known
    assert generated.verl_rows()["rollout.n"] == ["rollout.num_generations"]
    assert generated.verl_rows()["data.train_batch_size, actor.ppo_mini_batch_size"] == [
        "algorithm.updates_per_iteration"
    ]
    assert trl_names(GRPOSettings)["epsilon_high"] == ["algorithm.epsilon_high"]
    assert trl_names(GRPOSettings)["ref_model_sync_steps"] == ["algorithm.reference_sync_steps"]
