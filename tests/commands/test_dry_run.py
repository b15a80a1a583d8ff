"""`mindrlhf dry-run` compiles, for one rank and without the others, the graphs that a job compiles."""

import json
import re

import jobs
import mindspore
import numpy as np
import pytest
from ascend_contracts import contracts
from copying_memory import copying
from mindspore import Tensor
from slow_cases import few_of

from mindrlhf.backend.compile.graph import Graph

SMALL = ("data.prompts_per_step=4", "rollout.num_generations=4", "rollout.max_new_tokens=16", jobs.ONE_SHAPE)
UPDATE = ["optimizer/norm", "optimizer/apply", "optimizer/discard"]
GENERATE = ["generate/prefill", "generate/admit", "generate/decode"]
WHOLE = [*GENERATE, "train/scores", "train/loss", *UPDATE]  # of a reference, and of an update
FIRST = [*GENERATE, "train/forward", "train/forward", "train/backward", *UPDATE]
SECTIONS = ("vision_config.mrope_section=[4,2,2]", "vision_config.num_heads=1")  # of such heads, in text and tower
WIDER = ("hidden_size=64", "head_dim=16")  # heads that flash attention takes
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=32", "norm_topk_prob=True")
EXPERT_MODEL = (*EXPERTS, "model_type=qwen3_moe", "type=null", "qkv_has_bias=False")
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "window_size": 16,
    "fullatt_block_indexes": [0],
    "mrope_section": [2, 1, 1],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with the model YAMLs of a tiny model, without weights, tokenizer or prompts."""
    folder = tmp_path_factory.mktemp("pair")
    jobs.write_yamls(folder, 300)
    return folder


@pytest.fixture(scope="module")
def seeing(pair, tmp_path_factory):
    """The same with a vision tower."""
    folder = tmp_path_factory.mktemp("seeing")
    for name in ("train.yaml", "infer.yaml"):
        content = json.loads((pair / name).read_text())
        model = content["model"]["model_config"]
        del model["type"], model["qkv_has_bias"]
        model |= {"model_type": "qwen2_5_vl", "vision_config": TOWER, "vocab_size": 152064}  # with the image's token
        (folder / name).write_text(json.dumps(content))
    return folder


def words(folder, *settings) -> list[str]:
    yamls = ["--sft_path_train", folder / "train.yaml", "--sft_path_infer", folder / "infer.yaml"]
    return ["dry-run", *map(str, yamls), "--prompt_tokens", "32", *SMALL, *settings]


def compiled(folder, rank: int, *settings: str) -> list[str]:
    """The names of a rank's graphs, as printed and in the last line."""
    done = jobs.start([*words(folder, *settings), "--rank", str(rank)])
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    figures = json.loads(last)
    names = [graph["name"] for graph in figures["graphs"]]
    assert [line.split()[0] for line in lines] == names
    assert figures["rank"] == rank
    assert figures["seconds"] >= sum(graph["seconds"] for graph in figures["graphs"]) > 0
    assert figures["planned_bytes"] > 0 < figures["process_bytes"]
    return names


@pytest.mark.parametrize(("rank", "names"), few_of([(0, FIRST)], [(1, WHOLE)]))
def test_a_pipeline_stage_without_the_others(pair, rank, names):
    layouts = (*jobs.layout("train", "pp2"), *jobs.layout("infer", "dp2"), "algorithm.beta=0.04")
    assert compiled(pair, rank, *layouts) == names


@pytest.mark.slow
@pytest.mark.parametrize("placing", ["tp2 dp2", "tp2sp tp2", "dp2ep2 dp2", "zero3dp2 dp2", "dp2 tp2"])
def test_layouts(pair, placing):
    train, infer = placing.split()
    settings = [*jobs.layout("train", train), *jobs.layout("infer", infer), "algorithm.beta=0.04"]
    for role in ("train", "infer") if "ep" in train else ():
        settings += [f"{role}_yaml.model.model_config.{one}" for one in (*EXPERT_MODEL, "head_dim=8")]
    for rank in range(2):
        names = compiled(pair, rank, *settings)
        assert set(WHOLE) <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (("lora.rank=4", "memory.swap=True"), []),
        (("algorithm.advantage=gae",), ["train/scores", "train/loss", *UPDATE]),
        (("algorithm.advantage=remax",), GENERATE),
        (("algorithm.updates_per_iteration=2",), ["train/scores"]),
        (("rollout.weights=int8",), []),
    ],
)
def test_settings_with_other_graphs(pair, settings, more):
    assert sorted(compiled(pair, 0, "algorithm.beta=0.04", *settings)) == sorted([*WHOLE, *more])


