"""`mindrlhf plan` says what a job would hold, compute and move, and starts nothing."""

import json
import re
import subprocess
import sys

import jobs
import pytest

from mindrlhf.cli import main
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.metrics.flops import forward_flops
from mindrlhf.phases import PHASES

PAIRS = {
    "tiny": ("finetune_qwen2_tiny.yaml", "predict_qwen2_tiny.yaml", 1, 1_280_256),
    "0.5b": ("finetune_qwen2_5_0_5b_cpu.yaml", "predict_qwen2_5_0_5b_instruct_cpu.yaml", 1, 494_032_768),
    "7b": ("finetune_qwen2_5_7b.yaml", "predict_qwen2_5_7b_instruct.yaml", 8, 7_615_616_512),
    "32b": ("finetune_qwen2_5_32b.yaml", "predict_qwen2_5_32b_instruct.yaml", 32, 32_763_876_352),
}


@pytest.fixture
def flags(root):
    """The flags of a shipped pair."""

    def of(name: str, *more: str) -> list[str]:
        folder = root / "model_configs" / "qwen_grpo"
        train, infer = (str(folder / file) for file in PAIRS[name][:2])
        return ["--sft_path_train", train, "--sft_path_infer", infer, *more]

    return of


@pytest.fixture
def planned(flags, capsys):
    """The figures of a shipped pair."""

    def of(name: str, *more: str) -> dict:
        code = main(["plan", *flags(name, *more), "--json"])
        figures = json.loads(capsys.readouterr().out)
        assert code == (0 if figures["fits"] else 1), "on CPU it depends on what is free"
        return figures

    return of


def test_adapters_take_less_than_half_of_the_memory(planned):
    step = ("rollout.max_new_tokens=64", "data.prompts_per_step=2", "rollout.num_generations=4", "algorithm.beta=0.04")
    whole, adapted = (planned("0.5b", "--prompt_tokens", "64", *step, *more) for more in ((), ("lora.rank=16",)))
    assert adapted["parameters"] - whole["parameters"] == 8_798_208
    assert adapted["ranks"][0]["peak"] < 0.45 * whole["ranks"][0]["peak"]
    assert adapted["flops"]["update_actor"] == pytest.approx(2 / 3 * whole["flops"]["update_actor"])
    assert "reference" not in adapted["ranks"][0]["roles"]


def test_time_is_forecast_with_rates_of_this_machine(planned):
    short, long = (planned("tiny", "--prompt_tokens", "64", f"trainer.total_steps={n}")["time"] for n in (1, 10**6))
    assert short == "short: the matrix products of all steps take less than 10s"
    assert re.fullmatch(
        r"about \S+s a step \(gen \S+s, .*train \S+s\), \S+ for 1,000,000 steps, if every answer has 128 tokens; .+",
        long,
    )


def test_time_on_a_chip_is_forecast_from_its_figures(planned):
    """Half of the cores' rate and of the memory's take longer; the reshard is what a link carries."""
    times = {chip: planned("7b", "--prompt_tokens", "512", "--chip", chip) for chip in ("910B2", "910B3", "910B4")}
    assert re.fullmatch(
        r"about \S+s a step \(gen \S+s, ref \S+s, train \S+s\), if every answer has 1,024 tokens; .+",
        times["910B3"]["time"],
    )
    assert times["910B3"]["assumed"] == "40% of a 910B3's rate of products, 60% of its memory's, 50% of its links'"
    seconds = {chip: figures["step_seconds"] for chip, figures in times.items()}
    for phase, took in seconds["910B3"].items():
        assert seconds["910B2"][phase] <= took < seconds["910B4"][phase]
    received = max(times["910B3"]["reshard"]["receives"].values())
    assert seconds["910B3"]["reshard"] == pytest.approx(received / (0.5 * 196e9))
    work = times["910B3"]["flops"]["ref"] / 8 / (0.4 * 20 * 8192 * 1.8e9)
    assert work < seconds["910B3"]["ref"] < 3 * work, "and sums over tensor-parallel ranks"


FIVE = ("--device", "Ascend", "--prompt_tokens", "64", "trainer.staleness=1")  # ranks of the tiny model on a device


def five(trainers: int, generators: int) -> list[str]:
    flags = ["--trainer_ranks", str(trainers), "--generator_ranks", str(generators)]
    sides = (("train", trainers), ("infer", generators))
    return [*FIVE, *flags, *(f"{name}_yaml.parallel_config.data_parallel={ranks}" for name, ranks in sides)]


