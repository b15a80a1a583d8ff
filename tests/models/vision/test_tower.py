"""The tower's blocks and rows are the stored ones, for all images at once, one at a time, and beside padding."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from slow_cases import few_of

from mindrlhf.backend import native
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.inputs import PATCH_PLACES, PATCHES
from mindrlhf.models.vision.batch import PictureTable
from mindrlhf.models.vision.tower import Tower

mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")


class Hidden(nn.Cell):
    """All stages of a tower: patches behind the embedding and each block, and the tokens' rows."""

    def __init__(self, tower):
        super().__init__(auto_prefix=False)
        self.tower = tower

    def construct(self, patches, places):
        hidden = self.tower.hidden(patches, places)
        return hidden, self.tower.merger(hidden[-1])


def run_of(seeing, operators):
    """The tower of these operators as a function: table -> rows behind each stage, and of tokens."""
    parameters = build_parameters(seeing.specs, lambda spec: seeing.arrays[spec.name])
    tower = Tower(seeing.config.vision, parameters, operators, {})
    assert all(block.attention.fused == block.feed_forward.fused == operators.fused for block in tower.blocks)
    graph = Hidden(tower)

    def run(table):
        arrays = table.arrays()
        stages, tokens = graph(Tensor(arrays[PATCHES]), Tensor(arrays[PATCH_PLACES]))
        return [stage.asnumpy() for stage in stages], tokens.asnumpy()

    return run


@pytest.fixture(scope="module", params=["composed", "fused"])
def hidden(request, seeing):
    if request.param == "fused" and not CPU.operators().fused:
        pytest.skip("the fused operators are not built")
    return run_of(seeing, CPU.operators() if request.param == "fused" else COMPOSED)


@pytest.fixture(scope="module")
def together(seeing, hidden):
    table = PictureTable(seeing.pictures, seeing.config.vision)
    return table, *hidden(table)


def of_tokens(array, rows, square=4):
    """The patches of the tower's rows of tokens."""
    return array.reshape((-1, square, array.shape[-1]))[rows].reshape((-1, array.shape[-1]))


def test_every_block_is_the_stored_one(seeing, together):
    table, stages, _ = together
    rows = np.concatenate([table.rows(picture) for picture in seeing.pictures])
    stored, order = seeing.stored, seeing.stored["window_index"]
    np.testing.assert_allclose(of_tokens(stages[0], rows), stored["vision_patch_embed"], rtol=0, atol=1e-5)
    assert len(stages) == 1 + seeing.config.vision.depth
    for block, found in enumerate(stages[1:]):  # stored in the windows' order
        np.testing.assert_allclose(of_tokens(found, rows[order]), stored[f"vision_block_{block}"], rtol=0, atol=4e-5)


def test_tokens_are_the_stored_ones(seeing, together):
    table, _, tokens = together
    rows = np.concatenate([table.rows(picture) for picture in seeing.pictures])
    np.testing.assert_allclose(tokens[rows], seeing.stored["image_embeds"], rtol=0, atol=1e-5)


def test_rounded_products_give_nearly_the_stored_tokens(seeing):
    if not native.library().bfloat16:
        pytest.skip("this processor has no fast bfloat16 products")
    table = PictureTable(seeing.pictures, seeing.config.vision)
    _, tokens = run_of(seeing, CPU.operators("bfloat16"))(table)
    stored = seeing.stored["image_embeds"]
    rows = np.concatenate([table.rows(picture) for picture in seeing.pictures])
    error = np.linalg.norm(tokens[rows] - stored) / np.linalg.norm(stored)
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("picture", few_of([1], [0, 2, 3, 4]))
def test_an_image_alone_has_the_same_rows(seeing, hidden, together, picture):
    table, _, tokens = together
    alone = PictureTable([seeing.pictures[picture]], seeing.config.vision)
    own = hidden(alone)[1][alone.rows(seeing.pictures[picture])]
    np.testing.assert_allclose(own, tokens[table.rows(seeing.pictures[picture])], rtol=0, atol=1e-5)


def test_padding_changes_nothing_and_is_finite(seeing, hidden, together):
    """Numbers in the padding's patches reach no token."""
    table, _, tokens = together

    class Noisy(PictureTable):
        def arrays(self):
            arrays = super().arrays()
            padding = arrays[PATCH_PLACES][..., 0] < 0
            arrays[PATCHES][padding] = np.random.default_rng(1).normal(size=(padding.sum(), 1176)) * 9
            return arrays

    _, noisy = hidden(Noisy(seeing.pictures, seeing.config.vision))
    rows = np.concatenate([table.rows(picture) for picture in seeing.pictures])
    assert len(rows) < len(tokens)
    assert np.isfinite(noisy).all()
    np.testing.assert_array_equal(noisy[rows], tokens[rows])


def test_a_batch_without_pictures_is_one_of_padding(seeing, hidden):
    table = PictureTable([], seeing.config.vision)
    arrays = table.arrays()
    assert arrays[PATCHES].shape == (1, 16, 1176)
    assert not arrays[PATCHES].any()
    assert np.isfinite(hidden(table)[1]).all()


def test_a_picture_is_computed_once_for_all_that_show_it(seeing):
    first, second = seeing.pictures[:2]
    table = PictureTable([first, second, first], seeing.config.vision)
    assert len(table.pictures) == 2
    assert not set(table.rows(first)) & set(table.rows(second))
