"""The comparison: which rounds it judges, what it makes of them, and that it runs both scripts on the same work."""

import json
import shutil
import sys
from argparse import Namespace

import numpy as np
import pytest
import reference_model
from small_model import random_arrays, small_config
from workers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import compare
import grpo_step
from compare import OURS, BusyError, Run, Side
from comparison_jobs import JOBS
from comparison_table import FLOAT32, as_outcome, markdown
from work import PROMPTS_FILE, prepare

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.weight_source import index_weights
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.run.training_data import read_problems

# Stands for the peer's script: it writes down what it was called with, and results that do not depend on it.
PEER = """
import json, pathlib, shutil, sys
flags = sys.argv[1:]
value = lambda name: flags[flags.index(name) + 1] if name in flags else None
if value("--export"):
    shutil.copytree(pathlib.Path(__file__).with_name("exported"), value("--export"))
if value("--json"):
    micro = int(value("--micro-batch"))
    numbers = dict(step=4.0 / micro, gen=1.0 / micro, logprob=0.5 / micro, train=2.0 / micro, optim=0.25 / micro)
    numbers |= dict(completion_tokens=24, gen_tok_s=24 * micro)
    result = dict(median=numbers, clean_steps=6, peak_rss_mib=100.0 * micro, versions={"trl": "0"}, flags=flags)
    pathlib.Path(value("--json")).write_text(json.dumps(result))
"""


def ran(step=1.0, others=0.0, clean=6, memory=500.0, **more) -> Run:
    numbers = {"step": step, "gen": step / 4, "logprob": step / 8, "train": step / 4, "optim": step / 8}
    numbers |= {"completion_tokens": 4096, "gen_tok_s": 4096 / (step / 4), "train_fwd": None}
    described = {"share_of_ceiling": {"step": 0.5}, "compile_total_s": 9.0, "start_to_first_step_s": 12.0}
    result = {"median": numbers, "clean_steps": clean, "peak_rss_mib": memory, "versions": {}}
    return Run(result | described | more, others)


def judge(runs, rounds=3, tries=5) -> tuple[dict, list]:
    """What is made of runs in the order in which sides `ours` and `peer` are run, and that order."""
    called, pending = [], iter(runs)

    def run(side, path):
        called.append(side.name)
        return next(pending)

    args = Namespace(rounds=rounds, tries=tries, max_others=0.15, output=ROOT)
    sides = [Side(OURS, lambda path: []), Side("peer", lambda path: [])]
    return compare.judged(args, JOBS["reference"], sides, run), called


def test_medians_over_rounds_in_alternating_order():
    # ours, peer | peer, ours | ours, peer
    made, called = judge([ran(3.0), ran(7.0), ran(9.0), ran(1.0), ran(2.0, memory=800.0), ran(8.0)])
    assert called == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert made["ours"]["step"] == 2.0
    assert made["peer"]["step"] == 8.0
    assert made["ours"]["memory"] == 500.0
    assert "train_fwd" not in made["ours"]


def test_reward_processes_are_our_memory_too():
    made, _ = judge([ran(reward_processes_peak_mib=20.0), ran()], rounds=1)
    assert (made["ours"]["memory"], made["peer"]["memory"]) == (520.0, 500.0)


@pytest.mark.parametrize("disturbed", [{"others": 0.16}, {"clean": 4}])
def test_a_disturbed_round_is_repeated_as_a_whole(disturbed, capsys):
    made, called = judge([ran(1.0), ran(50.0, **disturbed), ran(2.0), ran(4.0)], rounds=1)
    assert (made["ours"]["step"], made["peer"]["step"]) == (2.0, 4.0)
    assert called == ["ours", "peer", "ours", "peer"]
    assert "round not judged: peer: " in capsys.readouterr().out


def test_a_busy_machine_is_said_to_be_one():
    with pytest.raises(BusyError, match=r"only 1 of 3 rounds were quiet, and 2 are needed \(ours: .* 1.20 cores"):
        judge([ran(), ran(), ran(), ran(others=0.3), ran(), ran(others=1.2)], rounds=2, tries=3)