@pytest.mark.slow
def test_ranks_that_train_and_ranks_that_generate(pair):
    assert compiled(pair, 0, "trainer.placement=split", "algorithm.beta=0.04") == WHOLE[3:]
    assert compiled(pair, 1, "trainer.placement=split", "algorithm.beta=0.04") == GENERATE


@pytest.mark.slow
def test_ranks_that_generate_and_score(pair):
    settings = ("trainer.placement=split", "algorithm.beta=0.04", "trainer.scoring_ranks=infer")
    assert compiled(pair, 0, *settings) == WHOLE[4:]
    assert compiled(pair, 1, *settings) == [*GENERATE, "train/scores"]


@pytest.mark.slow
def test_ranks_that_only_score(pair):
    sides = ("--trainer_ranks", "1", "--generator_ranks", "1", "--scorer_ranks", "2")
    settings = (*sides, "algorithm.beta=0.04", "algorithm.advantage=gae", "score_yaml.parallel_config.model_parallel=2")
    assert compiled(pair, 0, *settings) == WHOLE[4:]
    for rank in (2, 3):
        assert compiled(pair, rank, *settings) == ["train/scores", "train/scores", "train/loss", *UPDATE]


@pytest.mark.slow
@pytest.mark.parametrize(("freeze", "tower"), [("[]", []), ("[vision, merger]", ["tower/rows"])])
def test_a_model_that_sees(seeing, freeze, tower):
    layouts = (*jobs.layout("train", "tp2"), *jobs.layout("infer", "dp2"), "algorithm.beta=0.04")
    names = compiled(seeing, 1, *layouts, f"train.freeze={freeze}", "--image_tokens", "12")
    assert sorted(set(names)) == sorted([*WHOLE, *tower])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("algorithm.beta=0.04",), ("algorithm.advantage=gae",)])
def test_graphs_and_shapes_are_those_of_a_job(tmp_path, monkeypatch, settings):
    """Of a step whose answers are as long as they may be."""
    task = jobs.make_task(tmp_path)
    found: set[tuple] = set()
    call = Graph.__call__

    def noted(self, *inputs):
        found.add((self.name, self.constants, tuple((one.shape, str(one.dtype)) for one in inputs)))
        return call(self, *inputs)

    monkeypatch.setattr(Graph, "__call__", noted)
    longest = "rollout.min_new_tokens=16"
    trained = task.train(tmp_path / "run", longest, *settings, enable_compile_cache=None)
    assert jobs.call([*trained, "trainer.total_steps=1"]) == 0
    of_job = {one for one in found if one[0] != "ceiling"}  # which the preflight measures, once in a process
    found.clear()
    given = task.train(tmp_path / "dry", longest, *settings, enable_compile_cache=None)
    assert jobs.call(["dry-run", *given[1:]]) == 0
    discards = {one for one in found if one[0] == "optimizer/discard"}  # of a job only after a failed update
    assert found - discards == of_job
    assert not (tmp_path / "dry").exists()


