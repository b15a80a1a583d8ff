"""The plan before a run: what it counts by role and phase is what runs count then, and shards add up to the whole."""

import json
import random
from functools import partial
from math import prod

import jobs
import pytest
from planned_job import MODEL, SMALL, work
from workers import run_msrun

from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.native import library
from mindrlhf.cli import main
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.memory import activations, residency
from mindrlhf.memory.activations import Stage, score_bytes, update_bytes, update_tables
from mindrlhf.memory.estimate import rank_plan, rank_plans
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.remedies import RECOMPUTE, largest_peak, remedies, with_settings
from mindrlhf.memory.step_time import Rates, step_seconds
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import RoleModel
from mindrlhf.models.chunks import chunk_count
from mindrlhf.models.parameters import parameter_count, parameter_table, trained_count
from mindrlhf.optimizer_state import STATES
from mindrlhf.phases import PHASES
from mindrlhf.training.batch import MicroBatch
from mindrlhf.units import FLOAT32, GIB


def role_sums(job: Work) -> dict[str, int]:
    """Role -> bytes over all ranks."""
    totals: dict[str, int] = {}
    for plan in rank_plans(job):
        for role, nbytes in plan.roles.items():
            totals[role] = totals.get(role, 0) + nbytes
    return totals


def test_one_process_holds_everything_once():
    sums = role_sums(work())
    whole = parameter_count(MODEL) * FLOAT32
    assert sums.pop("kv_cache") == 2 * 4 * 64 * 4 * 64 * 4 * 4  # layers, slots, heads, positions, head_dim, float32
    assert sums == {"shared_weights": whole, "reference": whole, "gradients": whole, "moments": 2 * whole}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 4, 1), (2, 4, 2)])
def test_the_shards_of_all_ranks_are_the_model_and_its_copies(dp, tp, pp, tied):
    model = MODEL.model_copy(update={"tie_word_embeddings": tied})
    train = {"data_parallel": dp, "model_parallel": tp, "pipeline_stage": pp, "vocab_emb_dp": False}
    infer = {"data_parallel": dp * pp, "model_parallel": tp, "vocab_emb_dp": False}
    sums = role_sums(work(train, infer, model=model))
    specs = parameter_table(model)
    cut = sum(spec.size for spec in specs if spec.cuts)
    whole = sum(spec.size for spec in specs if not spec.cuts)
    twice = model.vocab_size * model.hidden_size if tied and pp > 1 else 0  # the first stage and the last have it
    replica = (cut + twice + whole * tp) * FLOAT32
    assert sums["gradients"] == sums["reference"] == dp * replica
    assert sums["moments"] == 2 * sums["gradients"]
    trained = sums.get("shared_weights", 0) + sums.get("train_weights", 0)
    generating = sums.get("shared_weights", 0) + sums.get("infer_weights", 0)
    assert trained == dp * replica
    assert generating == dp * pp * (cut + whole * tp) * FLOAT32
    assert ("infer_weights" in sums) == (pp > 1)


def test_replicas_that_share_the_optimizer_have_its_moments_once():
    train = {"data_parallel": 4, "enable_parallel_optimizer": True}
    sums = role_sums(work(train, {"data_parallel": 4}))
    model = parameter_count(MODEL) * FLOAT32
    assert sums["gradients"] == 4 * model
    assert sums["moments"] == 2 * model
    # what each replica updates apart from its parameters, once more
    assert sums["train_weights"] == model


@pytest.mark.parametrize("dp", [2, 4])
def test_replicas_that_share_weights_have_everything_once_and_gather_a_block(dp):
    """The block: one layer, and one table for both ends, with its gradients."""
    layout = {"data_parallel": dp}
    plain = role_sums(work(layout, layout))
    sums = role_sums(work({**layout, "enable_parallel_optimizer": True, "optimizer_level": "level3"}, layout))
    model = parameter_count(MODEL) * FLOAT32
    layer = sum(spec.size for spec in parameter_table(MODEL) if spec.place == 0)
    block = (layer + MODEL.vocab_size * MODEL.hidden_size + MODEL.hidden_size) * FLOAT32
    assert sums["train_weights"] == sums["reference"] == model
    assert sums["moments"] == 2 * model
    assert sums["gathered_weights"] == dp * block
    assert sums["gradients"] == model + dp * block
    assert sums["infer_weights"] == plain["shared_weights"] == dp * model


