"""`mindrlhf transform`: what is wrong is said in one sentence, and nothing is written or changed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from bad_places import file_size_limit
from layouts import shards_of
from sharded_files import (
    ARRAYS,
    MODEL,
    SOURCES,
    layout_of,
    listing,
    refuse,
    run,
    write_full_file,
    write_hf_folder,
    write_shards,
    write_yaml,
    yaml_goal,
)

from mindrlhf.errors import UserError
from mindrlhf.reshard.strategy import save_strategies


@pytest.mark.parametrize("more", [[], ["--transform_process_num", 2]])
def test_disk_full_half_way_leaves_nothing(tmp_path, more):
    goal = save_strategies(tmp_path / "goal", layout_of(pp=2))[0].parent  # the second rank's file is the larger one
    full = write_full_file(tmp_path / "full.ckpt")
    sizes = [sum(a.nbytes for a in shards.values()) for shards in shards_of(layout_of(pp=2), ARRAYS)]
    assert sizes[0] > sizes[1] + 10000
    before = listing(tmp_path)
    with file_size_limit(sizes[1] + 5000), pytest.raises(UserError, match=r"out: cannot be written \(File too large\)"):
        run("--src_checkpoint", full, "--dst_checkpoint", tmp_path / "out", "--dst_strategy", goal, *more)
    assert listing(tmp_path) == before
    with file_size_limit(sizes[1]), pytest.raises(UserError, match=r"o\.ckpt: cannot be written \(File too large\)"):
        run("--src_checkpoint", full, "--dst_checkpoint", tmp_path / "o.ckpt")
    assert listing(tmp_path) == before


def broken(name):
    def change(folder):
        arguments = SOURCES["yaml"](folder)
        cut = arguments[1]
        if name == "missing rank":
            shutil.rmtree(cut / "rank_3")
        elif name == "missing file":
            (cut / "rank_3" / "old_3.safetensors").unlink()
        elif name == "missing weight":
            shards = shards_of(layout_of(tp=4, pp=2), ARRAYS)[5]
            del shards["lm_head.weight"]
            write_full_file(cut / "rank_5" / "old_5.safetensors", shards)
        elif name == "wrong shape":
            shards = shards_of(layout_of(tp=4, pp=2), ARRAYS)[5]
            shards["lm_head.weight"] = np.zeros((5, 16), np.float32)
            write_full_file(cut / "rank_5" / "old_5.safetensors", shards)
        elif name == "other type":
            import safetensors.numpy

            shards = shards_of(layout_of(tp=4, pp=2), ARRAYS)[5]
            shards["lm_head.weight"] = np.zeros((4, 16), np.int8)
            safetensors.numpy.save_file(shards, cut / "rank_5" / "old_5.safetensors")
        elif name == "more layers":
            arguments[3] = write_yaml(folder / "fewer.yaml", MODEL.model_copy(update={"num_layers": 1}), tp=8)
            shutil.rmtree(cut)
            write_shards(cut, layout_of(tp=8))
        elif name == "more ranks":
            arguments[3] = write_yaml(folder / "fewer.yaml", tp=4)
        elif name == "truncated":
            file = cut / "rank_5" / "old_5.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
        return arguments

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (broken("missing rank"), r"cut: has no folder rank_3, and the layout is one of 8 ranks; give the folder with"),
        (broken("missing file"), r"rank_3: holds no \.safetensors and no \.ckpt file"),
        (broken("missing weight"), r"rank_5: lacks lm_head\.weight that the layout puts on rank 5"),
        (broken("wrong shape"), r"old_5\.safetensors: tensor lm_head\.weight has shape \[5, 16\] in place of \[4"),
        (
            broken("other type"),
            r"old_5\.safetensors: tensor lm_head\.weight is stored as I8, and float32, float16",
        ),
        (broken("more layers"), r"cut: holds model\.layers\.1\.attention.*, which the layout does not know"),
        (broken("more ranks"), r"cut: holds rank_7, and the layout is one of 4 ranks"),
        (broken("truncated"), r"old_5\.safetensors: the file is truncated"),
    ],
)
def test_bad_shards_are_refused(tmp_path, change, match):
    arguments = change(tmp_path)
    before = listing(tmp_path)
    refuse([*arguments, "--dst_checkpoint", tmp_path / "out"], match)
    assert listing(tmp_path) == before


def test_shard_of_wrong_shape_in_a_job_with_strategy_files(tmp_path):
    arguments = SOURCES["strategy"](tmp_path)
    shards = shards_of(layout_of(dp=2, tp=2, pp=2), ARRAYS)[6]
    shards["lm_head.weight"] = np.zeros((9, 16), np.float32)
    write_full_file(arguments[1] / "rank_6" / "old_6.ckpt", shards)
    refuse([*arguments, "--dst_checkpoint", tmp_path / "o.ckpt"], r"old_6\.ckpt: tensor lm_head\.weight has shape")


def test_strategy_of_another_model_is_refused(tmp_path):
    other = MODEL.model_copy(update={"num_layers": 2})
    goal = save_strategies(tmp_path / "other", layout_of(other, tp=2))[0]
    arguments = ["--src_checkpoint", write_full_file(tmp_path / "full.ckpt"), "--dst_checkpoint", tmp_path / "out"]
    refuse([*arguments, "--dst_strategy", goal], r"rank_0\.ckpt: says nothing of model\.layers\.2.* of .*full\.ckpt")
    yaml = write_yaml(tmp_path / "other.yaml", MODEL.model_copy(update={"num_layers": 4}))
    refuse([*arguments, "--dst_strategy", yaml], r"full\.ckpt: the weight model\.layers\.3\.")
    source = SOURCES["strategy"](tmp_path)
    refuse([*source, *arguments[2:], "--dst_strategy", yaml], r"cut: the model's model\.layers\.3\..* lacks it")
    source[3] = write_yaml(tmp_path / "src.yaml", dp=2, tp=2, pp=2)
    refuse([*source, *arguments[2:], "--dst_strategy", yaml], r"num_layers is 4 \(.*src\.yaml has 3\)")


def test_pipeline_stages_more_than_layers(tmp_path):
    yaml = write_yaml(tmp_path / "d.yaml", pp=4)
    arguments = ["--src_checkpoint", write_full_file(tmp_path / "full.ckpt"), "--dst_checkpoint", tmp_path / "out"]
    refuse([*arguments, "--dst_strategy", yaml], r"d\.yaml: .*pipeline_stage 4 is more than the model's 3 layers")


def test_destination_that_is_there_is_refused_and_kept(tmp_path):
    full = write_full_file(tmp_path / "full.ckpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    (tmp_path / "o.safetensors").write_text("mine")
    goal = yaml_goal(tmp_path)
    before = listing(tmp_path)
    source = ["--src_checkpoint", full]
    refuse([*source, "--dst_checkpoint", tmp_path / "out", *goal], r"out: the folder exists and is not empty")
    refuse([*source, "--dst_checkpoint", tmp_path / "o.safetensors"], r"o\.safetensors: exists already; remove it")
    assert listing(tmp_path) == before
    hf = write_hf_folder(tmp_path / "hf")
    refuse(["--src_checkpoint", hf, "--dst_checkpoint", hf / "out", *goal], r"out: lies inside of the source")
    refuse(["--src_checkpoint", hf, "--dst_checkpoint", hf, *goal], r"hf: the folder exists and is not empty")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--dst_checkpoint", "out", "--world_size", 4], r"--world_size is 4, and the layout to write .* has 8 ranks"),
        (["--dst_checkpoint", "out", "--rank_id", 2], r"--rank_id is 2, which needs --transform_by_rank True"),
        (["--dst_checkpoint", "out", "--rank_id", 8, "--transform_by_rank", "True"], r"the ranks 0 to 7"),
        (["--dst_checkpoint", "out", "--transform_process_num", 0], r"--transform_process_num is 0; set it to 1"),
        (["--dst_checkpoint", "out.ckpt"], r"out\.ckpt: a checkpoint of ranks is a folder; leave out the ending"),
        (["--dst_checkpoint", "out", "--dst_checkpoint_dir", "other"], r"give either --dst_checkpoint or"),
        ([], r"give either --dst_checkpoint or --dst_checkpoint_dir"),
    ],
)
def test_flags_that_do_not_fit(tmp_path, monkeypatch, arguments, match):
    monkeypatch.chdir(tmp_path)
    refuse(["--src_checkpoint", write_full_file(Path("full.ckpt")), *yaml_goal(Path()), *arguments], match)
    assert not list(tmp_path.glob("out*"))


def test_uncut_destination_needs_to_know_the_model(tmp_path):
    source = ["--src_checkpoint", write_full_file(tmp_path / "full.ckpt")]
    refuse([*source, "--dst_checkpoint", tmp_path / "hf"], r"hf: a Hugging Face folder needs the model's configuration")
    more = ["--transform_process_num", 2]
    refuse([*source, "--dst_checkpoint", tmp_path / "o.ckpt", *more], r"are about the files of ranks")


def test_shards_need_a_layout_and_uncut_weights_none(tmp_path):
    cut, yaml = SOURCES["yaml"](tmp_path)[1::2]
    refuse(["--src_checkpoint", cut, "--dst_checkpoint", tmp_path / "o.ckpt"], r"cut: holds the parts of 8 ranks; name")
    full = ["--src_checkpoint", write_full_file(tmp_path / "full.ckpt"), "--src_strategy", yaml]
    refuse([*full, "--dst_checkpoint", tmp_path / "o.ckpt"], r"full\.ckpt: has no folder rank_0, .*need no layout\)")
