"""The plan of models that see: what a vision tower adds is at least what graphs were seen to have."""

import json
import subprocess
import sys
from dataclasses import replace
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
from planned_job import MODEL, work

from mindrlhf.cli import main
from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.images.processor import Picture
from mindrlhf.memory.activations import Stage
from mindrlhf.memory.estimate import rank_plan
from mindrlhf.memory.pictures import NO_PICTURES, Lengths, Padded, Pictures
from mindrlhf.memory.step_time import Rates, step_seconds
from mindrlhf.memory.tower_activations import TowerBatch
from mindrlhf.metrics.tower_flops import tower_flops
from mindrlhf.types import Prompt
from mindrlhf.units import GIB, MIB

WINDOW = 64  # patches of a window
FROZEN = {"frozen": ("vision", "merger")}
GRID = (1, 16, 32)
PICTURES = Pictures(2, GRID, 2)


def seeing(width=128, inner=344, heads=4, depth=6, whole=2, **changes) -> ModelConfig:
    vision = VisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=inner,
        num_heads=heads,
        full_attention_blocks=tuple(range(whole)),
        sections=(1, 1),
        images=ImageSettings(),
    )
    return MODEL.model_copy(update={"family": "qwen2_5_vl", "vision": vision, **changes})


def grown(kind: str, model: ModelConfig, pictures: int, windows: int, fused: bool) -> float:
    """Planned MiB of a process that gets graphs with these square pictures."""
    tower = TowerBatch(model, Padded(pictures, windows * WINDOW), 4, fused=fused)
    if kind == "frozen":
        model = model.model_copy(update=FROZEN)
        side = 8 * isqrt(windows)
        stage = Stage(model, tp=1, layers=1, is_last=True, sequence=False, itemsize=4, fused=fused)
        tower = TowerBatch.outside(stage, Pictures(pictures, (1, side, side), 2), 1)
    does = {"frozen": "update", "prefill": "generate"}.get(kind, kind)
    return (tower.peak_bytes(0, does) + tower.graph_bytes(does)) / MIB


@pytest.mark.parametrize(
    ("kind", "pictures", "windows", "sizes", "seen"),
    [
        ("score", 4, 16, {"whole": 0}, 87),
        ("score", 4, 16, {"whole": 0, "depth": 12}, 95),
        ("score", 4, 16, {"whole": 0, "inner": 688, "depth": 12}, 103),
        ("score", 4, 16, {"whole": 0, "width": 256, "depth": 12}, 110),
        ("score", 4, 16, {}, 86),
        ("score", 8, 16, {}, 133),
        ("frozen", 4, 16, {}, 56),
        ("frozen", 1, 64, {}, 88),
        ("prefill", 4, 16, {"depth": 12}, 86),
        ("update", 4, 16, {"whole": 0}, 271),
        ("update", 4, 16, {"whole": 0, "depth": 12}, 414),
        ("update", 4, 16, {"whole": 0, "inner": 688, "depth": 12}, 542),
        ("update", 4, 16, {"whole": 0, "width": 256, "depth": 12}, 575),
        ("update", 4, 16, {"whole": 0, "heads": 8, "depth": 12}, 414),
        ("update", 4, 16, {}, 271),
        ("update", 4, 16, {"whole": 6}, 271),
        ("update", 8, 16, {}, 472),
        ("update", 1, 64, {}, 272),
    ],
)
def test_a_fused_tower_has_at_least_what_it_was_seen_to_have(kind, pictures, windows, sizes, seen):
    """MiB by which MindSpore 2.9's process grew (`helpers/tower_memory.py`), and no more than 17% above it."""
    assert seen <= grown(kind, seeing(**sizes), pictures, windows, True) <= 1.17 * seen