def test_ratios_are_to_the_fastest_and_the_smallest():
    sides = {
        "ours": compare.middle([ran(1.0, memory=600.0).result]),
        "peer 1": compare.middle([ran(4.0, memory=550.0).result]),
        "peer 2": compare.middle([ran(1.6, memory=900.0).result]),
    }
    outcome = as_outcome("reference", sides)
    assert outcome.fastest == "peer 2"
    assert outcome.ratio("step") == 1 / 1.6
    assert outcome.ratio("train") == pytest.approx(1 / 1.6)
    assert outcome.ratio("memory") == 600 / 550
    assert outcome.missed == ["step 0.62 > 0.50", "gen 0.62 > 0.55", "memory 1.09 > 1.00"]
    line = markdown([outcome]).splitlines()[2]
    assert "| 1.000 | 1.600 | **0.62** | 0.50 |" in line
    assert line.endswith("| step 0.62 > 0.50; gen 0.62 > 0.55; memory 1.09 > 1.00 |")
    sides["ours"] = compare.middle([ran(0.8, memory=500.0).result])
    assert as_outcome("long-completion", sides).reached
    assert not as_outcome("two-updates", sides | {"ours": {**sides["ours"], "step": float("nan")}}).reached


def test_responses_of_other_lengths_are_compared_by_token():
    ours, peer = (compare.middle([ran(step).result]) for step in (1.0, 4.0))
    outcome = as_outcome("natural-lengths", {"ours": ours | {"completion_tokens": 2048}, "peer": peer})
    assert outcome.ratio("step") == outcome.ratio("gen") == 0.5
    assert outcome.ratio("memory") == 1.0


@pytest.mark.parametrize(("last", "text"), [(8.2, "does not grow: 1.02x"), (8.8, "grows: 1.10x")])
def test_growth_is_of_the_time_for_a_token(last, text):
    def sides(step, tokens):
        result = compare.middle([ran(step).result])
        return {"ours": result | {"completion_tokens": tokens}, "peer": result}

    few, many = as_outcome("growth-4", sides(1.0, 100)), as_outcome("growth-32", sides(last, 800))
    assert f"From 4 to 32 samples of a prompt our time for each response token {text}" in markdown([few, many])


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The stand-in for the peer's script, with the model that it exports beside it."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "peer.py").write_text(PEER)
    texts = ["Add 3 and 4.", "How much is it?"]
    tokenizer = train_tokenizer(texts, 300)
    config = small_config(
        vocab_size=tokenizer.size,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    arrays = random_arrays(config)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder / "exported", config, tensors, tokenizer=tokenizer)
    rows = [json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in texts * 4]
    (folder / "exported" / "prompts.jsonl").write_text("".join(rows))
    return folder / "peer.py"


def test_both_scripts_get_the_same_work(peer, tmp_path):
    argv = ["--peer-python", sys.executable, "--peer-python", "other", "--peer-script", str(peer)]
    args = compare.arguments([*argv, "--output", str(tmp_path), "--ours", "train.length_bucket=64"])
    job = JOBS["long-prompt"]
    model = compare.model_of(args, "long-prompt", job)
    assert (model / "config.json").is_file()
    ours, *peers = [side.command(tmp_path / "run.json") for side in compare.sides_of(args, job, model)]
    shared = ["--load", str(model), "--steps", "8", "--warmup", "2", "--quiet", "--threads", "2"]
    shared += ["--max-others", "0.15", "--max-prompt", "512", "--max-completion", "64", "--fixed-length"]
    assert ours[2:] == [
        *shared,
        "--micro-batch",
        "576",
        "--json",
        str(tmp_path / "run.json"),
        "train.length_bucket=64",
    ]
    assert [command[0] for command in peers] == [sys.executable, "other"]
    for command in peers:
        assert command[2:-2] == [*shared, "--tuned-malloc", "--micro-batch", "8"]