def test_a_division_of_ranks_is_proposed_with_its_arguments(planned):
    """Data-parallel ranks divide 8 prompts: 1 + 4 and 4 + 1 are possible, and 2 + 3 is refused."""
    figures = planned("tiny", *five(1, 4))
    found = figures["division"]
    assert found.keys() == {"given", "proposed", "colocated", "beside", "tried"}
    assert [(one["trainers"], one["generators"]) for one in found["tried"]] == [(1, 4), (4, 1)]
    assert found["given"] == found["tried"][0]
    assert found["colocated"] is None
    given = found["given"]
    seconds = figures["step_seconds"]
    training = seconds["ref"] + seconds["update_actor"] + seconds["reshard"]
    assert given["side_seconds"] == pytest.approx({"train": training, "infer": seconds["gen"] + seconds["reshard"]})
    assert given["step_seconds"] == max(given["side_seconds"].values())
    assert given["peak"] == max(rank["peak"] for rank in figures["ranks"])
    shortest = min(found["tried"], key=lambda one: one["step_seconds"])
    assert found["proposed"] == shortest
    for one in found["tried"]:
        other = planned("tiny", *FIVE, *one["arguments"])["division"]
        assert (other["given"], other["proposed"]) == (one, shortest)
    for trainers in (2, 3):
        with pytest.raises(json.JSONDecodeError):
            planned("tiny", *five(trainers, 5 - trainers))


def test_the_page_shows_the_table_of_its_command(root, capsys):
    page = (root / "docs" / "parallelism.md").read_text()
    section = page[page.index("### How many ranks for each side") :]
    command, table = re.findall(r"```(?:bash|text)\n(.*?)\n```", section, re.DOTALL)[:2]
    assert main(command.replace("\\\n", "").split()[1:]) == 0
    assert f"\n\n{table}\n\n" in capsys.readouterr().out


def test_the_sides_of_a_split_job_exchange_weights_and_answers(planned):
    figures = planned("tiny", *five(1, 4))
    answers = 8 * (4 * 64 + 8 * 128 * 13)  # an id, a mark and two log-probs for a token
    assert figures["exchange"] == {"weights": 4 * 4 * PAIRS["tiny"][3], "experiences": answers}
    assert sum(figures["reshard"]["receives"].values()) == figures["exchange"]["weights"]
    alone = planned("tiny", "--prompt_tokens", "64", "trainer.total_steps=1")
    assert (alone["exchange"], alone["division"]) == (None, None)


def test_divisions_are_compared_by_rates_of_this_machine(planned, flags, capsys):
    sides = ("--prompt_tokens", "64", "--trainer_ranks", "1", "--generator_ranks", "1")
    figures = planned("tiny", *sides, "trainer.total_steps=1000000")
    seconds = figures["step_seconds"]
    (only,) = figures["division"]["tried"]
    sums = {"train": seconds["ref"] + seconds["update_actor"], "infer": seconds["gen"]}
    assert only["side_seconds"] == pytest.approx(sums)
    assert only["step_seconds"] == pytest.approx(sum(sums.values()))
    assert figures["division"]["colocated"]["idle"] == {}, "nobody waits"
    main(["plan", *flags("tiny", *sides, "trainer.total_steps=1")])
    assert "\ndivisions        not compared, for a step has no forecast\n" in capsys.readouterr().out


def test_buffers_of_hccl_and_gaps_are_in_the_peak(planned, monkeypatch):
    """All ranks, four tensor-parallel ones, two of a pipeline: three groups with two buffers of 200 MB each."""
    ranks = planned("7b", "--prompt_tokens", "512")["ranks"]
    for rank in ranks:
        buffers, gaps = rank["extra"].values()
        assert buffers == 3 * 2 * 200 * 2**20
        held = {
            phase: sum(roles.values()) + rank["activations"].get(phase, 0) for phase, roles in rank["phases"].items()
        }
        assert gaps == int(0.05 * max(held.values()))
        assert rank["totals"] == {phase: nbytes + buffers + gaps for phase, nbytes in held.items()}
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    smaller = planned("7b", "--prompt_tokens", "512")["ranks"]
    assert ranks[0]["peak"] - smaller[0]["peak"] == 3 * 2 * 136 * 2**20


