"""The entry of all commands: help, exit codes, and what is imported for what."""

import importlib
import os
import subprocess
import sys
from contextlib import suppress

import jobs
import pytest

from mindrlhf import __version__, cli
from mindrlhf.errors import UserError


@pytest.fixture
def command(monkeypatch):
    """Puts a command `probe` in place whose `run` is the given function."""

    def put(run):
        class Module:
            @staticmethod
            def add_arguments(parser):
                parser.add_argument("--flag")
                parser.add_argument("--many", nargs="*")
                parser.add_argument("settings", nargs="*")

        Module.run = staticmethod(run)
        monkeypatch.setitem(cli.COMMANDS, "probe", ("probe", "try something"))
        monkeypatch.setattr(importlib, "import_module", lambda name: {"mindrlhf.commands.probe": Module}[name])

    return put


def test_a_refusal_holds_no_control_characters(command, capsys):
    def run(args):
        raise UserError(f"--flag {args.flag}: unknown.")

    command(run)
    assert cli.main(["probe", "--flag", "\x1b[31m\n\ud800"]) == 2
    assert capsys.readouterr().err == "mindrlhf probe: --flag \\u001b[31m\\u000a\\ud800: unknown.\n"
    for argv in (["--no-such-\x1b[31m"], ["--flag", "1", "-\x1b[31m"]):
        with suppress(SystemExit):
            cli.main(["probe", *argv])
        assert "\x1b" not in capsys.readouterr().err


def test_a_file_that_cannot_be_opened_is_named(command, capsys, tmp_path):
    command(lambda args: (tmp_path / "none" / "file").read_bytes())
    assert cli.main(["probe"]) == 2
    expected = f"mindrlhf probe: {tmp_path}/none/file: cannot be read or written (No such file or directory).\n"
    assert capsys.readouterr().err == expected


def test_half_a_surrogate_pair_can_be_printed(tmp_path):
    program = "import sys; from mindrlhf import cli; cli.main(['--version'])"
    program = program.replace("cli.main(['--version'])", "cli.main(['show', '/nowhere']); print('a\\ud800b')")
    environment = os.environ | {"PYTHONPATH": str(jobs.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "a\\ud800b\n", done.stderr


def test_done(command):
    seen = []
    command(seen.append)
    assert cli.main(["probe", "--flag", "x"]) == 0
    assert seen[0].flag == "x"


def test_settings_anywhere_among_the_flags(command):
    seen = []
    command(seen.append)
    assert cli.main(["probe", "a=1", "--flag", "x", "b=2", "c=3"]) == 0
    assert (seen[0].flag, seen[0].settings) == ("x", ["a=1", "b=2", "c=3"])


def test_a_mistake_is_one_line_and_exit_code_2(command, capsys):
    def run(args):
        raise UserError("file.yaml:3: key x is 1; set it to 2.")

    command(run)
    assert cli.main(["probe"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "mindrlhf probe: file.yaml:3: key x is 1; set it to 2.\n"
    assert captured.out == ""


def test_an_error_of_the_suite_shows_itself(command):
    def run(args):
        raise RuntimeError("ours")

    command(run)
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["probe"])


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_of_every_command(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: mindrlhf {name} ")
    assert cli.COMMANDS[name][1].split()[0].lower() in shown.lower()


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in shown
        assert summary.split()[0] in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"mindrlhf {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--verbose"], ["eval", "--limit", "8x"], ["generate", "What is 2 + 3?"]])
def test_a_command_line_that_cannot_be_read_has_one_sentence(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mindrlhf")
    assert line.endswith("--help` shows what there is.")


@pytest.mark.parametrize(("name", "near"), [("trian", "train"), ("reprot", "report"), ("zzz", None)])
def test_an_unknown_command_is_answered_with_the_nearest(name, near, capsys):
    assert cli.main([name, "--x"]) == 2
    right = f"did you mean {near}?" if near else "there are data, synthesize, "
    assert capsys.readouterr().err.startswith(f"mindrlhf: unknown command {name}; {right}")


def test_a_failing_process(tmp_path):
    """As a process: exit code, one line, no traceback."""
    argv = ["train", "--sft_path_infer", "none.yaml", "--sft_path_train", "none.yaml", "--mind_dataset_dir", "none"]
    result = jobs.start(argv)
    assert result.returncode == 2
    assert result.stderr == "mindrlhf train: none.yaml: there is no such file; give the path of a YAML file.\n"
    assert result.stdout == ""
    assert jobs.start(argv[1:], script=jobs.ONE_STAGE).stderr == result.stderr


def test_mistakes_in_settings_are_found_without_mindspore(tmp_path):
    """They are told within a second: nothing slow is imported before all settings are known to be right."""
    jobs.write_yamls(tmp_path, 300)
    flags = ["--sft_path_infer", f"{tmp_path}/infer.yaml", "--sft_path_train", f"{tmp_path}/train.yaml"]
    argv = ["train", *flags, "--mind_dataset_dir", "none", "rollout.num_generations=1"]
    program = (
        "import sys; from mindrlhf import cli; code = cli.main(sys.argv[1:]); "
        "sys.exit(99 if 'mindspore' in sys.modules else code)"
    )
    environment = os.environ | {"PYTHONPATH": str(jobs.ROOT)}
    command = [sys.executable, "-c", program, *argv]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "rollout.num_generations is 1" in result.stderr
    assert result.returncode == 2
