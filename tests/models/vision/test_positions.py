"""Orders and positions are the stored ones, exactly; angles to float32."""

import json

import numpy as np
import pytest

from mindrlhf.models.vision.positions import section_spans, token_positions, tower_rotary
from mindrlhf.models.vision.windows import (
    bounds,
    frame_sizes,
    padded_places,
    patch_places,
    window_count,
    window_order,
)

SIDE, MERGE, IMAGE = 2, 2, 595


@pytest.fixture(scope="module")
def facts(shared):
    return json.loads((shared / "golden" / "qwen2_5_vl_tiny" / "golden.json").read_text())


@pytest.fixture(scope="module")
def stored(shared):
    with np.load(shared / "golden" / "qwen2_5_vl_tiny" / "golden.npz") as file:
        return dict(file)


def test_windows_of_all_images_are_the_stored_ones(stored):
    order, sizes = window_order(stored["image_grid_thw"], SIDE, MERGE)
    np.testing.assert_array_equal(order, stored["window_index"])
    np.testing.assert_array_equal(bounds(sizes), stored["cu_window_seqlens"])
    np.testing.assert_array_equal(bounds(frame_sizes(stored["image_grid_thw"])), stored["cu_seqlens"])


def test_windows_of_other_grids_are_the_stored_ones(facts):
    assert len(facts["window_cases"]) == 7
    for case in facts["window_cases"]:
        grids = case["image_grid_thw"]
        order, sizes = window_order(grids, case["window_size"] // MERGE // 14, MERGE)
        np.testing.assert_array_equal(order, case["window_index"])
        np.testing.assert_array_equal(bounds(sizes), case["cu_window_seqlens"])
        np.testing.assert_array_equal(bounds(frame_sizes(grids)), case["cu_seqlens"])


def test_places_and_angles_of_patches_are_the_stored_ones(stored):
    places = patch_places(stored["image_grid_thw"], MERGE)
    np.testing.assert_array_equal(places, stored["vision_position_ids"])
    cos, sin = tower_rotary(places, 16)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, stored["vision_cos"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, stored["vision_sin"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [(1, 4, 4), (1, 8, 10), (1, 2, 2), (1, 12, 2), (1, 10, 18)])
@pytest.mark.parametrize("side", [2, 4])
def test_padded_windows_hold_each_token_once_in_the_windows_order(grid, side):
    order, sizes = window_order([grid], side, MERGE)
    places = padded_places(grid, side, MERGE)
    np.testing.assert_array_equal(np.argsort(places), order)
    windows, counts = np.unique(places // side**2, return_counts=True)
    np.testing.assert_array_equal(windows, np.arange(window_count(grid, side, MERGE)))
    np.testing.assert_array_equal(counts, sizes // MERGE**2)
    for window, count in zip(windows, counts, strict=True):  # padding comes behind
        own = places[places // side**2 == window] % side**2
        np.testing.assert_array_equal(np.sort(own), np.arange(count))


def sequences(stored, facts):
    """(ids without padding, grids, their places in the row) of each stored sequence."""
    for row, sequence in enumerate(facts["sequences"]):
        real = stored["attention_mask"][row] == 1
        yield row, stored["input_ids"][row][real], stored["image_grid_thw"][sequence["images"]], real


def test_positions_and_deltas_of_sequences_are_the_stored_ones(stored, facts):
    for row, ids, grids, real in sequences(stored, facts):
        positions, delta = token_positions(ids, grids, IMAGE, MERGE)
        np.testing.assert_array_equal(positions, stored["position_ids"][:, row][:, real])
        assert delta == stored["rope_deltas"].reshape(-1)[row]
        new = stored["greedy_position_ids"].shape[2]
        decoded = len(ids) + delta + np.arange(new)
        np.testing.assert_array_equal(stored["greedy_position_ids"][:, row], np.tile(decoded, (3, 1)))


def test_images_that_touch_count_each_from_its_own_start():
    ids = np.array([5] + [IMAGE] * 6 + [7])
    positions, delta = token_positions(ids, [(1, 4, 4), (1, 2, 4)], IMAGE, MERGE)
    np.testing.assert_array_equal(positions[1], [0, 1, 1, 2, 2, 3, 3, 5])
    np.testing.assert_array_equal(positions[2], [0, 1, 2, 1, 2, 3, 4, 5])
    assert delta == -2


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([5, IMAGE, IMAGE], [(1, 4, 4)], "2 image tokens were given for images of 4 tokens"),
        ([5, IMAGE, 5], [], "1 image tokens were given for images of 0 tokens"),
        ([IMAGE, IMAGE, 5, IMAGE, IMAGE], [(1, 4, 4)], "the 4 tokens of an image at place 0 are not beside"),
        ([IMAGE] * 4, [(2, 4, 2)], "a still image has one frame"),
    ],
)
def test_tokens_that_are_not_those_of_the_images_are_refused(ids, grids, message):
    with pytest.raises(ValueError, match=message):
        token_positions(np.array(ids), grids, IMAGE, MERGE)


def test_sections_take_the_axes_in_turn():
    assert section_spans([2, 3, 3]) == ((0, 0, 2), (1, 2, 5), (2, 5, 8))
    assert section_spans([1, 1, 1, 1]) == ((0, 0, 1), (1, 1, 2), (2, 2, 3), (0, 3, 4))
