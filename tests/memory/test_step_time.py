"""Seconds of a step before a run: a pure function over rates, and what is said of them."""

from dataclasses import replace

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelSettings, ModelYaml, ParallelSettings
from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings
from mindrlhf.flags import TrainFlags
from mindrlhf.memory import step_time
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.step_time import Rates, forecast, measured_rates, run_rates, step_seconds, time_line
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import RoleModel
from mindrlhf.models.parameters import parameter_count
from mindrlhf.trainer.check import read_roles

MODEL = ModelConfig(
    vocab_size=2000, hidden_size=256, intermediate_size=700, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64
)
RATES = Rates(passes=1e11, decode=5e10, memory=2e10)
SMALL = ("data.prompts_per_step=8", "rollout.num_generations=8", "rollout.max_new_tokens=64", "algorithm.beta=0.1")
HEAD = MODEL.vocab_size * MODEL.hidden_size
LAYERS = parameter_count(MODEL) - 2 * HEAD  # the embedding is as large


def work(*settings: str, prompt: int = 64, **parallel: int) -> Work:
    yaml = ModelYaml(
        path="model.yaml",
        model=ModelSettings(),
        parallel=ParallelSettings(**parallel),
        context={"device_target": "CPU"},
    )
    config = load_grpo_config(None, [*SMALL, *settings])
    return Work.of(config, read_roles(TrainFlags(), config, MODEL), {"train": yaml, "infer": yaml}, Lengths(prompt))


def test_a_pass_is_two_operations_for_each_weight_and_token_over_the_rate_of_products():
    seconds = step_seconds(work(), RATES)
    prompts, answers = 8 * 64, 8 * 8 * 64
    least = 2 * (LAYERS * (prompts + answers) + HEAD * answers) / RATES.passes
    assert least < seconds["ref"] < 1.1 * least, "attention's own products are few at these lengths"
    moved = 7 * 4 * parameter_count(MODEL) / RATES.memory
    assert seconds["update_actor"] == pytest.approx(3 * seconds["ref"] + moved)


def test_an_answer_is_drawn_over_the_rate_of_decoding_and_reads_its_cache():
    seconds = step_seconds(work(), RATES)["gen"]
    faster = step_seconds(work(), replace(RATES, decode=2 * RATES.decode))["gen"]
    answers = 8 * 8 * 64
    drawing = 2 * (LAYERS + HEAD) * answers / RATES.decode
    assert 2 * (seconds - faster) == pytest.approx(drawing, rel=0.02)
    without = step_seconds(work(), replace(RATES, memory=float("inf")))["gen"]
    longer = step_seconds(work("rollout.max_new_tokens=128"), RATES)["gen"]
    other = step_seconds(work("rollout.max_new_tokens=128"), replace(RATES, memory=float("inf")))["gen"]
    assert longer - other > 2.5 * (seconds - without), "twice the tokens, each over a longer cache"


def test_ranks_share_the_work():
    alone, four = (step_seconds(work(**parallel), RATES) for parallel in ({}, {"data_parallel": 4}))
    assert four["gen"] == pytest.approx(alone["gen"] / 4)
    assert four["ref"] == pytest.approx(alone["ref"] / 4)
    cut = step_seconds(work(model_parallel=2), RATES)
    assert cut["update_actor"] == pytest.approx(alone["update_actor"] / 2)
    slower = time_line(work(), 10, forecast(work(), [RATES, replace(RATES, passes=5e10)]))
    assert slower == time_line(work(), 10, forecast(work(), [replace(RATES, passes=5e10)])), "all wait for the slowest"


SCORING = RewardModelSettings(path="reward")


def with_model(job: Work, model: ModelConfig, settings: RewardModelSettings) -> Work:
    roles = {**job.roles, "reward_model.0": RoleModel("reward", model, settings=settings)}
    return Work.of(job.config, roles, job.yamls, job.lengths)