@pytest.mark.parametrize(("weights", "numbers"), [("bfloat16", 2), ("int8", 68 / 64)])
def test_packed_weights_are_held_alongside(weights, numbers):
    """Of layers and the head, of which each rank has its part; a run packs them again after each update.

    Keys and values are bfloat16 numbers then.
    """
    if library().problem:
        pytest.skip("packed weights take the fused operators")
    model = MODEL.model_copy(update={"hidden_size": 256, "intermediate_size": 512, "head_dim": 32})
    matrices = sum(spec.size for spec in parameter_table(model) if spec.kind in ("matrix", "head"))
    settings, halves = [f"rollout.weights={weights}"], {"model_parallel": 2}
    job = work(settings=settings, model=model)
    assert role_sums(job)["infer_weights"] == matrices * numbers
    assert 2 * role_sums(job)["kv_cache"] == role_sums(work(model=model))["kv_cache"]
    assert "reshard" in job.phases
    assert role_sums(work(halves, halves, settings, model))["infer_weights"] == matrices * numbers


def test_recorded_routing_is_in_the_cache():
    experts = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = MODEL.model_copy(update=experts)
    off, on = (role_sums(work(settings=[f"rollout.routing_replay={one}"], model=model)) for one in ("off", "rollout"))
    assert on["kv_cache"] - off["kv_cache"] == 4 * 64 * 64 * 2 * 4  # layers, slots, positions, experts, int32
    del on["kv_cache"], off["kv_cache"]
    assert on == off


def test_spread_experts_are_held_once_by_their_ranks():
    """Their gradients and moments too; moments are shared with the replicas that have the same experts."""
    experts = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = MODEL.model_copy(update=experts)
    size = sum(spec.size for spec in parameter_table(model) if spec.pieces) * FLOAT32
    rest = parameter_count(model) * FLOAT32 - size
    layout = {"data_parallel": 4, "expert_parallel": 2}
    sums = role_sums(work(layout, {"data_parallel": 4}, model=model))
    assert sums["gradients"] == sums["reference"] == 2 * size + 4 * rest
    assert sums["moments"] == 2 * sums["gradients"]
    assert sums["infer_weights"] == 4 * size
    shared = role_sums(work({**layout, "enable_parallel_optimizer": True}, layout, model=model))
    assert shared["moments"] == 2 * (size + rest)
    assert shared["shared_weights"] == 2 * size + 4 * rest
    micro = MicroBatch((0,), 4, 4, 32, 32)
    alone, spread = (work(one, model=model).stage("policy", 0) for one in ({"data_parallel": 4}, layout))
    assert update_bytes(spread, micro) > update_bytes(alone, micro)
    assert score_bytes(spread, micro) > score_bytes(alone, micro)


def test_engines_prefill_the_prompts_of_their_own_samples():
    """Held-out problems have one response each, and so has the greedy baseline of an advantage."""
    job = work(settings=["algorithm.advantage=remax", "validation.num_generations=1"], lengths=Lengths(20, 20, 40))
    sampled, greedy = job.engines("gen")
    (held_out,) = job.engines("testing")
    generations = job.config.rollout.num_generations
    assert generations > 1
    assert sampled.prompts == sampled.slots // generations
    assert (greedy.prompts, held_out.prompts) == (greedy.slots, held_out.slots)


@pytest.mark.parametrize("kept", ["base", "start"])
def test_adapters_have_gradients_and_moments_alone_and_share_the_reference(kept):
    model = MODEL.model_copy(update={"adapter": Adapter(4, 8)})
    settings = ("algorithm.beta=0.1", "lora.rank=4", f"lora.reference={kept}")
    sums = role_sums(work(settings=settings, model=model))
    trained = trained_count(model) * FLOAT32
    del sums["kv_cache"]
    own = {"shared_weights": trained, "gradients": trained, "moments": 2 * trained}
    own |= {"reference": trained} if kept == "start" else {}
    assert sums == own | {"shared_base_weights": parameter_count(MODEL) * FLOAT32}
    plain, adapted = (rank_plan(work(settings=settings[:1], model=one), 0) for one in (MODEL, model))
    assert adapted.peak < plain.peak
    moved = work({"model_parallel": 2}, {"data_parallel": 2}, settings=settings, model=model)
    assert set(moved.layouts[0].placements) == {spec.name for spec in parameter_table(model) if spec.trains}


