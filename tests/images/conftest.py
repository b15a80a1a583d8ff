"""Stored pictures of a small Qwen2.5-VL, and the arrays of every stage."""

import json

import numpy as np
import pytest


@pytest.fixture(scope="session")
def folder(shared):
    return shared / "golden" / "qwen2_5_vl_tiny"


@pytest.fixture(scope="session")
def stored(folder):
    with np.load(folder / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def facts(folder):
    return json.loads((folder / "golden.json").read_text(encoding="utf-8"))
