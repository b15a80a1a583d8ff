"""The grammar of all command lines: three forms of each flag and setting, and the nearest name for an unknown one."""

import argparse
import importlib

import pytest
from documentation import settings

from mindrlhf.cli import COMMANDS, main
from mindrlhf.commands.arguments import LIKENESS, SETTINGS, Parser
from mindrlhf.commands.plot import inches
from mindrlhf.configs.grpo import GRPOSettings, SamplingSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest

TAKE_SETTINGS = {"train": GRPOSettings, "plan": GRPOSettings, "dry-run": GRPOSettings, "sft": SFTSettings}
TAKE_SETTINGS |= {"generate": SamplingSettings, "chat": SamplingSettings}


def parser_of(command: str) -> Parser:
    parser = Parser(f"mindrlhf {command}")
    importlib.import_module(f"mindrlhf.commands.{COMMANDS[command][0]}").add_arguments(parser)
    return parser


def needed(parser: Parser, without: argparse.Action | None = None) -> list[str]:
    """What has to be given, without one flag."""
    either = [group._group_actions for group in parser._mutually_exclusive_groups if group.required]
    words = [f"{actions[0].option_strings[0]}=x" for actions in either if without not in actions]
    for action in parser._actions:
        if action.option_strings and action.required and action is not without:
            words.append(f"{action.option_strings[0]}={_value(action)}")
        elif not action.option_strings and action.nargs not in ("*", argparse.REMAINDER):  # which follows the flags
            words.append("somewhere")
    return words


def _value(action: argparse.Action) -> str:
    if action.choices:
        return [choice for choice in action.choices if choice != action.default][-1]
    if action.metavar == "JSON":
        return '{"a": 1}'
    return {int: "7", float: "0.25", inches: "7x5"}.get(action.type, "True")


@pytest.mark.parametrize("command", COMMANDS)
def test_three_forms_of_every_flag(command):
    parser = parser_of(command)
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        for option in action.option_strings:
            name, value = option.removeprefix("--"), _value(action)
            forms = (
                [option, value],
                [f"{option}={value}"],
                [f"{name}={value}"],
                [f"--{name.replace('_', '-')}", value],
            )
            first, *others = (parser.parse([*needed(parser, action), *form]) for form in forms)
            assert all(other == first for other in others), option
            assert getattr(first, action.dest) != action.default, option


@pytest.mark.parametrize("command", TAKE_SETTINGS)
def test_three_forms_of_every_setting(command):
    parser = parser_of(command)
    rest = needed(parser)
    for name in [*settings(TAKE_SETTINGS[command]), "train_yaml.context.device_target"]:
        for form in (["--" + name, "-1"], [f"--{name}=-1"], [f"{name}=-1"]):
            assert vars(parser.parse([*rest, *form]))[SETTINGS] == [f"{name}=-1"]
        assert vars(parser.parse([f"--{name}", *rest]))[SETTINGS] == [f"{name}=True"], "as a switch"
        for first in settings(TAKE_SETTINGS[command]):
            assert not nearest(first.partition(".")[0], _flags(parser), LIKENESS[True]), "it would be refused"


def test_the_other_commands_take_no_settings():
    assert {name for name in COMMANDS if SETTINGS in parser_of(name)._positional} == TAKE_SETTINGS.keys()


def _flags(parser: Parser) -> list[str]:
    return [option.removeprefix("--") for action in parser._actions for option in action.option_strings]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["--{}", "--{}=3", "{}=3"])
def test_an_unknown_flag_is_refused_with_the_nearest(command, form):
    parser = parser_of(command)
    option = max(_flags(parser), key=len)
    takes_paths = any(not action.option_strings and action.dest != SETTINGS for action in parser._actions)
    if takes_paths and not form.startswith("--"):
        return  # a folder may have such a name
    with pytest.raises(UserError, match=f"^unknown flag --{option}x; did you mean --{option}\\?$"):
        parser.parse([*needed(parser), form.format(f"{option}x")])


def test_what_is_no_name_at_all(capsys):
    assert main(["report", "a", "--zzzzz", "3"]) == 2
    refusal = "mindrlhf report: unknown flag --zzzzz; `mindrlhf report --help` lists those of this command.\n"
    assert capsys.readouterr().err == refusal


def test_a_setting_that_is_unknown_is_refused_by_its_loader(capsys, tmp_path):
    assert (
        main(["generate", "--model", "none", "--prompts", "none", "--output", str(tmp_path / "o"), "--temprature=1"])
        == 2
    )
    assert "unknown key temprature; did you mean temperature?" in capsys.readouterr().err


def test_several_values_end_where_another_name_begins():
    files = ["file_path=[a.jsonl, b.jsonl]"], ["--file_path", "a.jsonl", "b.jsonl"]
    for words in files:
        parsed = parser_of("data").parse([*words, "output_path=o", "--fields", "question=q", "answer=a"])
        assert (parsed.file_path, parsed.output_path) == (["a.jsonl", "b.jsonl"], "o")
        assert parsed.fields == ["question=q", "answer=a"], "pairs, whatever their keys"


def test_switches():
    parser = parser_of("report")
    assert parser.parse(["a", "--compare", "b"]).runs == parser.parse(["--compare", "True", "a", "b"]).runs
    assert not parser.parse(["a", "compare=False"]).compare
    with pytest.raises(UserError, match="--compare: 'maybe' is neither True nor False"):
        parser.parse(["a", "--compare=maybe"])
    required = needed(parser_of("train"))
    parsed = parser_of("train").parse([*required, "--memory.swap", "rollout.temperature=0.7"])
    assert vars(parsed)[SETTINGS] == ["memory.swap=True", "rollout.temperature=0.7"]