def test_dropout_takes_composed_layers_in_updates_alone_and_a_pass_for_old_log_probs():
    plain, drops = (
        work(settings=("lora.rank=4",), model=MODEL.model_copy(update={"adapter": Adapter(4, 8, dropout=dropout)}))
        for dropout in (0.0, 0.1)
    )
    assert set(drops.phases) - set(plain.phases) == {"old_log_prob"}
    before, after = (rank_plan(one, 0) for one in (plain, drops))
    assert after.activations["update_actor"] > 1.1 * before.activations["update_actor"]
    assert after.activations["gen"] == before.activations["gen"]
    assert after.roles == before.roles
    if plain.fused:
        assert after.process > before.process
    assert RECOMPUTE in " ".join(remedy.setting for remedy in remedies(drops))


def test_a_phase_holds_what_it_needs_and_only_with_swap():
    plain, swapped = (work(settings=(f"memory.swap={swap}", "algorithm.beta=0.1")) for swap in (False, True))
    for phase, held in rank_plan(plain, 0).phases.items():
        away = residency.moving_roles(False, CPU) - PHASES[phase].groups
        assert set(held) == set(rank_plan(plain, 0).roles) - away
    plan = rank_plan(swapped, 0)
    for phase, held in plan.phases.items():
        assert set(held) == PHASES[phase].groups & set(plan.roles)
    assert sum(plan.phases["ref"].values()) == plan.roles["reference"]
    assert plan.peak < rank_plan(plain, 0).peak


def test_moments_come_in_blocks(monkeypatch):
    import mindrlhf.memory.part_bytes as module

    monkeypatch.setattr(module, "BLOCK_NUMBERS", 4000)
    plan = rank_plan(work(settings=("memory.swap=True",)), 0)
    largest = max(4000, max(spec.size for spec in parameter_table(MODEL)))
    assert 0 < plan.phases["update_actor"]["moments"] <= 2 * largest * FLOAT32 < plan.roles["moments"]


@pytest.mark.parametrize("layout", [{}, {"data_parallel": 2, "model_parallel": 2, "enable_parallel_optimizer": True}])
def test_moments_of_fewer_bits(layout):
    """Of matrices: a byte for each number, and 4 for each block of a row."""
    same = {"data_parallel": 2, "model_parallel": 2} if layout else {}
    every = {state: role_sums(work(layout, same, (f"optimizer.state={state}",))) for state in STATES}
    gradients = every["float32"]["gradients"] // same.get("data_parallel", 1)
    assert every["float32"]["moments"] == 2 * gradients
    matrices = 2 * every["float32"]["moments"] - 2 * every["bfloat16"]["moments"]
    assert 0.9 * 2 * gradients < matrices < 2 * gradients
    scales = every["int8"]["moments"] - (every["float32"]["moments"] - 3 * matrices // 4)
    assert 2 * 4 * matrices / 8 / 128 < scales < matrices / 4  # rows here are far shorter than a block
    ppo = role_sums(work(settings=("algorithm.advantage=gae", "critic.optimizer.state=bfloat16")))
    assert ppo["critic_moments"] < 0.55 * 2 * ppo["critic_gradients"]
    assert ppo["moments"] == 2 * ppo["gradients"]


def test_the_critic_validation_and_remax_have_roles_of_their_own():
    ppo = work(settings=("algorithm.advantage=gae", "algorithm.updates_per_iteration=2"), lengths=Lengths(20, 10, 50))
    plan = rank_plan(ppo, 0)
    critic = parameter_count(MODEL.as_critic()) * FLOAT32
    assert plan.roles["critic"] == plan.roles["critic_gradients"] == critic
    assert plan.roles["critic_moments"] == 2 * critic
    assert plan.roles["validation_kv_cache"] == 2 * 4 * 10 * 4 * 96 * 4 * 4
    order = ("gen", "ref", "old_log_prob", "values", "update_critic", "update_actor", "testing", "export")
    assert ppo.phases == order
    remax = rank_plan(work(settings=("algorithm.advantage=remax",)), 0)
    assert remax.roles["kv_cache"] == rank_plan(work(), 0).roles["kv_cache"] // 64 * (64 + 16)


def test_a_teacher_of_another_size_is_held_whole_and_scores():
    plain, teacher = work(), MODEL.model_copy(update={"num_layers": 6, "hidden_size": 64})
    settings = load_grpo_config(None, [*SMALL, "algorithm.advantage=distillation", "algorithm.teacher=some/model"])
    roles = plain.roles | {"teacher": RoleModel("some/model", teacher)}
    taught = Work.of(settings, roles, plain.yamls, plain.lengths)
    assert taught.phases == ("gen", "ref", "teacher", "update_actor", "export")
    seconds = step_seconds(taught, Rates(1e9, 1e9, 1e9))
    assert seconds["teacher"] > seconds["ref"] > 0
    plan = rank_plan(taught, 0)
    assert plan.roles["teacher"] == parameter_count(teacher) * FLOAT32
    assert {name: size for name, size in plan.roles.items() if name != "teacher"} == rank_plan(plain, 0).roles
    assert plan.activations["teacher"] > plan.activations["ref"] > 0


def random_stage(rng: random.Random) -> tuple[Stage, MicroBatch]:
    tp = rng.choice((1, 2, 4))
    flags = (rng.random() < 0.7, rng.random() < 0.5)  # the last stage, rows split
    stage = Stage(MODEL, tp, rng.randint(1, 4), *flags, rng.choice((2, 4)), rng.random() < 0.5)
    return stage, MicroBatch((), rng.randint(1, 8), rng.randint(1, 8), 32 * rng.randint(1, 4), 32 * rng.randint(1, 4))


def test_activations_grow_with_every_size():
    rng = random.Random(0)
    for _ in range(50):
        stage, micro = random_stage(rng)
        grown = [
            (Stage(**{**vars(stage), "layers": stage.layers + 1}), micro),
            (stage, MicroBatch(**{**vars(micro), "response_size": micro.response_size + 32})),
            (stage, MicroBatch(**{**vars(micro), "prefix_size": micro.prefix_size + 32})),
            (stage, MicroBatch(**{**vars(micro), "count": micro.count + 1})),
        ]
        for larger in grown:
            assert update_bytes(*larger) > update_bytes(stage, micro)
            assert update_tables(*larger) > update_tables(stage, micro) or stage.fused
            assert score_bytes(*larger) >= score_bytes(stage, micro)
        assert score_bytes(stage, micro) > 0
        assert update_bytes(stage, micro, 3) > update_bytes(stage, micro, 1)


# The model that pools of memory were measured with.
MEASURED = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)


