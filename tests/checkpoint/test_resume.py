"""Which checkpoint a path means, and that no damaged or foreign one is ever read."""

import json
import shutil

import numpy as np
import pytest
from sharded_files import TIED, layout_of, listing
from slow_cases import few_of
from training_states import assert_holds, read_all, save_step

from mindrlhf.checkpoint import manifest
from mindrlhf.checkpoint.manifest import Manifest
from mindrlhf.checkpoint.resume import Checkpoint, choose, locate
from mindrlhf.errors import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three steps, written by four ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20, 30):
        save_step(folder, step, dp=2, tp=2)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "ckpt")


# --- what a path means ---


def test_what_a_path_means(copy):
    steps = [copy / f"step_0000{step}" for step in (30, 20, 10)]
    assert locate(copy) == locate(str(copy)) == steps
    assert locate(copy / "step_000010") == locate(copy / "step_000010" / "") == [steps[2]]
    assert locate(copy / "latest") == [steps[0]]
    renamed = copy.parent / "the good one"
    steps[1].rename(renamed)
    assert_holds(choose(locate(renamed))[0].folder, 20)


@pytest.mark.parametrize("name", ["none", "model.safetensors", "empty"])
def test_what_is_no_checkpoint(tmp_path, name):
    (tmp_path / "model.safetensors").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{name}: holds no training checkpoint; give a step_N folder"):
        locate(tmp_path / name)


@pytest.mark.parametrize("content", ["", "step_000040\nabc\n", "../x y\n", "step_000030\n" + "0" * 64, "\xff"])
def test_a_pointer_that_names_nothing(copy, content):
    (copy / "latest").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"latest: names no whole checkpoint"):
        locate(copy / "latest")


# --- damage ---


def test_a_damaged_one_is_passed_over_by_name(copy):
    (copy / "step_000030" / "rank_1" / "exp_avg.safetensors").unlink()
    with (copy / "step_000020" / "rank_0" / "model.safetensors").open("r+b") as file:
        file.seek(500)
        file.write(b"\x01")
    checkpoint, problems = choose(locate(copy))
    assert checkpoint.step == 10
    assert "step_000030/rank_1/exp_avg.safetensors: cannot be read (No such file or directory)" in problems[0]
    assert "step_000020/rank_0/model.safetensors: is damaged" in problems[1]
    shutil.rmtree(copy / "step_000010")
    with pytest.raises(UserError, match=r"no checkpoint can be used: .*step_000030.*step_000020"):
        choose(locate(copy))
    with pytest.raises(UserError, match=r"^\S+step_000020/rank_0/model.safetensors: is damaged \(its checksum"):
        choose(locate(copy / "step_000020"))


def test_ranks_share_the_checking_and_agree(copy, monkeypatch):
    """Each of 3 ranks checks its own share of the files, and all refuse what one of them finds."""
    checked = []
    verify = Manifest.verify
    monkeypatch.setattr(Manifest, "verify", lambda self, at, names: (checked.append(names), verify(self, at, names)))
    bad = copy / "step_000030" / "rank_2" / "model.safetensors"
    bad.write_bytes(bad.read_bytes()[:-4])
    found = []

    def agree(problem):
        found.append(problem)
        return problem if problem else "another rank's finding" if len(found) == 1 else None

    for rank in range(3):
        found.clear()
        checkpoint, _ = choose(locate(copy), agree, lambda one, rank=rank: one.verify(rank, 3))
        assert checkpoint.step == 20
    whole = sorted(Checkpoint.open(copy / "step_000020").manifest.files)
    assert sorted(name for names in checked[1::2] for name in names) == whole


def test_a_checkpoint_under_anothers_name(copy):
    shutil.rmtree(copy / "step_000030")
    (copy / "step_000010").rename(copy / "step_000030")
    checkpoint, problems = choose(locate(copy))
    assert checkpoint.step == 20
    assert "step_000030: holds the checkpoint of step 10; give the folder its name back" in problems[0]


