"""A pyarrow that does not fit NumPy, which ends in a sentence."""

import sys

import pytest

from mindrlhf.data.parquet import read_parquet, write_parquet
from mindrlhf.errors import UserError


def test_a_pyarrow_that_cannot_be_imported_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for read in (read_parquet, lambda path: write_parquet(path, [{"a": 1}])):
        with pytest.raises(UserError, match=r"x.parquet: pyarrow.* cannot be imported .*pip install 'pyarrow<26' 'pa"):
            read(tmp_path / "x.parquet")