@pytest.mark.parametrize(
    ("kind", "pictures", "windows", "sizes", "seen"),
    [
        ("score", 4, 16, {"whole": 0}, 345),
        ("score", 4, 16, {"whole": 0, "depth": 12}, 601),
        ("score", 4, 16, {"whole": 0, "inner": 688, "depth": 12}, 747),
        ("score", 4, 16, {"whole": 0, "width": 256, "depth": 12}, 992),
        ("score", 4, 16, {"whole": 0, "heads": 8}, 348),
        ("score", 4, 16, {}, 529),
        ("score", 4, 16, {"whole": 6}, 522),
        ("score", 8, 16, {}, 1005),
        ("frozen", 4, 16, {"whole": 0, "depth": 12}, 204),
        ("frozen", 4, 16, {}, 175),
        ("frozen", 8, 16, {}, 180),
        ("frozen", 1, 64, {}, 1107),
        ("prefill", 4, 16, {"depth": 12}, 785),
        ("update", 4, 16, {"whole": 0}, 845),
        ("update", 4, 16, {"whole": 0, "depth": 12}, 1571),
        ("update", 4, 16, {"whole": 0, "inner": 688, "depth": 12}, 1893),
        ("update", 4, 16, {"whole": 0, "width": 256, "depth": 12}, 2362),
        ("update", 4, 16, {"whole": 0, "heads": 8, "depth": 12}, 1812),
        ("update", 4, 16, {}, 1449),
        ("update", 4, 16, {"whole": 6}, 2733),
        ("update", 4, 16, {"heads": 8}, 2224),
        ("update", 8, 16, {}, 2784),
        ("update", 1, 64, {}, 3694),
    ],
)
def test_a_composed_tower_has_at_least_what_it_was_seen_to_have(kind, pictures, windows, sizes, seen):
    """MiB by which MindSpore 2.9's process grew beside a fused text, and no more than 17% above it."""
    assert seen <= grown(kind, seeing(**sizes), pictures, windows, False) <= 1.17 * seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["update", "frozen", "score", "prefill"])
def test_a_fused_tower_grows_as_planned(kind):
    script = Path(__file__).parents[1] / "helpers" / "tower_memory.py"
    seen = float(subprocess.run([sys.executable, script, kind], capture_output=True, text=True, check=True).stdout)
    assert seen <= grown(kind, seeing(), 4, 16, True) <= 1.17 * seen


def test_what_does_not_train_is_not_kept():
    padded = Padded(2, 1024)
    parts = {"all": {}, "vision": {"frozen": ("vision",)}, "both": {"frozen": ("vision", "merger")}}
    parts |= {"text adapters": {"adapter": Adapter(4, 8)}}
    parts |= {"tower adapters": {"adapter": Adapter(4, 8, target_modules=("qkv",))}}
    kept = {name: TowerBatch(seeing(**changes), padded, 4).kept_bytes for name, changes in parts.items()}
    assert kept["all"] == kept["tower adapters"] > 20 * kept["vision"]
    assert kept["vision"] > kept["both"] == kept["text adapters"] == 2 * 1024 // 4 * MODEL.hidden_size * 4


def test_attention_without_scores_grows_with_the_image_and_not_with_its_square():
    """As with Ascend's operator for 16 bits; the composed one has a score for each pair of patches."""
    sizes = [Padded(1, windows * WINDOW) for windows in (16, 64)]
    for scoreless in (True, False):
        small, large = (TowerBatch(seeing(), padded, 2, scoreless) for padded in sizes)
        for count in ("forward_bytes", "kept_bytes"):
            growth = getattr(large, count) / getattr(small, count)
            assert growth == pytest.approx(4, rel=1e-3) if scoreless else growth > 6


def test_the_first_stage_alone_sees():
    lengths = Lengths(600, pictures=PICTURES)
    settings = ("train.max_tokens_per_micro_batch=2048",)
    layout = {"pipeline_stage": 2, "model_parallel": 2}
    seen, blind = (work(layout, {"data_parallel": 4}, settings, model, lengths) for model in (seeing(), MODEL))
    for phase in ("gen", "ref", "update_actor"):
        grows = [rank_plan(seen, r).activations[phase] > rank_plan(blind, r).activations[phase] for r in range(4)]
        assert grows == ([True] * 4 if phase == "gen" else [True, True, False, False]), phase
    assert rank_plan(seen, 0).process > rank_plan(blind, 0).process


