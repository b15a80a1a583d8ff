"""Division of ranks between training and generation: from flags, settings and YAMLs, refused by name."""

import json

import pytest
from planned_job import MODEL

from mindrlhf.configs import job_yamls
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_yaml import ModelYaml, ParallelSettings
from mindrlhf.configs.placement import Division, check_workers, planned_workers
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.model_roles import ROLES
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.trainer import check
from mindrlhf.trainer.check import read_settings


def yaml(path: str, first_rank: int = 0, **parallel: int) -> ModelYaml:
    return ModelYaml(path=path, first_rank=first_rank, parallel=ParallelSettings(**parallel))


def settings(*overrides: str, **flags):
    given = TrainFlags(load_sft_checkpoint_train="model", device_target="CPU", overrides=overrides, **flags)
    return read_settings(given)[1:]


def read(*overrides: str, **flags):
    config, yamls = settings(*overrides, **flags)
    train, infer = yamls.values()
    return config.trainer.placement, train.ranks, infer.ranks, Mesh.of_yaml(infer)


def test_without_flags_both_are_on_all_ranks(monkeypatch):
    monkeypatch.setattr(job_yamls, "started_workers", lambda: 4)
    assert read() == ("colocated", range(4), range(4), Mesh(dp=4))


def test_flags_divide_the_ranks(monkeypatch):
    monkeypatch.setattr(job_yamls, "started_workers", lambda: 6)
    placement, train, infer, mesh = read(trainer_ranks=2, generator_ranks=4, infer_tensor_parallel=2)
    assert (placement, train, infer) == ("split", range(2), range(2, 6))
    assert mesh == Mesh(dp=2, tp=2, ranks=(2, 3, 4, 5))
    assert [mesh.group(4, axis) for axis in ("dp", "tp")] == [(2, 4), (4, 5)]


def test_a_setting_splits_what_yamls_divide(tmp_path):
    files = {}
    for name, parallel in (("train", {"data_parallel": 2}), ("infer", {"data_parallel": 3})):
        files[f"sft_path_{name}"] = str(tmp_path / f"{name}.yaml")
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"parallel_config": parallel}))
    assert read("trainer.placement=split", **files)[:3] == ("split", range(2), range(2, 5))
    assert read("trainer.placement=split", trainer_ranks=2, generator_ranks=3, **files)[1:3] == (range(2), range(2, 5))