@pytest.mark.parametrize("name", PAIRS)
def test_every_shipped_pair(planned, name):
    _, _, ranks, parameters = PAIRS[name]
    figures = planned(name, "--prompt_tokens", "512")
    assert figures["parameters"] == parameters
    assert [rank["rank"] for rank in figures["ranks"]] == list(range(ranks))
    for rank in figures["ranks"]:
        assert rank["peak"] == max(rank["totals"].values()) == rank["totals"][rank["peak_phase"]]
        assert set(rank["phases"]) <= set(PHASES)
    moved = figures["reshard"]
    assert sum(moved["sends"].values()) == sum(moved["receives"].values()) == sum(moved["least"].values())
    assert (sum(moved["sends"].values()) > 0) == ("reshard" in figures["ranks"][0]["phases"])
    # a model's shards and its copies are the model at the least
    assert sum(rank["roles"]["gradients"] for rank in figures["ranks"]) >= 4 * parameters


def test_adapters_have_gradients_and_moments_alone(planned):
    """Rank 16 on the seven projections of 24 layers."""
    (full,), (adapted,) = (planned("0.5b", "algorithm.beta=0.1", *more)["ranks"] for more in ((), ("lora.rank=16",)))
    trained = 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert (adapted["roles"]["gradients"], adapted["roles"]["moments"]) == (4 * trained, 8 * trained)
    assert adapted["roles"].get("reference", 0) == 0
    assert adapted["peak"] < full["peak"]


def test_tokens_and_operations_are_those_of_the_metrics(planned, flags):
    from mindrlhf.configs.model_yaml import load_model_yaml

    figures = planned("tiny", "--prompt_tokens", "100", "data.prompts_per_step=6", "algorithm.updates_per_iteration=2")
    config = load_grpo_config(None, ["data.prompts_per_step=6"])
    samples = config.rollout.num_generations
    assert figures["prompt_tokens"] == 600
    assert figures["response_tokens"] == 6 * samples * 128
    model = load_model_yaml(flags("tiny")[1]).architecture()
    forward = 6 * forward_flops(model, 100, [128] * samples)
    assert figures["flops"] == {
        "gen": forward,
        "ref": forward,
        "old_log_prob": forward,
        "update_actor": 3 * forward,
    }


