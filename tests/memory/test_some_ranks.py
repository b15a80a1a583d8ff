"""The plan of models that are on some of the job's ranks: split placement, and models that score."""

from dataclasses import replace

import numpy as np
import pytest
from planned_job import MODEL, work

from mindrlhf.commands.memory_plan import plan_figures, plan_text, rank_table
from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings
from mindrlhf.memory.estimate import rank_plans
from mindrlhf.memory.step_time import length_of_step, time_line
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import RoleModel
from mindrlhf.models.parameters import parameter_count, parameter_table
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.plan import plan as reshard_plan
from mindrlhf.units import FLOAT32, GIB


def test_models_that_score_are_whole_on_the_first_rank_of_each_replica():
    """Each has its weights there, and a judge that writes a cache for 16 verdicts."""
    classifier = MODEL.as_critic().model_copy(update={"num_layers": 2})
    judge = JudgeSettings(path="judge", verdict="generated", max_length=100, max_new_tokens=20)
    scoring = {
        "reward_model.0": RoleModel("reward", classifier, settings=RewardModelSettings(path="reward")),
        "reward_model.1": RoleModel("judge", MODEL, settings=judge),
    }
    plain = work({"model_parallel": 2, "data_parallel": 2}, {"model_parallel": 2, "data_parallel": 2})
    job = Work.of(plain.config, {**plain.roles, **scoring}, plain.yamls, plain.lengths)
    cache = 2 * 4 * 16 * 4 * 128 * 4 * FLOAT32
    sizes = [parameter_count(classifier) * FLOAT32, parameter_count(MODEL) * FLOAT32 + cache]
    for alone, plan in zip(rank_plans(plain), rank_plans(job), strict=True):
        own = {"reward_model": sum(sizes)} if plan.rank in (0, 2) else {}
        assert plan.roles == {**alone.roles, **own}
        assert ("reward_model" in plan.activations) == (plan.rank in (0, 2))
    assert "reward_model" in job.phases
    assert "reward_model" not in plain.phases


@pytest.mark.parametrize("generating", [(2, 3), (1, 2), (0, 1)])
def test_meshes_on_some_of_the_ranks(monkeypatch, generating):
    """Training on the ranks 0 and 1, generation on others or on some of them, counted element by element."""
    meshes = {"train": (0, 1), "infer": generating}
    made = Mesh.of_yaml
    monkeypatch.setattr(Mesh, "of_yaml", lambda yaml: replace(made(yaml), ranks=meshes[yaml.path]))
    job = work({"model_parallel": 2}, {"data_parallel": 2})
    plans = {plan.rank: plan.roles for plan in rank_plans(job)}
    assert plans.keys() == {0, 1, *generating}
    halves = {rank: {spec.name: np.zeros(spec.shape, bool) for spec in parameter_table(MODEL)} for rank in (0, 1)}
    for rank, held in halves.items():
        for spec in parameter_table(MODEL):
            for cut in spec.cuts:  # the tensor-parallel axis, on two ranks
                np.split(held[spec.name], 2, cut.dim)[rank][...] = True
            if not spec.cuts or spec.kind == "embedding":
                held[spec.name][...] = True
    cache = 2 * 4 * 32 * 4 * 64 * 4 * FLOAT32
    for rank, found in plans.items():
        whole = {spec.name: spec.size * FLOAT32 for spec in parameter_table(MODEL)}
        own = {name: FLOAT32 * np.count_nonzero(held) for name, held in halves.get(rank, {}).items()}
        alike = sum(size for name, size in own.items() if rank in generating and size == whole[name])
        expected = {"shared_weights": alike, "train_weights": sum(own.values()) - alike}
        expected |= {"reference": sum(own.values()), "gradients": sum(own.values()), "moments": 2 * sum(own.values())}
        if rank in generating:
            expected |= {"infer_weights": sum(whole.values()) - alike, "kv_cache": cache}
        assert found == {name: size for name, size in expected.items() if size}, rank
    figures = plan_figures(job, reshard_plan(*job.layouts), limit=GIB)
    lacking = {rank: roles.get("infer_weights", 0) for rank, roles in plans.items() if rank in generating}
    assert figures["reshard"]["least"] == figures["reshard"]["receives"]
    assert all(lacking[rank] >= received > 0 for rank, received in figures["reshard"]["receives"].items())
    ranks = [line.split()[0] for line in rank_table(job, figures).splitlines()]
    assert ranks[1:] == {(2, 3): ["0-1", "2-3"], (1, 2): ["0", "1", "2"], (0, 1): ["0-1"]}[generating]


