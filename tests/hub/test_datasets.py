"""Files of a dataset, chosen by split and subset."""

import pytest

from mindrlhf.errors import UserError
from mindrlhf.hub.datasets import choose

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
        (["trainer.jsonl", "constraint.jsonl"], "train", None, []),
        (["train.csv"], "train", None, []),
        (["only/train.parquet"], "train", None, ["only/train.parquet"]),
    ],
)
def test_files_of_a_split(files, split, subset, chosen):
    assert choose("a/b", files, split, subset) == chosen


def test_several_subsets_have_to_be_chosen_of():
    files = ["algebra/train.parquet", "geometry/train.parquet"]
    with pytest.raises(UserError, match=r"^a/b: has several subsets; give --subset one of algebra, geometry\.$"):
        choose("a/b", files, "train", None)
    with pytest.raises(UserError, match=r"^a/b: has no subset 'sets' with a split 'train'; give --subset one of alg"):
        choose("a/b", files, "train", "sets")
    assert choose("a/b", files, "train", "geometry") == files[1:]


def test_a_missing_part_is_not_passed_over():
    with pytest.raises(UserError, match=r"1 of its 2 files are in the hub's cache; .*download --repo-type dataset"):
        choose("a/b", SHARDS[:1], "train", None)