def test_pictures_of_a_batch_are_padded_to_few_sizes():
    vision = seeing().vision
    assert PICTURES.tokens == 128
    assert PICTURES.padded(3, vision) == (6, 8 * WINDOW)  # 2 x 4 windows
    assert Pictures(1, (1, 2, 34), 2).padded(5, vision) == (6, 6 * WINDOW)  # 1 x 5 windows
    assert NO_PICTURES.padded(5, vision) == (1, WINDOW), "one of padding"


@pytest.mark.parametrize(
    ("tokens", "grid"), [(1, (2, 2)), (12, (6, 8)), (1280, (64, 80)), (17, (8, 10)), (26, (10, 12)), (0, (0, 0))]
)
def test_an_assumed_picture_is_nearly_square(tokens, grid):
    pictures = Pictures.of_tokens(tokens, seeing().vision)
    assert pictures.grid == ((1, *grid) if tokens else (0, 0, 0))
    assert tokens <= pictures.tokens * pictures.count <= 1.2 * tokens


def test_a_prompt_has_the_most_pictures_each_as_large_as_the_largest():
    vision = seeing().vision

    def picture(rows, columns):
        return Picture(np.zeros((28 * rows, 28 * columns, 3), np.uint8), bytes([rows, columns]), vision.images)

    shown = [(picture(2, 3), picture(1, 1), picture(1, 1)), (picture(9, 5),), ()]
    prompts = [Prompt(i, np.zeros(9, np.int32), pictures=pictures) for i, pictures in enumerate(shown)]
    assert Pictures.of(prompts, vision) == Pictures(3, (1, 18, 10), 2, different=6 + 1 + 45)
    assert Pictures.of(prompts[2:], vision) == Pictures.of(prompts, None) == NO_PICTURES


def test_every_tensor_parallel_rank_computes_the_images_of_its_prompts():
    """Text is divided by the ranks of a replica, the images of a prompt are not."""
    model, rates = seeing(), Rates(1e9, 1e9, float("inf"))
    shown, hidden = Lengths(600, pictures=PICTURES), Lengths(600)
    images = sum(tower_flops(model, PICTURES.grids))
    for layout, replicas in (({"model_parallel": 4}, 1), ({"data_parallel": 2, "model_parallel": 2}, 2)):
        seconds, without = (
            step_seconds(work(layout, layout, (), model, lengths), rates) for lengths in (shown, hidden)
        )
        each = 16 / replicas * images / 1e9
        for phase, passes in (("gen", 1), ("ref", 1), ("update_actor", 3)):
            assert seconds[phase] - without[phase] == pytest.approx(passes * each), phase


def test_a_tower_that_stays_computes_images_when_they_are_answered():
    rates = Rates(1e9, 1e9, float("inf"))
    seconds, without = (
        step_seconds(work({}, {}, (), seeing(**FROZEN), lengths), rates)
        for lengths in (Lengths(600, pictures=PICTURES), Lengths(600))
    )
    images = 16 * sum(tower_flops(seeing(), PICTURES.grids)) / 1e9
    grown = {phase: seconds[phase] - without[phase] for phase in ("gen", "ref", "update_actor")}
    assert grown == pytest.approx({"gen": images, "ref": 0, "update_actor": 0}, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "settings", "different", "expected"),
    [
        (FROZEN, (), None, GIB),
        (FROZEN, ("train.tower_cache_gb=0.25",), None, GIB // 4),
        (FROZEN, ("train.tower_cache_gb=0",), 1000, 0),
        (FROZEN, (), 1000, 1000 * MODEL.hidden_size * 4),
        (FROZEN, ("train.tower_cache_gb=1e-6",), 1000, int(1e-6 * GIB)),
        ({"adapter": Adapter(4, 8)}, (), 1000, 1000 * MODEL.hidden_size * 4),
        ({}, (), None, 0),
        ({"frozen": ("vision",)}, (), 1000, 0),
    ],
)
def test_known_rows_are_counted_within_their_limit(changes, settings, different, expected):
    """Policy, reference and generator share them; they are a part of the process."""
    lengths = Lengths(600, pictures=replace(PICTURES, different=different))
    found = work({}, {}, settings, seeing(**changes), lengths)
    without = work({}, {}, ("train.tower_cache_gb=0",), seeing(**changes), lengths)
    assert found.image_rows_bytes(0) == expected
    assert rank_plan(found, 0).process - rank_plan(without, 0).process == expected