def test_bfloat16_is_beside_float32_and_all_dtypes_of_the_peer(peer, tmp_path):
    argv = ["--peer-python", "python", "--peer-script", str(peer), "--output", str(tmp_path), "--bfloat16", "int8"]
    args = compare.arguments([*argv, "--ours", "seed=1"])
    sides = {side.name: side.command(tmp_path / "run.json") for side in compare.sides_of(args, JOBS["wide"], tmp_path)}
    assert list(sides)[:2] == [OURS, FLOAT32]
    command, place = sides[FLOAT32], sides[FLOAT32].index("--json")
    assert sides[OURS] == [*command[:place], "--dtype", "bfloat16", *command[place:], "rollout.weights=int8"]
    dtypes = ["fp32", "bf16", "bf16-autocast"]
    assert [command[command.index("--dtype") + 1] for command in list(sides.values())[2:]] == dtypes
    steps = zip(sides, (1.0, 2.0, 5.0, 4.0, 3.0), strict=True)
    found = {name: compare.middle([ran(step).result]) for name, step in steps}
    outcome = as_outcome("wide", found)
    assert outcome.ratio("step") == pytest.approx(1 / 3)
    cells = "| wide | 1.000 | 2.000 | 0.50 | 0.50 | 0.50 | 0.50 | 1.00 | peer 1, micro-batch 16, bf16-autocast |"
    assert cells in markdown([outcome]).splitlines()


def test_both_sides_get_adapters(peer, tmp_path):
    """The two jobs of this shape differ in nothing else, and the model that is built has no adapters."""
    argv = ["--peer-python", "python", "--peer-script", str(peer), "--output", str(tmp_path)]
    args, flags = compare.arguments(argv), ["--lora-rank", "16"]

    def commands(name):
        return [side.command(tmp_path / "run.json") for side in compare.sides_of(args, JOBS[name], tmp_path)]

    (ours, theirs), (plain_ours, plain_theirs) = map(commands, ("qwen2.5-0.5b-lora", "qwen2.5-0.5b"))
    assert theirs[:3] == ["python", str(ROOT / "benchmarks" / "peer_lora.py"), str(peer)]
    for command, plain in ((ours, plain_ours), (theirs, plain_theirs)):
        place = command.index("--lora-rank")
        assert command[place : place + 2] == flags
        rest = command[:place] + command[place + 2 :]
        assert [part for part in rest if not part.endswith("peer_lora.py")] == plain
    settings = prepare(grpo_step.arguments(["--bpe-vocab", "300", "--dataset-size", "2", *flags]), tmp_path).train
    assert {"lora.rank=16", "lora.alpha=32", "algorithm.beta=0.04"} <= set(settings)
    assert "--lora-rank" not in JOBS["qwen2.5-0.5b-lora"].model


def test_a_model_that_sees_is_ours_on_both_sides(peer, tmp_path, capsys):
    args = compare.arguments(["--peer-python", "python", "--peer-script", str(peer), "--output", str(tmp_path)])
    folder = compare.model_of(args, "vision", JOBS["vision"])
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert compare.model_of(args, "vision", JOBS["vision"]) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    ours, theirs = compare.sides_of(args, JOBS["vision"], folder)
    assert theirs.command(tmp_path / "x")[:3] == ["python", str(ROOT / "benchmarks" / "peer_vision.py"), str(peer)]
    command = ours.command(tmp_path / "x")
    work = prepare(grpo_step.arguments(command[2:]), tmp_path)
    assert work.model.vision.images.max_pixels == 224 * 224
    vision = work.model.vision
    (prompt, *_) = read_problems(folder / PROMPTS_FILE, work.tokenizer, GRPOSettings(), {}, limit=1, vision=vision)
    assert (prompt.token_ids == vision.image_token_id).sum() == 64
    assert prompt.fields["ground_truth"].isdigit()


def test_models_are_built_once_and_given_ones_used_where_they_fit(peer, tmp_path):
    args = compare.arguments(["--peer-python", sys.executable, "--peer-script", str(peer), "--output", str(tmp_path)])
    folder = compare.model_of(args, "wide", JOBS["wide"])
    (folder / "seen").touch()
    assert compare.model_of(args, "wide", JOBS["wide"]) == folder
    assert (folder / "seen").is_file()
    (folder / compare.MODEL_MARK).write_text("{}")  # built with other flags
    compare.model_of(args, "wide", JOBS["wide"])
    assert not (folder / "seen").exists()
    args.load = peer.with_name("exported")
    assert compare.model_of(args, "two-updates", JOBS["two-updates"]) == args.load
    assert compare.model_of(args, "large-vocabulary", JOBS["large-vocabulary"]) != args.load