def garbage(out):
    """Tensors of the same kinds as a graph's, without a number that means anything."""
    if isinstance(out, tuple):
        return tuple(map(garbage, out))
    values = np.empty_like(out.asnumpy())
    values.fill(np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).min)
    return Tensor(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "infer", "rank", "names"),
    [
        ("tp2pp2sp", "dp2tp2", 0, FIRST),
        ("tp2pp2sp", "dp2tp2", 3, WHOLE),
        ("zero3dp2", "dp2", 1, [*WHOLE, "train/forward", "train/backward"]),
    ],
)
def test_with_ascends_operators_and_garbage_from_every_graph(pair, monkeypatch, capsys, train, infer, rank, names):
    """As far as a CPU shows how a simulated device does: its operators and dtypes, and copies of its memory."""
    call = Graph.__call__
    monkeypatch.setattr(Graph, "__call__", lambda self, *inputs: garbage(call(self, *inputs)))
    layouts = [*jobs.layout("train", train), *jobs.layout("infer", infer), "algorithm.beta=0.04"]
    kinds = ("hidden_size=64", "compute_dtype=float16")
    wider = [f"{role}_yaml.model.model_config.{kind}" for role in ("train", "infer") for kind in kinds]
    with contracts(), copying():
        assert jobs.call([*words(pair, *layouts, *wider), "--rank", str(rank)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {graph["name"] for graph in figures["graphs"]} == set(names)


@pytest.mark.slow
def test_a_critic_computes_its_layers_again_too(pair, capsys):
    """The embedding and each layer but the last have a backward graph, in the policy and in the critic."""
    kinds = ("hidden_size=64", "num_layers=2", "compute_dtype=float16")
    wider = [f"{role}_yaml.model.model_config.{kind}" for role in ("train", "infer") for kind in kinds]
    again = "train_yaml.recompute_config.recompute=True"
    with contracts():
        assert jobs.call(words(pair, "algorithm.advantage=gae", again, *wider)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [graph["name"] for graph in figures["graphs"]]
    assert (names.count("train/backward"), names.count("train/loss")) == (4, 2)


@pytest.mark.parametrize(
    ("folder", "rank", "settings", "model"),
    few_of(
        [("pair", 1, ("trainer.placement=split",), ())],  # a rank that generates
        [
            ("pair", 0, ("algorithm.beta=0.04",), ()),
            ("pair", 0, ("algorithm.advantage=gae", "train_yaml.recompute_config.recompute=True"), ()),
            ("pair", 0, ("algorithm.beta=0.04", "lora.rank=4"), ()),
            ("pair", 0, (*jobs.layout("train", "tp2sp"), *jobs.layout("infer", "tp2")), ()),
            ("pair", 1, (*jobs.layout("train", "tp2pp2"), *jobs.layout("infer", "dp2tp2")), ()),
            ("pair", 3, (*jobs.layout("train", "tp2pp2"), *jobs.layout("infer", "dp2tp2")), ()),
            ("pair", 1, (*jobs.layout("train", "zero3dp2"), *jobs.layout("infer", "dp2")), ()),
            ("pair", 0, ("algorithm.beta=0.04",), EXPERT_MODEL),
            ("pair", 0, (*jobs.layout("train", "dp2ep2"), *jobs.layout("infer", "dp2")), EXPERT_MODEL),
            ("seeing", 0, ("algorithm.beta=0.04", "--image_tokens", "12"), SECTIONS),
            ("seeing", 0, ("train.freeze=[vision, merger]", "--image_tokens", "12"), SECTIONS),
        ],
    ),
)
def test_graphs_of_bfloat16_have_types(request, monkeypatch, capsys, folder, rank, settings, model):
    """With Ascend's operators, as far as MindSpore's front end goes: the CPU has no kernels for these products.

    The same job runs in float16 first, whose outputs stand for those in bfloat16.
    """
    call = Graph.__call__
    known: list = []
    compiled_kinds: set[tuple] = set()

    def noted(self, *inputs):
        known.append((self.name, call(self, *inputs)))
        return known[-1][1]

    def typed(self, *inputs):
        kinds = self, tuple((one.shape, one.dtype) for one in inputs)
        if kinds not in compiled_kinds:
            assert call(self, *inputs) is None  # it was not built
            compiled_kinds.add(kinds)
        name, out = known.pop(0)
        assert name == self.name
        return in_bfloat16(out)

    folder = request.getfixturevalue(folder)
    for dtype, seen in (("float16", noted), ("bfloat16", typed)):
        kinds = (*WIDER, f"compute_dtype={dtype}", *model)
        yamls = [f"{role}_yaml.model.model_config.{kind}" for role in ("train", "infer") for kind in kinds]
        with contracts(dtype) as device, monkeypatch.context() as patch:
            patch.setattr(Graph, "__call__", seen)
            patch.setenv("MS_DEV_PRECOMPILE_ONLY", "1" if dtype == "bfloat16" else "0")
            assert jobs.call([*words(folder, *settings, *yamls), "--rank", str(rank)]) == 0, capsys.readouterr().err
        assert device.product_dtypes == (dtype,)
    assert known == []


def in_bfloat16(out):
    """Tensors of a graph, with bfloat16 numbers in place of float16."""
    if isinstance(out, tuple | list):
        return type(out)(map(in_bfloat16, out))
    return Tensor(out.asnumpy().astype(np.float32), mindspore.bfloat16) if out.dtype == mindspore.float16 else out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--ranks", "8"), "--ranks is 8, and .*train.yaml and .*infer.yaml ask for 1; give 1."),
        (("--rank", "1"), "--rank is 1, and the job has the ranks 0 to 0; give one of them."),
    ],
)
def test_a_mistake_is_one_sentence(pair, settings, message):
    done = jobs.start(words(pair, *settings))
    assert done.returncode == 2
    assert re.match(f"mindrlhf dry-run: {message}", done.stderr.splitlines()[-1])