def test_a_reward_model_reads_what_the_reference_reads_on_one_rank_of_each_replica():
    classifier = MODEL.as_critic()
    seconds = step_seconds(with_model(work(), classifier, SCORING), RATES)
    prompts, answers = 8 * 64, 8 * 8 * 64
    least = 2 * LAYERS * (prompts + answers) / RATES.passes
    assert least < seconds["reward_model"] < 1.1 * least
    assert {name: took for name, took in seconds.items() if name != "reward_model"} == step_seconds(work(), RATES)
    replicas = step_seconds(with_model(work(data_parallel=4), classifier, SCORING), RATES)["reward_model"]
    assert replicas == pytest.approx(seconds["reward_model"] / 4)
    whole = step_seconds(with_model(work(model_parallel=2), classifier, SCORING), RATES)["reward_model"]
    assert whole == pytest.approx(seconds["reward_model"]), "tensor-parallel ranks do not share it"


def test_a_judge_reads_each_conversation_and_writes_its_verdict():
    judge = JudgeSettings(path="judge", verdict="generated", max_new_tokens=32)
    seconds, slower, cached = (
        step_seconds(with_model(work(), MODEL, judge), rates)["reward_model"]
        for rates in (RATES, replace(RATES, decode=RATES.decode / 2), replace(RATES, memory=float("inf")))
    )
    written = 2 * (LAYERS + HEAD) * 8 * 8 * 32 / RATES.decode
    assert slower - seconds == pytest.approx(written, rel=0.02)
    read = 2 * LAYERS * 8 * 8 * (64 + 64) / RATES.passes
    assert cached - written == pytest.approx(read, rel=0.1)
    assert cached < seconds


def test_phases_that_a_step_lacks_take_no_time():
    assert "ref" in step_seconds(work(), RATES)
    assert "ref" not in step_seconds(work("algorithm.beta=0"), RATES)


def test_a_run_that_is_soon_over_is_not_measured_for(monkeypatch):
    monkeypatch.setattr(step_time, "measured_rates", lambda _: RATES)
    assert run_rates(work(), 1, 1e11) is None
    assert run_rates(work(), 10_000, 1e11) == RATES
    assert run_rates(work(), None, 1e11) == RATES
    assert "short: the matrix products of all steps take less than 10s" in time_line(
        work(), 3, forecast(work(), [RATES, None])
    )


def test_the_forecast_names_the_step_the_run_and_what_it_leaves_out():
    seconds = step_seconds(work(), RATES)
    line = time_line(work(), 1000, forecast(work(), [RATES]))
    assert line.startswith(f"about {sum(seconds.values()):.1f}s a step (gen {seconds['gen']:.1f}s, ref ")
    assert line.endswith(" for 1,000 steps, if every answer has 64 tokens; compiling graphs comes on top")
    assert "steps" not in time_line(work(), None, forecast(work(), [RATES]))
    for rounds, said in ((1, "64 tokens;"), (3, "64 tokens and one round of generation is enough (dynamic_sampling.")):
        job = work("dynamic_sampling.enabled=True", f"dynamic_sampling.max_rounds={rounds}")
        assert said in time_line(job, None, forecast(job, [RATES]))


def test_rates_are_measured_at_the_shapes_of_the_job(monkeypatch):
    asked = []
    monkeypatch.setattr("mindrlhf.backend.ceiling.product_rate", lambda *shape: asked.append(shape) or 1e9)
    assert measured_rates(work()) == Rates(1e9, 1e9, 2e9)
    (_, _, rows, *passes), (_, _, slots, *decode), (_, _, one, *memory) = asked
    assert (rows, slots, one) == (2048, 64, 1)
    assert passes == [256, 700]
    assert decode == [256, parameter_count(MODEL) // 256, "float32"]
    assert memory == [256, 2**24 // 256, "float32"]


@pytest.mark.parametrize(("given", "decoded"), [("rollout.weights=int8", "int8"), ("rollout.weights=train", "float32")])
def test_the_rate_of_decoding_is_that_of_its_weights(monkeypatch, given, decoded):
    asked = []
    monkeypatch.setattr("mindrlhf.backend.ceiling.product_rate", lambda *shape: asked.append(shape) or 1e9)
    measured_rates(work(given))
    assert [shape[5:] for shape in asked] == [(), (decoded,), ("float32",)]