def test_both_sides_of_a_split_job_are_shown():
    job = work({"model_parallel": 2}, {"data_parallel": 2}, ("trainer.staleness=1",), first_rank=2)
    assert job.ranks == [0, 1, 2, 3]
    figures = plan_figures(job, reshard_plan(*job.layouts), limit=GIB) | {"time": "-", "division": None}
    text = plan_text(job, figures, "given", "limit")
    assert "trains dp 1 x tp 2 x pp 1, generates dp 2 x tp 1 x pp 1 on ranks of their own" in text
    tables = [part for part in text.split("\n\n") if part.startswith("rank ")]
    training, generating = (set(table.splitlines()[0].split()) for table in tables)
    assert ({"train", "ref"} <= training, "gen" in generating) == (True, True)
    lines = [{line.split("  ")[0] for line in table.splitlines()} for table in tables]
    assert "moments" in lines[0] - lines[1]
    assert {"kv_cache", "infer_weights"} <= lines[1] - lines[0]
    assert "\ndivisions        not compared, for a step has no forecast\n" in text


@pytest.mark.parametrize(("staleness", "length"), [(0, 10.0), (1, 7.0)])
def test_sides_overlap_with_a_staleness(staleness, length):
    seconds = {"gen": 3.0, "ref": 1.0, "update_actor": 6.0}
    job = work({}, {}, (f"trainer.staleness={staleness}",), first_rank=1)
    assert length_of_step(job, seconds) == length
    waits = {
        0: "train wait 30% of it, and ranks that generate 70%",
        1: "train wait 0% of it, and ranks that generate 57%",
    }
    assert waits[staleness] in time_line(job, 5, seconds)
    assert length_of_step(job, {**seconds, "reshard": 2.0}) == length + 2, "both bring the weights over"
    colocated = work({}, {}, (f"trainer.staleness={staleness}",))
    assert length_of_step(colocated, seconds) == 10.0
    assert "wait" not in time_line(colocated, 5, seconds)


PPO = ("algorithm.advantage=gae", "algorithm.beta=0.1", "algorithm.updates_per_iteration=2")


@pytest.mark.parametrize(("staleness", "length"), [(0, 3 + 3 + 6), (1, 3 + 6)])
def test_ranks_score_while_the_policy_scores_and_train_while_it_trains(staleness, length):
    seconds = {"gen": 3.0, "ref": 3.0, "old_log_prob": 2.0, "update_critic": 4.0, "update_actor": 6.0}
    job = work({}, {}, (*PPO, f"trainer.staleness={staleness}"), first_rank=1, score={})
    assert length_of_step(job, seconds) == length
    assert f"ranks that score {1 - 7 / length:.0%}" in time_line(job, 5, seconds)


def test_reference_and_critic_are_on_the_ranks_that_score():
    job = work({}, {}, PPO, first_rank=1, score={"model_parallel": 2})
    trains, generates, *scores = ({*plan.roles} for plan in rank_plans(job))
    assert [plan.rank for plan in rank_plans(job)] == [0, 1, 2, 3]
    assert trains == {"train_weights", "gradients", "moments"}
    assert generates == {"infer_weights", "kv_cache"}
    assert scores == [{"reference", "critic", "critic_gradients", "critic_moments"}] * 2
    alone = rank_plans(work({}, {}, PPO, first_rank=1))[0].roles
    found = [plan.roles for plan in rank_plans(job)[2:]]
    assert sum(roles["reference"] for roles in found) < 1.1 * alone["reference"], "norms are on both"
    figures = plan_figures(job, reshard_plan(*job.layouts), limit=GIB) | {"time": "-", "division": None}
    text = plan_text(job, figures, "given", "limit")
    assert "generates dp 1 x tp 1 x pp 1, scores dp 1 x tp 2 x pp 1 on ranks of their own" in text
    assert "of answers to the others" in text
    assert "of scores between these" in text
