"""Where a role's weights come from: each rank reads its own part, the same as if it were cut out of the whole."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import full_arrays
from sharded_files import MODEL, TIED, write_full_file, write_hf_folder, write_shards
from small_model import random_arrays, small_config
from training_states import save, states, stores

from mindrlhf.checkpoint import manifest
from mindrlhf.checkpoint.hf import companion_files, save_hf
from mindrlhf.checkpoint.weights import Weights, checkpoint_config, hf_folder
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import model_layout, split_layers
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.parallel.partition import Partition

MESHES = (Mesh(tp=2, pp=2), Mesh(dp=2, tp=4), Mesh(dp=3))


def parts_of(model, mesh: Mesh) -> list[Partition]:
    offset = (1, 0) if mesh.pp == 2 else 0
    layout = model_layout(model, mesh, offset=offset, vocab_emb_dp=False)
    stages = split_layers(model.num_layers, mesh.pp, offset)
    return [Partition(model, mesh, layout, stages[mesh.coordinates(rank).pp], rank) for rank in range(mesh.size)]


def assert_cut_from(arrays: dict[str, np.ndarray], weights: Weights, parts: list[Partition]) -> None:
    for part in parts:
        read = weights.reader(part)
        for spec in part.specs:
            np.testing.assert_array_equal(read(spec), arrays[spec.name][part.slices(spec)], err_msg=spec.name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [MODEL, TIED])
def test_random_weights_are_the_same_whoever_holds_them(model, mesh):
    weights = Weights(None, model, seed=5)
    whole = {spec.name: weights.reader()(spec) for spec in parameter_table(model)}
    assert np.std(whole["model.layers.1.feed_forward.w1.weight"]) == pytest.approx(model.initializer_range, rel=0.1)
    assert_cut_from(whole, weights, parts_of(model, mesh))


@pytest.mark.parametrize("mesh", MESHES)
def test_each_rank_reads_its_part_of_files(tmp_path, mesh):
    parts = parts_of(TIED, mesh)
    arrays = full_arrays(parts[0].layout)
    sources = [
        write_full_file(tmp_path / "full.ckpt", arrays),
        write_hf_folder(tmp_path / "hf", TIED, arrays),
        write_shards(tmp_path / "ranks", parts[0].layout, arrays),
    ]
    for source in sources:
        assert_cut_from(arrays, Weights(str(source), TIED, 0), parts)


def test_parameters_are_those_of_the_part(tmp_path):
    part = parts_of(MODEL, MESHES[0])[2]
    arrays = full_arrays(part.layout)
    folder = write_shards(tmp_path / "ranks", part.layout, arrays)
    parameters = Weights(str(folder), MODEL, 0).parameters(part)
    assert list(parameters) == [spec.name for spec in part.specs]
    for spec in part.specs:
        parameter = parameters[spec.name]
        assert parameter.name == spec.name
        np.testing.assert_array_equal(parameter.asnumpy(), arrays[spec.name][part.slices(spec)])


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Files whose content was hashed, in order."""
    names, digest = [], manifest.file_digest

    def recorded(file):
        names.append(f"{Path(file.name).parent.name}/{Path(file.name).name}")
        return digest(file)

    monkeypatch.setattr(manifest, "file_digest", recorded)
    return names


def trained(folder: Path) -> Path:
    """A training checkpoint of MODEL that two ranks wrote."""
    given = [replace(state, companions=hf_files(MODEL)) for state in states(20, tp=2)]
    save(stores(folder, 2), given)
    return folder


def hf_files(model) -> dict[str, bytes]:
    return {f"hf/{name}": content for name, content in companion_files(model, None).items()}


def test_a_training_checkpoint_is_named_without_reading_its_weights(tmp_path, hashed):
    folder = trained(tmp_path / "ckpt")
    hashed.clear()
    for path in (folder, folder / "latest", folder / "step_000020"):
        assert checkpoint_config(str(path)).hidden_size == MODEL.hidden_size
        assert hf_folder(path) == folder / "step_000020" / "hf"
    assert not [name for name in hashed if name.endswith(".safetensors")]


def test_the_content_of_a_training_checkpoint_is_checked_once(tmp_path, hashed):
    folder = trained(tmp_path / "ckpt")
    hashed.clear()
    weights = Weights(str(folder), MODEL, 0)
    for part in parts_of(MODEL, Mesh(tp=2)):
        weights.reader(part)
    checkpoint_config(str(folder))
    weights.reader()
    files = [name for name in hashed if name.endswith(".safetensors")]
    assert len(files) == 6  # two ranks, weights and two moments
    assert len(set(files)) == 6


def test_damaged_weights_are_found_by_who_reads_them(tmp_path):
    """The checkpoint is named for its configuration, and not used for its weights."""
    folder = trained(tmp_path / "ckpt")
    path = folder / "step_000020" / "rank_1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert checkpoint_config(str(folder)).num_layers == MODEL.num_layers
    for _ in range(2):
        with pytest.raises(UserError, match=r"rank_1/model\.safetensors: is damaged"):
            Weights(str(folder), MODEL, 0).reader()
    config = folder / "step_000020" / "hf" / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(UserError, match=r"hf/config\.json: is damaged"):
        checkpoint_config(str(folder))


def test_files_of_another_layout_are_refused(tmp_path):
    written = parts_of(MODEL, Mesh(tp=2, pp=2))[0].layout
    folder = write_shards(tmp_path / "ranks", written, full_arrays(written))
    for mesh, message in (
        (Mesh(dp=2, tp=4), r"ranks: has no folder rank_4, and the layout is one of 8 ranks"),
        (Mesh(dp=2), r"ranks: holds rank_3, and the layout is one of 2 ranks"),
        (Mesh(tp=4), r"rank_0: lacks .* that the layout puts on rank 0"),
    ):
        with pytest.raises(UserError, match=message):
            Weights(str(folder), MODEL, 0).reader(parts_of(MODEL, mesh)[0])


@pytest.mark.parametrize(
    ("value", "fault"),
    [(np.nan, "NaN or infinity"), (-np.inf, "NaN or infinity"), (3e38, "the number 3e.38"), (-2e6, "the number 2e.06")],
)
def test_weights_that_no_training_gives_are_refused(tmp_path, value, fault):
    """By the names of the tensor and the file, in every parameter, for whole models and for a rank's part."""
    model = small_config()
    arrays = random_arrays(model)
    name = "model.layers.1.feed_forward.w1.weight"
    arrays[name][1, 2] = value
    spec = next(spec for spec in parameter_table(model) if spec.name == name)
    save_hf(tmp_path, model, ((spec, arrays[spec.name]) for spec in parameter_table(model)))
    read = Weights(str(tmp_path), model, 0).reader()
    with pytest.raises(UserError, match=rf"model\.safetensors: tensor {spec.hf_name} holds {fault}; get weights"):
        read(spec)
    others = [each for each in parameter_table(model) if each.name != name]
    assert all(np.array_equal(read(each), arrays[each.name]) for each in others)


def test_large_weights_are_read(tmp_path):
    """Those of a model in float16, and many that are large together."""
    model = small_config()
    arrays = {name: np.full_like(array, 65504.0) for name, array in random_arrays(model).items()}
    save_hf(tmp_path, model, ((spec, arrays[spec.name]) for spec in parameter_table(model)))
    read = Weights(str(tmp_path), model, 0).reader()
    assert all(np.array_equal(read(spec), arrays[spec.name]) for spec in parameter_table(model))