def test_one_yaml_serves_both_sides(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(json.dumps({"parallel_config": {"data_parallel": 1, "model_parallel": 2}}))
    for role in ("train", "infer"):
        flags = {f"sft_path_{role}": str(file), "trainer_ranks": 2, "generator_ranks": 4}
        if role == "infer":
            flags |= {"trainer_ranks": 4, "generator_ranks": 2}
        _, train, infer, mesh = read(**flags)
        assert (len(train), len(infer)) == (flags["trainer_ranks"], flags["generator_ranks"])
        assert (mesh.tp, mesh.dp) == (2, flags["generator_ranks"] // 2)


@pytest.mark.parametrize(
    ("flags", "overrides", "said"),
    [
        ({"trainer_ranks": 2}, (), "--trainer_ranks is 2, and --generator_ranks is not given; give both, or neither."),
        ({"generator_ranks": 2}, (), "--generator_ranks is 2, and --trainer_ranks is not given"),
        ({"trainer_ranks": 0, "generator_ranks": 1}, (), "--trainer_ranks is 0; give 1 or more."),
        (
            {"scorer_ranks": 1},
            (),
            "--scorer_ranks is 1, and --trainer_ranks and --generator_ranks are not given; give all",
        ),
        ({"trainer_ranks": 1, "generator_ranks": 1, "scorer_ranks": 0}, (), "--scorer_ranks is 0; give 1 or more."),
        (
            {"trainer_ranks": 1, "generator_ranks": 1},
            ("score_yaml.parallel_config.model_parallel=2",),
            "score_yaml.parallel_config.model_parallel=2 is given, and no rank only scores; give --scorer_ranks",
        ),
        (
            {"trainer_ranks": 1, "generator_ranks": 1, "scorer_ranks": 1},
            ("score_yaml.model.model_config.compute_dtype=bfloat16",),
            "score_yaml.model.model_config.compute_dtype is given, and only the layout of ranks that score is their "
            "own; set train_yaml.model.model_config.compute_dtype, which they have too",
        ),
        (
            {"trainer_ranks": 1, "generator_ranks": 1, "scorer_ranks": 3},
            ("score_yaml.parallel_config.model_parallel=2",),
            "data_parallel 1 x model_parallel 2 x pipeline_stage 1 = 2, and --scorer_ranks is 3; set parallel_config "
            "to a product of 3, or --scorer_ranks to 2.",
        ),
        (
            {"trainer_ranks": 1, "generator_ranks": 1},
            ("trainer.placement=colocated",),
            "trainer.placement is colocated, and --trainer_ranks and --generator_ranks divide the ranks; set",
        ),
        (
            {"trainer_ranks": 1, "generator_ranks": 3},
            ("infer_yaml.parallel_config.data_parallel=2",),
            "data_parallel 2 x model_parallel 1 x pipeline_stage 1 = 2, and --generator_ranks is 3; set "
            "parallel_config to a product of 3, or --generator_ranks to 2.",
        ),
    ],
)
def test_divisions_that_contradict_are_refused(flags, overrides, said):
    with pytest.raises(UserError) as caught:
        read(*overrides, **flags)
    assert said in str(caught.value)


def test_ranks_of_both_sides_are_all_workers():
    train, infer = yaml("train.yaml", data_parallel=2), yaml("infer.yaml", 2, data_parallel=3)
    check_workers(train, infer, "split", 5)
    with pytest.raises(UserError, match=r"workers started are 4; start 5 .*worker_num=5.*, or divide 4 by --trainer"):
        check_workers(train, infer, "split", 4)
    assert planned_workers(train, infer) == 5
    with pytest.raises(UserError, match=r"infer.yaml: parallel_config is of 3 workers, and that of train.yaml of 2"):
        planned_workers(train, yaml("infer.yaml", data_parallel=3))


def test_ranks_that_score_are_behind_the_others():
    sides = {"trainer_ranks": 2, "generator_ranks": 1, "scorer_ranks": 4, "infer_tensor_parallel": 1}
    _, yamls = settings("train_yaml.parallel_config.model_parallel=2", **sides)
    assert [yaml.ranks for yaml in yamls.values()] == [range(2), range(2, 3), range(3, 7)]
    assert Mesh.of_yaml(yamls["score"]) == Mesh(dp=2, tp=2, ranks=(3, 4, 5, 6))
    assert planned_workers(yamls["train"], yamls["infer"], 4) == 7


def test_ranks_that_generate_score_in_their_own_layout():
    overrides = ("trainer.scoring_ranks=infer", "train_yaml.parallel_config.pipeline_stage=2")
    _, yamls = settings(*overrides, trainer_ranks=2, generator_ranks=3)
    assert [yaml.ranks for yaml in yamls.values()] == [range(2), range(2, 5), range(2, 5)]
    assert yamls["beside"].parallel == yamls["infer"].parallel
    assert yamls["beside"].model == yamls["train"].model
    assert [ROLES[name].layout_in(yamls) for name in ("reference", "teacher", "critic")] == ["beside"] * 2 + ["train"]


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        ({}, "trainer.scoring_ranks is infer, and all ranks train and generate (trainer.placement colocated); set"),
        (
            {"trainer_ranks": 1, "generator_ranks": 1, "scorer_ranks": 1},
            "trainer.scoring_ranks is infer, and --scorer_ranks is 1; leave one of them out.",
        ),
    ],
)
def test_scoring_has_one_place(sides, said):
    with pytest.raises(UserError) as caught:
        settings("trainer.scoring_ranks=infer", **sides)
    assert said in str(caught.value)


SCORING = {"score": "score_yaml of score.yaml", "beside": "infer.yaml"}  # layout -> its YAML
FOLLOWS = ("algorithm.beta=0.1", "algorithm.reference_sync_steps=2")
EIGHT = ("algorithm.beta=0.1", "data.prompts_per_step=8")


@pytest.mark.parametrize(
    ("layout", "overrides", "said"),
    [
        ("score", ("algorithm.beta=0",), "--scorer_ranks is 3, and the run has no reference, teacher or critic"),
        (
            "score",
            FOLLOWS,
            "algorithm.reference_sync_steps is 2, and --scorer_ranks is 3: the policy is on other ranks; leave it out,",
        ),
        (
            "score",
            EIGHT,
            "data.prompts_per_step is 8, which the data_parallel 3 of score_yaml of score.yaml does not divide; set",
        ),
        ("beside", ("algorithm.beta=0",), "trainer.scoring_ranks is infer, and the run has no reference or teacher"),
        (
            "beside",
            FOLLOWS,
            "algorithm.reference_sync_steps is 2, and trainer.scoring_ranks is infer: the policy is on other ranks; s",
        ),
        (
            "beside",
            EIGHT,
            "data.prompts_per_step is 8, which the data_parallel 3 of infer.yaml does not divide; set",
        ),
    ],
)
def test_what_ranks_without_the_policy_cannot_score_is_refused(layout, overrides, said):
    scoring = yaml(SCORING[layout], first_rank=2, data_parallel=3)
    with pytest.raises(UserError) as caught:
        check.check_scorers(load_grpo_config(None, overrides), {layout: scoring}, MODEL)
    assert said in str(caught.value)


def test_a_replay_is_not_split(tmp_path):
    flags = TrainFlags(load_sft_checkpoint_train="model", replay=tmp_path, overrides=("trainer.placement=split",))
    with pytest.raises(UserError, match=r"--replay generates nothing, and trainer.placement is split; set it to"):
        check.check(flags)


def test_no_flags_are_no_division():
    assert Division.of(TrainFlags()) == (None, None, None)
    assert Division.of(TrainFlags()).defaults() == {}
