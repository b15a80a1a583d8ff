"""Tools for the tests of conversations."""

from pathlib import Path

import pytest

HOSTILE = Path(__file__).with_name("hostile_tools.py")


@pytest.fixture
def hostile(tmp_path):
    """A copy, so that nothing is written beside the tests."""
    path = tmp_path / "hostile_tools.py"
    path.write_text(HOSTILE.read_text())
    return path