def test_the_screen(flags, capsys):
    assert main(["plan", *flags("7b", "--prompt_tokens", "512")]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 200
    assert "qwen2, 28 layers, 7,615,616,512 parameters; 8 x Ascend: trains dp 1 x tp 4 x pp 2" in lines[0]
    for text in (r"0-3 +layers 0-13", r"4-7 +layers 14-27", "kv_cache", "prompts_per_step", "FLOP"):
        assert re.search(text, out)
    assert re.search(r"(fits|WILL NOT FIT): rank \d peaks at [0-9.]+ GiB in update_actor", out)


def test_what_will_not_fit_is_said_with_what_would(flags, capsys):
    wide = flags("7b", "--prompt_tokens", "512", "train_yaml.context.max_device_memory=20GB")
    assert main(["plan", *wide]) == 1
    out = capsys.readouterr().out
    assert "WILL NOT FIT: rank " in out
    assert "context.max_device_memory 20GB is 20.0 GiB" in out
    assert "memory.swap=True: " in out
    assert main(["plan", *wide, "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert not figures["fits"]
    peak = max(rank["peak"] for rank in figures["ranks"])
    assert figures["remedies"]
    assert all(remedy["peak"] < peak for remedy in figures["remedies"])
    assert main(["plan", *flags("tiny", "--prompt_tokens", "64")]) == 0
    assert "\nfits: rank 0 peaks at" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "more"), [("7b", ()), ("32b", ("memory.swap=True",))])
def test_the_large_pairs_fit_their_devices(planned, name, more):
    figures = planned(name, *more)
    assert figures["fits"]
    assert max(rank["peak"] for rank in figures["ranks"]) <= figures["limit"] < 64 * 2**30


@pytest.mark.parametrize("count", [10**6, 10**12])
def test_a_plan_takes_no_longer_for_more_responses(flags, capsys, count):
    """Nothing is made for each response: a million million of them do not even fit into memory."""
    assert main(["plan", *flags("tiny", f"rollout.num_generations={count}")]) == 1
    assert "WILL NOT FIT" in capsys.readouterr().out


def test_a_job_that_train_would_refuse_is_refused(flags, capsys):
    for more, words in (
        (["data.prompts_per_step=3"], "data.prompts_per_step is 3, which the data_parallel 2"),
        (["infer_yaml.parallel_config.data_parallel=1"], "both run on the same workers"),
        (["--prompt_tokens", "9000"], "need 10024 positions"),
        (["--chip", "910B9"], "Unknown chip '910B9': did you mean "),
    ):
        assert main(["plan", *flags("7b", *more)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1


def test_the_longest_prompt_is_what_seq_length_leaves(planned):
    assert planned("7b")["longest_prompt"] == 4096 - 1024


def test_every_transfer_is_listed_on_request(flags, capsys):
    main(["plan", *flags("7b", "--prompt_tokens", "64")])
    short = capsys.readouterr().out
    main(["plan", *flags("7b", "--prompt_tokens", "64", "--every_transfer")])
    long = capsys.readouterr().out
    assert long.startswith(short)
    listed = long[len(short) :]
    count = int(listed.split(" transfers, ")[0].split()[-1])
    assert sum(": rank " in line for line in listed.splitlines()) == count


def test_mindspore_is_not_even_imported(flags):
    code = (
        f"import sys; from mindrlhf.cli import main; main(['plan', *{flags('7b')!r}]); "
        "assert 'mindspore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_each_pair_of_the_page_fits_with_the_settings_beside_it(root, capsys):
    lines = (root / "docs" / "ascend.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `finetune_")]
    assert len(rows) == 22
    for pair, _, _, _, settings in rows:
        train, infer = re.findall(r"`(\w+)\.yaml`", pair)
        words = re.findall(r"`([^`]+)`", settings)
        if found := re.search(r"at most (\d+) tokens", settings):
            words += ["--prompt_tokens", found[1]]
        if found := re.search(r"images of up to (\d+) tokens", settings):
            words += ["--image_tokens", found[1]]
        assert main(["plan", "--sft_path_train", train, "--sft_path_infer", infer, *words]) == 0, pair
        capsys.readouterr()


def test_unknown_rewards_are_refused(task, tmp_path, capsys):
    arguments = [*task.train(tmp_path), "reward.functions=[{name: gsmk8}]"]
    assert jobs.call(["plan", *arguments[1:]]) == 2
    assert "reward 'gsmk8' is not known (nearest: 'gsm8k')" in capsys.readouterr().err


def test_the_limit_is_the_chips_where_the_yaml_names_none(tmp_path, flags, capsys):
    """A config.json of 32 billion parameters on one device: more than any chip has."""
    config = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600}
    config |= {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    config |= {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    job = ["--load_sft_checkpoint_infer", str(tmp_path), "--device", "Ascend", "--prompt_tokens", "512"]
    assert main(["plan", *job]) == 1
    out = capsys.readouterr().out
    assert "WILL NOT FIT: rank 0 peaks at" in out
    assert "60.7 GiB are usable of a 910B3 (`mindrlhf plan --chip` names another)" in out


@pytest.mark.parametrize(("chip", "code"), [("910B1", 0), ("Ascend910B4", 1), ("910A", 1), ("910_9392", 0)])
def test_a_chip_is_named_on_the_command_line(flags, capsys, chip, code):
    assert main(["plan", *flags("7b", "--chip", chip)]) == code
    assert ("WILL NOT FIT" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(("chip", "code"), [("910B3", 0), ("910B4", 1)])
def test_a_chip_is_named_with_the_device(flags, capsys, chip, code):
    assert main(["plan", *flags("7b", "--device", f"Ascend:{chip}")]) == code
    assert ("WILL NOT FIT" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize("role", ["train", "infer"])
def test_one_model_yaml_serves_both_roles(capsys, role):
    name = {"train": "finetune_qwen2_tiny", "infer": "predict_qwen2_tiny"}[role]
    assert main(["plan", f"--sft_path_{role}", name, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["parameters"] == PAIRS["tiny"][3]
    other = {"train": "infer", "infer": "train"}[role]
    assert main(["plan", f"--sft_path_{role}", name, f"{other}_yaml.model.model_config.num_layers=2"]) == 2
    error = capsys.readouterr().err
    assert "num_layers is " in error
    assert "make them equal" in error


def test_the_other_role_has_a_layout_of_its_own(capsys):
    assert main(["plan", "--sft_path_train", "finetune_qwen2_5_7b", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    axes = ("data_parallel", "model_parallel", "pipeline_stage")
    assert [figures["train"][key] for key in axes] == [1, 4, 2]
    assert [figures["infer"][key] for key in axes] == [2, 4, 1]
    more = ["--infer_tensor_parallel", "2", "train_yaml.model.model_config.num_layers=4"]
    assert main(["plan", "--sft_path_train", "finetune_qwen2_5_7b", *more, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [figures["infer"][key] for key in axes] == [4, 2, 1]
    assert main(["plan", "--sft_path_infer", "predict_qwen2_5_7b_instruct", "--pipeline_parallel", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [figures["train"][key] for key in axes] == [1, 4, 2]
