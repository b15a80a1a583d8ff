"""Job files of `mindrlhf launch`: their syntax, and the Slurm script run with stand-ins for Slurm's programs."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindrlhf import cli
from mindrlhf.backend.process.msrun import MODULE

TRAIN = ["train", "--save_ckpt_dir", "out/a b/ckpt", "data.prompts_per_step=32"]
RANKS = ["-m", "mindrlhf", *TRAIN, "--resume_training", "auto"]

# Slurm's programs for two nodes on one: `srun` runs its command once for each node, `python` shows its arguments.
STAND_INS = {
    "scontrol": 'test "$*" = "show hostnames $SLURM_JOB_NODELIST" && printf "%s\\n" node7 node8',
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        code=0
        for rank in 0 1; do SLURM_PROCID=$rank "$@" || code=1; done
        exit $code""",
    "python": """
        printf "%q " "$@" >>"$CALLS"
        echo >>"$CALLS"
        (($(wc -l <"$CALLS") > FAILING))""",
}


def launched(capsys, *words: str) -> str:
    """What the command prints."""
    assert cli.main(["launch", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def slurm(tmp_path, monkeypatch, capsys):
    """Writes a script and runs it on two nodes, of which as many calls fail; returns its end and msrun's arguments."""
    folder = tmp_path / "a folder" / "bin"
    folder.mkdir(parents=True)
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)

    def run(*words: str, failing: int = 0):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(folder / "python"))
            patch.chdir(folder.parent)
            text = launched(capsys, "--with", "slurm", *words)
        script = folder.parent / "job.sh"
        script.write_text(text)
        calls = tmp_path / "calls"
        calls.write_text("")
        variables = {"SLURM_JOB_ID": "70001", "SLURM_JOB_NODELIST": "node[7-8]", "CALLS": str(calls)}
        ended = subprocess.run(
            ["bash", script],
            env=os.environ | variables | {"FAILING": str(failing)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
        )
        return ended, [shlex.split(line) for line in calls.read_text().splitlines()]

    return run


def test_each_node_of_a_slurm_job_starts_its_ranks(slurm):
    ended, calls = slurm("--workers", "16", "--per_node", "8", "--retries", "1", *TRAIN)
    assert (ended.returncode, ended.stderr) == (0, "")
    for rank, words in enumerate(calls):
        assert words == [
            *("-m", MODULE, "--worker_num=16", "--local_worker_num=8", "--join=True"),
            *("--master_addr=node7", "--master_port=30001", f"--node_rank={rank}"),
            *(f"--log_dir=out/launch/70001/start_1/node_{rank}", "python", *RANKS),
        ]
    assert len(calls) == 2


def test_a_slurm_job_that_fails_is_started_again_and_not_for_ever(slurm):
    ended, calls = slurm("--workers", "2", "--per_node", "1", "--retries", "2", *TRAIN, failing=1)
    assert ended.returncode == 0
    assert "start 1 of 3 ended with code 1; logs are in out/launch/70001/start_1" in ended.stderr
    assert [("/start_1/" in words[8], "/start_2/" in words[8]) for words in calls] == [(True, False)] * 2 + [
        (False, True)
    ] * 2
    ended, calls = slurm("--workers", "2", "--per_node", "1", *TRAIN, failing=9)
    assert ended.returncode == 1
    assert len(calls) == 2
    assert "--resume_training" not in calls[0], "it is not started again"


def test_a_slurm_file_has_the_options_of_sbatch(tmp_path, capsys):
    file = tmp_path / "job.sh"
    words = ("--workers", "4", "--name", "seven", "--sbatch", "gres=npu:4", "--sbatch=time=24:00:00")
    out = launched(capsys, "--with=slurm", *words, "--output", str(file), *TRAIN)
    assert out == f"{file}: 4 ranks on 1 nodes; start them with `sbatch {file}`\n"
    lines = file.read_text().splitlines()
    directives = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    given = ["gres=npu:4", "time=24:00:00"]
    assert directives == ["job-name=seven", "nodes=1", "ntasks-per-node=1", "exclusive", *given]
    assert lines[0].startswith("#!")
    subprocess.run(["bash", "-n", file], check=True)


def test_a_kubernetes_file_has_a_pod_for_each_node(capsys):
    words = ("--workers", "16", "--per_node", "8", "--retries", "3", "--name", "seven", "--image", "hub/mindrlhf:1")
    text = launched(
        capsys,
        *("--with", "k8s", *words, "--volume", "data:/data", "--resource", "huawei.com/Ascend910=8", "mindrlhf"),
        *TRAIN,
    )
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    assert service["metadata"]["name"] == job["metadata"]["name"] == "seven"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": "seven"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] >= 2 * 3
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", "seven")
    (container,) = pod["containers"]
    assert container["image"] == "hub/mindrlhf:1"
    assert container["resources"] == {"limits": {"huawei.com/Ascend910": "8"}}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["volume-0"] == {"persistentVolumeClaim": {"claimName": "data"}}
    assert set(mounts.values()) == {"/dev/shm", "/data"}


def test_the_pods_of_a_kubernetes_job_know_the_first_one(tmp_path, capsys):
    text = launched(capsys, *("--with", "k8s", "--workers", "4", "--per_node", "2", "--image", "x"), *TRAIN)
    _, job = yaml.safe_load_all(text)
    shell, option, script = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (shell, option, job["spec"]["backoffLimit"]) == ("bash", "-c", 0)
    for name, body in {"getent": 'test "$*" = "hosts mindrlhf-0.mindrlhf"', "python": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    shown = subprocess.run([shell, option, script], env=environment, capture_output=True, text=True, timeout=30)
    words = shown.stdout.splitlines()
    assert words[:2] == ["-m", MODULE]
    assert {"--worker_num=4", "--master_addr=mindrlhf-0.mindrlhf", "--node_rank=1"} <= set(words)
    assert words[words.index("python") + 1 :] == ["-m", "mindrlhf", *TRAIN]


def test_a_command_of_the_ranks_is_left_as_it_is(capsys, tmp_path):
    script = tmp_path / "my script.py"
    script.write_text("")
    for words, expected in (
        (["--", "python", str(script), "--workers", "9"], [str(script), "--workers", "9"]),
        (["-m", "package.main", "x"], ["-m", "package.main", "x"]),
        (["sft", "resume_mode=disable"], ["-m", "mindrlhf", "sft", "resume_mode=disable"]),
    ):
        flags = ["--with", "k8s", "--workers", "1", "--retries", "1", "--image", "x"]
        assert shlex.join(expected) in launched(capsys, *flags, *words)


MISTAKES = {
    "": "the command of the ranks is missing; give `train` or `sft`",
    "eval --model x": "begins with 'eval'; give train or sft with its flags, or a script",
    "nothing.py": "nothing.py: there is no such script",
    "--with slurm --image x train": "--image is for --with k8s; take it out",
    "--with ray --node_rank 0 train": "--node_rank is for --with msrun; take it out",
    "--per_node 3 train": "--workers 2 is not a multiple of --per_node 3",
    "--per_node 1 train": "--per_node 1 makes 2 nodes; give --node_rank and --master_addr on each",
    "--node_rank 1 train": "--node_rank 1: there are 1 nodes; give 0 to 0",
    "--retries -1 train": "--retries 0 or more",
    "--retires 1 train": "unknown flag --retires; did you mean --retries?",
    "--with slurm --sbatch nodes=3 train": "--sbatch nodes=3: give --workers, --per_node and --name",
    "--with slurm --sbatch exclusive train": "--sbatch exclusive: give --workers",
    "--with slurm --sbatch long train": "--sbatch long: give KEY=VALUE",
    "--with k8s train": "--image is missing; give the name",
    "--with k8s --image x --volume data train": "--volume data: give CLAIM:/FOLDER",
    "--with k8s --image x --resource npu train": "--resource npu: give NAME=COUNT",
    "--with ray --resource NPU=a train": "--resource NPU=a: give NAME=COUNT, such as NPU=1",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence(capsys, words):
    assert cli.main(["launch", "--workers", "2", *words.split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert len(error.splitlines()) == 1


def test_without_ray_the_package_to_install_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["launch", "--with", "ray", "--workers", "2", "train"]) == 2
    assert "Ray is not installed; run `pip install 'mindrlhf[ray]'`" in capsys.readouterr().err


def test_msrun_takes_the_place_of_the_launcher(monkeypatch, capsys, tmp_path):
    seen: list[list[str]] = []

    def execve(program: str, words: list[str], environment: dict[str, str]) -> None:
        assert program == words[0] == sys.executable
        assert environment["PATH"].startswith(str(Path(sys.executable).parent))
        seen.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    flags = ("--per_node", "2", "--node_rank", "1", "--master_addr", "10.0.0.7", "--master_port", "9190")
    with pytest.raises(SystemExit):
        cli.main(["launch", "--workers", "4", *flags, "--log_dir", str(tmp_path), *TRAIN])
    (words,) = seen
    assert words[1:3] == ["-m", MODULE]
    numbers = ("--worker_num=4", "--local_worker_num=2", "--join=True", "--node_rank=1", "--master_port=9190")
    places = ("--master_addr=10.0.0.7", f"--log_dir={tmp_path}/start_1/node_1")
    place = words.index("python")
    assert sorted(words[3:place]) == sorted((*numbers, *places))
    assert words[place + 1 :] == ["-m", "mindrlhf", *TRAIN]