def test_an_update_has_as_much_as_its_graph_was_seen_to_have():
    """From graphs of MindSpore 2.9: hidden 256, 2 layers (fused: 4), 2 groups of 64 + 8 x 64 positions (and 8)."""
    composed = Stage(MEASURED, 1, 2, True, False, 4, False)
    fused = Stage(MEASURED.model_copy(update={"num_layers": 4}), 1, 4, True, False, 4, True)
    micro = MicroBatch((), 2, 8, 64, 64)
    assert update_bytes(composed, micro) == pytest.approx(106 * 2**20, rel=0.06)
    assert score_bytes(composed, micro) == pytest.approx(24 * 2**20, rel=0.1)
    assert update_bytes(fused, micro) == pytest.approx(63 * 2**20, rel=0.05)
    assert update_bytes(fused, MicroBatch((), 8, 8, 64, 64)) == pytest.approx(241 * 2**20, rel=0.05)
    assert update_tables(fused, micro) == 0
    again = Stage(**{**vars(fused), "recompute": True})
    assert update_bytes(again, MicroBatch((), 8, 8, 64, 64)) < 0.5 * update_bytes(fused, MicroBatch((), 8, 8, 64, 64))


def test_the_head_of_an_update_is_there_a_chunk_at_a_time(monkeypatch):
    """As seen with a vocabulary of 131,072, whose matrix has 128 MiB: chunks of 128 and 256 MiB, and one of 512."""
    model = MEASURED.model_copy(update={"vocab_size": 131072, "num_layers": 4})
    stage = Stage(model, 1, 4, True, False, 4, True)
    for mib, seen in ((128, 290), (256, 534), (512, 519)):
        monkeypatch.setattr(activations, "chunk_count", partial(chunk_count, limit=mib * 2**18))
        assert update_bytes(stage, MicroBatch((), 8, 2, 64, 64)) == pytest.approx(seen * 2**20, rel=0.12)