def test_a_text_s_graph_takes_rows_of_all_images_and_the_tower_one_image():
    lengths = Lengths(600, pictures=PICTURES)
    settings = ("train.max_tokens_per_micro_batch=2048",)
    outside, inside = (work({}, {}, settings, seeing(**changes), lengths) for changes in (FROZEN, {}))
    (one,) = outside.towers(0, next(one for one in outside.passes if one.kind == "update"))
    (other,) = inside.towers(0, next(one for one in inside.passes if one.kind == "update"))
    assert one.padded == other.padded._replace(count=1)
    tokens = GRID[1] * GRID[2] // 4
    assert one.array_bytes == 4 * MODEL.hidden_size * other.padded.count * tokens
    assert one.kept_bytes == one.output_bytes < other.kept_bytes / 20


PAIR = ["--sft_path_train", "finetune_qwen2_5_vl_3b", "--sft_path_infer", "predict_qwen2_5_vl_3b_instruct"]


def test_a_plan_says_which_images_it_assumes(capsys):
    def text(*more):
        main(["plan", *PAIR, *more])
        return capsys.readouterr().out

    one = "prompts with at most 1 image of at most"
    assert f"{one} 1,280 tokens (the largest image; else --image_tokens)" in text()
    assert f"{one} 320 tokens (--image_tokens)" in text("--image_tokens", "320")
    assert f"{one} 100 tokens (the largest" in text("--prompt_tokens", "100")
    assert "prompts without images (--image_tokens)" in text("--image_tokens", "0")
    figures = []
    for tokens in ("0", "320"):
        main(["plan", *PAIR, "--image_tokens", tokens, "--json"])
        figures.append(json.loads(capsys.readouterr().out))
    assert [(one["images"], one["image_tokens"]) for one in figures] == [(0, 0), (1, 320)]
    less, more = (one["flops"] for one in figures)
    assert more["update_actor"] - less["update_actor"] == pytest.approx(3 * (more["ref"] - less["ref"]))
    assert more["gen"] > less["gen"]


def test_a_plan_counts_a_frozen_tower_once(capsys):
    freeze = "train.freeze=[vision, merger]"
    main(["plan", *PAIR, freeze])
    assert "the vision tower does not train: a process keeps up to 1.00 GiB of images' rows" in capsys.readouterr().out
    figures = []
    for tokens in ("0", "320"):
        main(["plan", *PAIR, freeze, "--image_tokens", tokens, "--json"])
        figures.append(json.loads(capsys.readouterr().out)["flops"])
    less, more = figures
    grown = {phase for phase in less if more[phase] > less[phase]}
    assert grown == {"gen"}


def test_image_tokens_that_mean_nothing_are_refused(capsys):
    text = ["--sft_path_train", "finetune_qwen2_5_3b", "--sft_path_infer", "predict_qwen2_5_3b_instruct"]
    for arguments, words in (
        ([*text, "--image_tokens", "9"], "--image_tokens is 9, and a model of the family qwen2 takes text alone"),
        ([*PAIR, "--image_tokens", "3073"], "--image_tokens is 3073, and must be from 0 to the prompt's 3072 tokens"),
        ([*PAIR, "--image_tokens", "-1"], "--image_tokens is -1, and must be from 0"),
    ):
        assert main(["plan", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1
