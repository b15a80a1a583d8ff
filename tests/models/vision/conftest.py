"""A small Qwen2.5-VL with what another implementation stored of every stage."""

import pytest
from seeing_model import Seeing


@pytest.fixture(scope="session")
def seeing(shared) -> Seeing:
    return Seeing.load(shared / "golden" / "qwen2_5_vl_tiny")
