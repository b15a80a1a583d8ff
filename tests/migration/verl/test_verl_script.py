"""verl's commands from shell scripts: what bash would hand over, without a shell."""

import shutil
import subprocess

import pytest

from mindrlhf.errors import UserError
from mindrlhf.migration.verl.command import read_command
from mindrlhf.migration.verl.script import script_command
from mindrlhf.migration.verl.translation import translate

PLAIN = r"""
set -x
# GRPO on one node; it's verl's form
export N=5
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
lr=1e-6 ; name='two words'
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.truncation='error' \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=${lr} \
    actor_rollout_ref.rollout.n=$N \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name="$name" $@ 2>&1 | tee run.log
"""
ARRAYS = r"""
#!/usr/bin/env bash
set -xeuo pipefail
BASE=${BASE:-$HOME/verl}
long=$((1024 * 4)) short=512
total=$(( (long + short) * 2 ))
if [ "${DEVICE:-gpu}" = npu ]; then
    short=1
fi
case "$DEVICE" in
    npu) short=2 ;;
esac
DATA=(
    data.train_files="['$BASE/a.parquet', '$BASE/b.parquet']"   # don't stop here
    data.max_response_length=${long}
)
TRAIN=(algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${total})
TRAIN+=(data.max_prompt_length=${short})
EXTRA=()
LAUNCH=(python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${TRAIN[@]}" "${EXTRA[@]}" "$@"
"""
DAPO = r"""
offload=True
RAY_ADDRESS=http://localhost:8265
ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo \
  algorithm.adv_estimator=grpo actor_rollout_ref.ref.fsdp_config.param_offload=${offload} \
  trainer.project_name=${UNSET-dapo} trainer.nnodes=${NNODES:-2} && echo done
"""


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("MODEL", "BASE", "DEVICE", "UNSET", "NNODES"):
        monkeypatch.delenv(name, raising=False)


def test_a_script_of_variables():
    given = read_command(PLAIN.replace("\\\\", "\\")).given
    assert given["data.train_files"] == "/home/me/data/gsm8k/train.parquet"
    assert (given["model.path"], given["actor.optim.lr"], given["rollout.n"]) == ("Qwen/Qwen2-7B-Instruct", 1e-6, 5)
    assert given["trainer.logger"] == ["console", "wandb"]
    assert given["trainer.experiment_name"] == "two words"


@pytest.mark.parametrize("script", [PLAIN, ARRAYS, DAPO])
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
def test_words_are_those_of_bash(script, tmp_path):
    """bash runs the script with a python3 and a ray that print their arguments."""
    text = script.replace("\\\\", "\\")
    for name in ("python3", "ray"):
        (tmp_path / name).write_text("#!/bin/sh\nfor word; do printf '%s\\n' \"$word\"; done\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tee").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "tee").chmod(0o755)
    (tmp_path / "run.sh").write_text(text)
    ran = subprocess.run(
        ["bash", tmp_path / "run.sh"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "DEVICE": "gpu"},
    )
    theirs = [word for word in ran.stdout.splitlines() if "=" in word]
    ours = [word for word in script_command(text, "run.sh").words if "=" in word and not word.startswith("2>")]
    assert ours == [word for word in theirs if not word.startswith("+")]
    assert len(ours) >= 4


def test_a_script_by_its_path_with_settings_over_it(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(ARRAYS)
    translation = translate(f"{path} trainer.total_epochs=1 data.max_prompt_length=64")
    assert translation.command("trainer.total_epochs") == 1
    assert translation.command("data.max_prompt_length") == 64
    assert translation.flags["mind_dataset_dir"] == "/home/me/verl/a.parquet,/home/me/verl/b.parquet"
    assert "train.max_tokens_per_micro_batch=9216" not in translation.overrides, "verl's batches are not dynamic here"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello", "has 0 commands that start verl's main_ppo"),
        ("python3 -m verl.trainer.main_ppo a.b=1\npython3 -m verl.trainer.main_ppo a.b=2", "has 2 commands"),
        ("python3 -m verl.trainer.main_ppo a.b='1", "cannot be read as a shell script"),
        ("NAME=$(date +%s)\npython3 -m verl.trainer.main_ppo trainer.experiment_name=$NAME", "append trainer.exp"),
        ("python3 -m verl.trainer.main_ppo data.train_files=${DIR}/x.parquet", "whose value is not known"),
    ],
)
def test_what_a_script_does_not_say_is_refused(tmp_path, text, words):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(UserError, match=words):
        translate(str(tmp_path / "run.sh"))
    if "NAME" in text or "DIR" in text:
        key = "trainer.experiment_name" if "NAME" in text else "data.train_files"
        assert translate(f"{tmp_path / 'run.sh'} {key}=x").command(key) == "x"


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no such file; give the path of a shell script"):
        translate(str(tmp_path / "absent.sh"))


@pytest.mark.parametrize(
    ("branch", "names"),
    [
        ("if [ -n x ]; then\n  LR=2\nelse\n  LR=3\nfi", ["LR"]),
        ("if [ -n x ]; then LR=2; LOG=y; fi", ["LR"]),
        ('case "$1" in a) N=2 ;; *) LR=3 ;; esac', ["N", "LR"]),
        ("for LR in 1 2; do N=$LR; done", ["LR", "N"]),
        ("[[ -n x ]] && N=2", ["N"]),
        ("command -v x ||\n  N=2\ntrue && true", ["N"]),
        ("cd /tmp && N=2", []),
        ("export N=2 && LR=3", []),
        ("if [ -n x ]; then OTHER=3; fi", []),
        ("if [ -n x ]; then export SHORT=3; fi", ["SHORT"]),
    ],
)
def test_what_branches_set_is_named(tmp_path, branch, names):
    """Those of the command alone: others change nothing here."""
    path = tmp_path / "run.sh"
    more = (
        "ALL=(algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=$LR data.max_prompt_length=$((SHORT * 2)))"
    )
    command = 'python3 -m verl.trainer.main_ppo "${ALL[@]}" actor_rollout_ref.rollout.n=${N}'
    path.write_text(f"N=5 LR=1 SHORT=64 LOG=x OTHER=$LR\n{branch}\n{more}\n{command} | tee out.log\n")
    translation = translate(str(path))
    assert list(translation.command.unfollowed) == names
    said = f"branches are not followed; {', '.join(names)} may have other values"
    assert (said in str(translation)) == bool(names)
    assert ("branches" in str(translation)) == bool(names)
