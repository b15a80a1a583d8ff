"""Tools for the tests of conversations."""

from pathlib import Path

import pytest

from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.data.turns import TurnTemplate

HOSTILE = Path(__file__).with_name("hostile_tools.py")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How many apples does Tom have left?", "3+4=7 #### 7"] * 20, 320)


@pytest.fixture(scope="module")
def template(tokenizer):
    return TurnTemplate(tokenizer)


@pytest.fixture
def hostile(tmp_path):
    """A copy, so that nothing is written beside the tests."""
    path = tmp_path / "hostile_tools.py"
    path.write_text(HOSTILE.read_text())
    return path


@pytest.fixture
def owner(hostile, tmp_path):
    """owner(kind): a program whose pool has one conversation, which prints the answer to a fault and then waits."""

    def of(kind: str) -> Path:
        script = tmp_path / "owner.py"
        script.write_text(
            "import sys\n"
            "from mindrlhf.environments.pool import EnvironmentPool\n"
            "if __name__ == '__main__':\n"
            f"    pool = EnvironmentPool({{'e': {f'{hostile}:Counter'!r}}})\n"
            "    pool.reset((0,), 'e', {})\n"
            "    pool.collect(wait_for_one=True)\n"
            f"    pool.call((0,), [('fault', {{'kind': {kind!r}}})])\n"
            "    print(pool.collect(wait_for_one=True)[0].answers[0].value, flush=True)\n"
            "    sys.stdin.read()\n"
        )
        return script

    return of