@pytest.mark.parametrize(("vocabulary", "numbers"), [(2048, 3 * 704 * 256 + 576 * 1664), (32768, (32768 + 576) * 256)])
def test_rounded_factors_of_the_largest_operator_are_counted(vocabulary, numbers):
    model, micro = MEASURED.model_copy(update={"vocab_size": vocabulary}), MicroBatch((), 1, 8, 64, 64)
    plain, rounds = (Stage(model, 1, 4, True, False, 4, True, rounds=part) for part in (False, True))
    assert score_bytes(rounds, micro) - score_bytes(plain, micro) == 2 * numbers


def test_remedies_lower_the_peak_and_name_a_setting_that_does():
    job = work(lengths=Lengths(500), settings=("rollout.max_new_tokens=256",))
    now = largest_peak(job)
    found = remedies(job)
    again = f"{RECOMPUTE}=True"
    assert again in [remedy.setting for remedy in found]
    for remedy in found:
        assert remedy.peak < now
        settings = [setting for setting in remedy.setting.split() if setting != again]
        changed = work(lengths=Lengths(500), settings=("rollout.max_new_tokens=256", *settings))
        if again in remedy.setting:
            changed = with_settings(changed, {RECOMPUTE: True})
        assert largest_peak(changed) == remedy.peak


TWO_RANKS = (
    "train_yaml.parallel_config.data_parallel=2",
    "train_yaml.parallel.enable_parallel_optimizer=True",
    "infer_yaml.parallel_config.model_parallel=2",
)


SHARED = (*jobs.layout("train", "dp2zero3"), *jobs.layout("infer", "tp2"))
ADAPTERS = ("lora.rank=4", "lora.reference=start")


@pytest.mark.parametrize(
    ("workers", "layouts"),
    [
        (1, ADAPTERS),
        pytest.param(1, ("optimizer.state=int8",), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, TWO_RANKS, marks=[pytest.mark.slow, pytest.mark.msrun]),
        pytest.param(2, (*TWO_RANKS, *ADAPTERS), marks=[pytest.mark.slow, pytest.mark.msrun]),
        pytest.param(2, SHARED, marks=[pytest.mark.slow, pytest.mark.msrun]),
        pytest.param(2, (*SHARED, *ADAPTERS), marks=[pytest.mark.slow, pytest.mark.msrun]),
    ],
)
def test_a_run_counts_what_was_planned(tmp_path, capsys, workers, layouts):
    """Roles and phases of a job with swap, of the rank that has most of each, and the peak of memory."""
    task = jobs.make_task(tmp_path / "task", layers=1)
    settings = ("memory.swap=True", "algorithm.beta=0.1", "algorithm.updates_per_iteration=2", "trainer.total_steps=1")
    settings = (*settings, "algorithm.reference_sync_steps=1", "trainer.save_freq=1", *layouts)
    arguments = task.train(tmp_path / "run", *settings, enable_compile_cache=None)  # reading graphs takes memory, too
    capsys.readouterr()
    assert main(["plan", *arguments[1:], "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["ranks"]
    if workers == 1:
        result = jobs.start(arguments, new=True)  # a fork has more in memory
        assert result.returncode == 0, result.stderr
    else:
        result = run_msrun(workers, [jobs.ONE_STAGE, *arguments[1:]])
        assert result.returncode == 0, result.logs
    (row,) = jobs.Run(tmp_path / "run").metrics
    roles = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("swap/role_gb/")}
    phases = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("swap/resident_gb/")}
    wanted = {role: max(rank["roles"].get(role, 0) for rank in planned) for rank in planned for role in rank["roles"]}
    assert {role: round(value * GIB) for role, value in roles.items()} == wanted
    assert {"gen", "ref", "old_log_prob", "update_actor", "sync_ref"} <= set(phases)
    assert ("reshard" in phases) == (workers > 1)
    for phase in set(phases) & set(planned[0]["phases"]):
        held = max(sum(rank["phases"][phase].values()) for rank in planned)
        assert round(phases[phase] * GIB) == held, phase
    largest = max(rank["peak"] for rank in planned)
    assert row["perf/max_memory_allocated_gb"] * GIB == pytest.approx(largest, rel=0.15)


def test_numbers_of_a_part_are_those_of_its_shapes():
    job = work({"model_parallel": 2}, {"model_parallel": 2})
    plan, part = rank_plan(job, 1), job.trains[1]
    assert plan.roles["gradients"] == FLOAT32 * sum(prod(part.shape(spec)) for spec in part.specs)
