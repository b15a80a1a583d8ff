"""Files of a dataset, chosen by split and subset."""

import json

import pytest

from mindrlhf.data.source import read_source
from mindrlhf.errors import UserError
from mindrlhf.hub.datasets import choose, dataset_files

GSM8K = [
    *(".gitattributes", "README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
    *("socratic/train-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet"),
]
SHARDS = ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"]
CONVERTED = ["main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet"]


@pytest.mark.parametrize(
    ("files", "split", "subset", "chosen"),
    [
        (GSM8K, "train", None, ["main/train-00000-of-00001.parquet"]),
        (GSM8K, "test", None, ["main/test-00000-of-00001.parquet"]),
        (GSM8K, "test", "socratic", ["socratic/test-00000-of-00001.parquet"]),
        (SHARDS, "train", None, ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (CONVERTED, "train", None, CONVERTED[:2]),
        (["train.jsonl", "test.jsonl", "dataset_infos.json"], "train", None, ["train.jsonl"]),
        (["train.json", "train.parquet"], "train", None, ["train.parquet"]),
        (["math.jsonl", "README.md"], "train", None, ["math.jsonl"]),  # a single file is the training split
        (["math.jsonl"], "test", None, []),
        (["trainer.jsonl", "constraint.jsonl"], "train", None, ["constraint.jsonl", "trainer.jsonl"]),  # no split named
        (["train.csv"], "train", None, []),
        (["only/train.parquet"], "train", None, ["only/train.parquet"]),
    ],
)
def test_files_of_a_split(files, split, subset, chosen):
    assert choose("a/b", files, split, subset) == chosen


def test_several_subsets_have_to_be_chosen_of():
    files = ["algebra/train.parquet", "geometry/train.parquet"]
    with pytest.raises(
        UserError, match=r"^a/b: has several subsets; give `mindrlhf data` --subset one of algebra, geometry\.$"
    ):
        choose("a/b", files, "train", None)
    with pytest.raises(
        UserError, match=r"^a/b: has no subset 'sets' with a split 'train'; give `mindrlhf data` --subset one of al"
    ):
        choose("a/b", files, "train", "sets")
    assert choose("a/b", files, "train", "geometry") == files[1:]


def test_a_missing_part_is_not_passed_over():
    with pytest.raises(UserError, match=r"1 of its 2 files are in the hub's cache; .*download --repo-type dataset"):
        choose("a/b", SHARDS[:1], "train", None)


def folder_of(tmp_path, *files, card=None):
    """A folder whose files have one row each, the file's name."""
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"question": file}) + "\n")
    if card:
        (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# Rows\n")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (["train.jsonl", "test.jsonl"], "", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], ":test", ["test.jsonl"]),
        (["a_training.jsonl", "dev.jsonl", "eval-2.jsonl"], "", ["a_training.jsonl"]),
        (["a_training.jsonl", "dev.jsonl", "eval-2.jsonl"], ":validation", ["dev.jsonl"]),
        (["a_training.jsonl", "dev.jsonl", "eval-2.jsonl"], ":test", ["eval-2.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], "", ["train/a.jsonl", "train/b.jsonl"]),
        (["Train.jsonl", "Test.jsonl"], "", ["Train.jsonl"]),
        (["a.jsonl", "b.jsonl"], "", ["a.jsonl", "b.jsonl"]),
        (["gsm8k_train.json", "gsm8k_test.json", "dataset_infos.json"], "", ["gsm8k_train.json"]),
        (["train.jsonl", ".cache/train.jsonl", "__pycache__/train.jsonl"], "", ["train.jsonl"]),
        (["train_sft.jsonl", "test_sft.jsonl"], ":train_sft", ["train_sft.jsonl"]),
        (["constraint.jsonl"], "", ["constraint.jsonl"]),
    ],
)
def test_a_folder_gives_the_split_that_is_asked_for(tmp_path, files, split, found):
    rows = read_source(f"{folder_of(tmp_path, *files)}{split}")
    assert [row.values["question"] for row in rows] == found


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["test.jsonl"], "has no split 'train' in parquet or JSONL files; there are test.jsonl"),
        (["test.jsonl", "a.jsonl"], "has no split 'train'"),
        (["train_test.jsonl"], "train_test.jsonl could be of the splits train, test; rename it, or name the files"),
        (["test/train.jsonl"], "test/train.jsonl could be of the splits train, test"),
        (["train.jsonl", "train.json"], "has the split 'train' in several formats, train.json, train.jsonl; name the"),
        (
            ["train-00001-of-00002.jsonl", "test.jsonl"],
            "1 of its 2 files are there, train-00001-of-00002.jsonl; add the others, or name the files that you mean",
        ),
        (
            ["a/x.jsonl", "b/x.jsonl"],
            "has several subsets; give `mindrlhf data` --subset one of a, b, or name its files",
        ),
    ],
)
def test_a_folder_that_leaves_a_doubt(tmp_path, files, message):
    with pytest.raises(UserError, match=f"{tmp_path}: {message}"):
        read_source(folder_of(tmp_path, *files))


def test_shards_with_the_name_of_their_split():
    files = [f"data/{split}-00000-of-00001-ab12.parquet" for split in ("train_sft", "test_sft", "train_gen")]
    assert choose("a/b", files, "train_sft", None) == files[:1]
    assert choose("a/b", files, "train", None) == []


CARD = """configs:
- config_name: easy
  data_files:
  - {split: train, path: "part-*.jsonl"}
  - {split: test, path: [last.jsonl]}
- config_name: hard
  default: true
  data_files: {train: hard/*}
"""


def test_a_card_lists_splits_and_subsets(tmp_path):
    folder = folder_of(tmp_path, "part-1.jsonl", "part-2.jsonl", "last.jsonl", "hard/test.jsonl", card=CARD)
    names = lambda *named: [file.relative_to(folder).as_posix() for file in dataset_files(str(folder), *named)]  # noqa: E731
    assert names("train") == ["hard/test.jsonl"]
    assert names("train", "easy") == ["part-1.jsonl", "part-2.jsonl"]
    assert names("test") == ["last.jsonl"]
    with pytest.raises(
        UserError, match="has no subset 'hard' with a split 'test'; give `mindrlhf data` --subset one of easy"
    ):
        names("test", "hard")


@pytest.mark.parametrize("card", ["license: mit", "configs: [", "configs: 3", "configs: [{config_name: a}]"])
def test_a_card_that_lists_no_files(tmp_path, card):
    folder = folder_of(tmp_path, "train.jsonl", "test.jsonl", card=card)
    assert [file.name for file in dataset_files(str(folder))] == ["train.jsonl"]


def test_the_only_split(tmp_path):
    """None asks which of several splits is meant."""
    folder = str(folder_of(tmp_path, "test.jsonl"))
    assert [file.name for file in dataset_files(folder, None)] == ["test.jsonl"]
    folder_of(tmp_path, "train.jsonl")
    with pytest.raises(UserError, match=f"has the splits test, train; name one, {folder}:test say"):
        dataset_files(folder, None)