def test_the_end_token_is_drawn_now_and_then(peer, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(peer.with_name("exported"), folder)
    copy = compare.ending_earlier(folder, 0.1)
    assert sorted(p.name for p in copy.iterdir()) == sorted(p.name for p in folder.iterdir())
    model = read_hf_config(folder)
    (end,) = model.eos_token_ids
    before, after = ({name: stored.read() for name, stored in index_weights(f).items()} for f in (folder, copy))
    assert list(before) == list(after)
    for name, array in before.items():
        kept = np.arange(len(array)) != end if name == "model.embed_tokens.weight" else np.full(len(array), True)
        np.testing.assert_array_equal(after[name][kept], array[kept])
    # In the mean over what is written behind the prompts, its logit is the one with a chance of 1 in 10, by the
    # oracle's logits (whose inputs have the other row too).
    tokenizer = Tokenizer.from_path(folder)
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer.encode(text) for text in texts]
    shortest = min(map(len, prompts))
    written = np.random.default_rng(0).integers(model.vocab_size, size=(len(prompts), shortest))
    rows = [np.concatenate((prompt[-shortest:], tokens)) for prompt, tokens in zip(prompts, written, strict=True)]
    logits = np.concatenate([reference_model.logits(model, after, row)[shortest - 1 :] for row in rows])
    others = np.log(np.exp(np.delete(logits, end, 1)).sum(1))
    np.testing.assert_allclose((logits[:, end] - others).mean(), np.log(0.1 / 0.9), atol=0.1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_gets_what_its_family_has_and_loses_its_biases(peer, tmp_path, family):
    folder = tmp_path / "model"
    shutil.copytree(peer.with_name("exported"), folder)
    copy = compare.in_family(folder, family)
    model = read_hf_config(copy)
    assert (model.family, model.qk_norm, model.attention_bias) == (family, True, False)
    before, after = ({name: stored.read() for name, stored in index_weights(f).items()} for f in (folder, copy))
    norms = {name for name in after if name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert len(norms) == 2 * model.num_layers
    kept = {name for name in before if not name.endswith(".bias") and (family == "qwen3" or ".mlp." not in name)}
    drawn = {name for name in after if ".mlp.gate." in name or ".mlp.experts." in name}
    assert model.num_experts == (0 if family == "qwen3" else 16)
    assert len(drawn) == (0 if family == "qwen3" else model.num_layers * (1 + 3 * 16))
    assert set(after) == kept | norms | drawn
    for name in kept:
        np.testing.assert_array_equal(after[name], before[name])


def test_a_failing_side_is_named(tmp_path):
    side = Side("peer 1", lambda path: [sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(UserError, match="peer 1 ended with exit code 1: no such model"):
        compare.run_side(side, tmp_path / "run.json")


@pytest.mark.slow
def test_a_whole_comparison(peer, tmp_path, capsys):
    """Ours is real. Its figures stay beside those of later calls."""
    argv = ["--peer-python", sys.executable, "--peer-script", str(peer), "--output", str(tmp_path), "--rounds", "1"]
    argv += ["--max-others", "99", "--ours", "rollout.max_new_tokens=8", "--ours", "rollout.min_new_tokens=8"]
    for job in ("two-updates", "growth-4", "growth-8"):
        assert compare.main([*argv, "--job", job]) in (0, 1)
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    for job in ("two-updates", "growth-4", "growth-8"):
        assert f"| {job}: " in table
    assert "From 4 to 8 samples" in table
    for name in ("bars.png", "growth.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    busy = ["--max-others", "-1", "--tries", "1"]
    assert compare.main([*argv[:-6], *busy, "--job", "growth-4"]) == 3
    assert "0 of 1 rounds were quiet" in capsys.readouterr().err