def rewrite(folder, change):
    """A manifest that somebody has edited, its checksum included."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    content.pop("sha256", None)
    content["sha256"] = manifest._digest(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def test_foreign_manifests(copy):
    folder = copy / "step_000010"
    rewrite(folder, lambda content: content.update(version=2))
    with pytest.raises(UserError, match="was written in version 2 of the format; use one of version 1"):
        Checkpoint.open(folder)
    rewrite(folder, lambda content: content.update(format="another suite's"))
    with pytest.raises(UserError, match="is not the manifest of a training checkpoint"):
        Checkpoint.open(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match="a JSON object is needed"):
        Checkpoint.open(folder)


def test_a_checkpoint_of_another_model(copy):
    checkpoint, _ = choose(locate(copy))
    with pytest.raises(UserError, match=r"step_000030: is a checkpoint of another model \(lm_head.weight \[16, 16\]"):
        read_all(checkpoint, layout_of(TIED), "model")


@pytest.mark.parametrize("name", ["../ckpt/step_000010", "{copy}/../ckpt/step_000010"])
def test_a_pointer_that_leads_elsewhere(copy, name):
    name = name.format(copy=copy)
    checksum = manifest.describe(copy / name / "manifest.json").sha256
    (copy / "latest").write_text(f"{name}\n{checksum}\n")
    with pytest.raises(UserError, match="latest: names no whole checkpoint"):
        locate(copy / "latest")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "rank_0/../../outside", "", "a\0b"])
def test_a_manifest_that_names_files_elsewhere(copy, name):
    folder = copy / "step_000010"
    rewrite(folder, lambda content: content["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(UserError, match=r"manifest\.json: files\..* not a path inside of its folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("files"),
        lambda content: content.update(files=[1]),
        lambda content: content["files"].update(x=3),
        lambda content: content["files"].update(x={"bytes": "1", "sha256": "0"}),
        lambda content: content.pop("step"),
        lambda content: content.update(step="10"),
        lambda content: content.update(step=-10),
        lambda content: content.pop("version"),
    ],
)
def test_manifests_that_no_run_writes(copy, change):
    folder = copy / "step_000010"
    rewrite(folder, change)
    with pytest.raises(UserError, match=r"manifest\.json: .*; use "):
        Checkpoint.open(folder)


def stated(folder, change):
    """The checkpoint with a `state.json` that somebody has edited, and the manifest that goes with it."""
    path = folder / "state.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))
    described = manifest.describe(path)
    rewrite(folder, lambda of: of["files"].update({path.name: {"bytes": described.bytes, "sha256": described.sha256}}))
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    return checkpoint


def in_layout(key, value):
    return lambda content: content["layouts"][0].update({key: value})


def in_placement(key, value):
    return lambda content: next(iter(content["layouts"][0]["placements"].values())).update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        lambda content: {"step": 10},
        lambda content: content.update(counters=None),
        lambda content: content.update(run=[]),
        lambda content: content.update(groups=["model"]),
        lambda content: content.update(layouts={}),
        lambda content: content.update(layouts=[]),
        lambda content: content["groups"].update(model="0"),
        lambda content: content["groups"].update(model=7),
        in_layout("stages", 10**9),
        in_layout("stages", "1"),
        in_layout("stages", 0),
        in_layout("stage_ranks", -4),
        in_layout("shardings", []),
        in_layout("shardings", 3),
        in_layout("placements", {"w": None}),
        in_placement("shape", [16.0, 16.0]),
        in_placement("shape", [10**12, 10**12]),
        in_placement("stages", {"9": 0}),
        in_placement("stages", {"../x": 0}),
        in_placement("stages", {}),
        lambda content: content["layouts"][0]["shardings"][0].update(grid=[]),
        lambda content: content["layouts"][0]["shardings"][0].update(grid=[0, 0]),
        lambda content: content["layouts"][0]["shardings"][0].update(cuts=[[99]]),
        lambda content: content["layouts"][0]["placements"].update(
            more=next(iter(content["layouts"][0]["placements"].values()))
        ),
    ],
)
def test_states_that_no_run_writes(copy, change):
    """A sentence, whatever is read of it."""
    checkpoint = stated(copy / "step_000010", change)
    with pytest.raises(UserError, match=r"(state\.json: does not hold what a run saves|of another model)"):
        checkpoint.weights("model", layout_of().shapes)


# --- fuzz ---


def flip(rng, path, _):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def truncate(rng, path, _):
    content = path.read_bytes()
    path.write_bytes(content[: rng.integers(len(content))])


def delete(rng, path, _):
    path.unlink()


def extend(rng, path, _):
    with path.open("ab") as file:
        file.write(rng.bytes(rng.integers(1, 9)))


def zeros(rng, path, _):
    """A sector of zeros, as a crashed disk leaves them."""
    content = bytearray(path.read_bytes())
    start = rng.integers(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def swap(rng, path, others):
    other = others[rng.integers(len(others))]
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def replace(rng, path, others):
    path.write_bytes(others[rng.integers(len(others))].read_bytes())


def folder_instead(rng, path, _):
    path.unlink()
    path.mkdir()


def intruder(rng, path, others):
    """A file that does not belong there."""
    (path.parent / f"{path.stem}-{rng.integers(1000)}{path.suffix}").write_bytes(path.read_bytes())
    rank = path.parents[0] / f"rank_{rng.integers(4, 9)}"
    rank.mkdir(exist_ok=True)
    (rank / path.name).write_bytes(path.read_bytes())


DAMAGES = (flip, flip, flip, truncate, delete, extend, zeros, swap, swap, replace, folder_instead, intruder)


@pytest.mark.parametrize("corruptions", few_of([100], [200]))
def test_fuzz(saved, tmp_path, corruptions):
    """Random corruptions of a folder with three checkpoints: what is then loaded is exactly one of them.

    Each is refused with one sentence, passed over for an earlier one, or harmless; any other exception fails here.
    """
    rng = np.random.default_rng(0)
    outcomes = {"harmless": 0, "passed over": 0, "refused": 0}
    refusals = []
    originals = listing(saved)
    for case in range(corruptions):
        damage = DAMAGES[case % len(DAMAGES)]
        work = shutil.copytree(saved, tmp_path / f"case_{case}")
        files = sorted(path for path in work.rglob("*") if path.is_file())
        newest = [path for path in files if "step_000030" in path.parts] + [work / "latest"]
        path = newest[rng.integers(len(newest))]
        damage(rng, path, files)
        place = work / ("latest", "step_000030", "")[rng.integers(3)]
        try:
            checkpoint, problems = choose(locate(place))
            assert_holds(checkpoint.folder, checkpoint.step)
        except UserError as error:
            refusals.append(str(error))
            outcomes["refused"] += 1
        else:
            assert place == work or checkpoint.step == 30
            outcomes["passed over" if problems else "harmless"] += 1
        shutil.rmtree(work)
    for refusal in refusals:
        assert "\n" not in refusal
        assert str(tmp_path) in refusal
    assert listing(saved) == originals
    assert min(outcomes.values()) > corruptions / 10, outcomes


def test_the_fuzz_test_would_notice(saved, tmp_path, monkeypatch):
    """Without the checksums some corruption is read as if nothing were wrong."""
    monkeypatch.setattr(Manifest, "verify", lambda self, folder, names: None)
    work = shutil.copytree(saved, tmp_path / "work")
    flip(np.random.default_rng(1), work / "step_000030" / "rank_0" / "exp_avg.safetensors", None)
    with pytest.raises(AssertionError):
        assert_holds(work / "step_000030", 30)
