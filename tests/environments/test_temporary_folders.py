"""Folders of conversations' temporary files: used again as they were made, or removed."""

from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from mindrlhf.environments import pool as pools
from mindrlhf.environments.pool import EnvironmentPool

PLACES = '''
import os, tempfile
from pathlib import Path

class Places:
    def place(self, kind: str) -> str:
        """Tell where temporary files go, and what is there.

        Args:
            kind: What to do.
        """
        folder = Path(tempfile.gettempdir())
        there = list(folder.iterdir())
        if kind == "write":
            (folder / "file").write_text("mine")
        elif kind == "close":
            folder.chmod(0o500)
        elif kind == "remove":
            folder.rmdir()
        return f"{folder} {os.environ['TMPDIR'] == str(folder)} {there}"
'''


def ask_place(pool, number, kind):
    """Its folder, whether programs have it too, and what was there."""
    pool.call((number,), [("place", {"kind": kind})])
    (outcome,) = pool.collect(wait_for_one=True)
    return outcome.answers[0].value.split(" ", 2)


@pytest.mark.parametrize(("kind", "again"), [("look", True), ("write", False), ("close", False), ("remove", False)])
def test_a_folder_is_used_again_only_as_it_was_made(tmp_path, kind, again):
    (tmp_path / "places.py").write_text(PLACES)
    with EnvironmentPool({"": f"{tmp_path}/places.py:Places"}) as pool:
        server = psutil.Process(pool._server._process.pid)
        found = []
        for number, asked in enumerate((kind, "look", "look")):
            pool.reset((number,), "", {})
            pool.collect(wait_for_one=True)
            found.append(ask_place(pool, number, asked))
            pool.end((number,))
            wait_until(lambda: not server.children())
        folders = [Path(folder) for folder, *_ in found]
        assert (folders[0] == folders[1], folders[1] == folders[2]) == (again, True)
        wait_until(lambda: folders[0].exists() == again)
        assert found[1][1:] == ["True", "[]"]


def test_a_server_in_place_of_a_dead_one_makes_other_folders(tmp_path, monkeypatch):
    """Those of the dead one's conversations are still there."""
    monkeypatch.setattr(pools, "MOST_BEGINS", 1)
    (tmp_path / "places.py").write_text(PLACES)
    with EnvironmentPool({"": f"{tmp_path}/places.py:Places"}) as pool:
        found = []
        for number in range(3):
            pool.reset((number,), "", {})
            pool.collect(wait_for_one=True)
            found.append(ask_place(pool, number, "look")[0])
            server = psutil.Process(pool._server._process.pid)
            server.kill()
            psutil.wait_procs([server], timeout=5)
    assert len(set(found)) == 3
