"""A decoder that takes the tower's rows in place of patches: results and gradients of the text are the stored ones."""

from dataclasses import replace

import numpy as np
import pytest
from small_updater import RATE, Subject

from mindrlhf.models.inputs import TOWER_ROWS
from mindrlhf.models.vision.batch import KnownSizes, RowInputs
from mindrlhf.models.vision.rows import TOWER, is_tower
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD


def stored_rows(seeing) -> RowInputs:
    """The stored rows of all images, by their digests."""
    ends = np.cumsum([picture.tokens for picture in seeing.pictures])
    parts = np.split(seeing.stored["image_embeds"].astype(np.float32), ends[:-1])
    known = {picture.digest: rows for picture, rows in zip(seeing.pictures, parts, strict=True)}
    return RowInputs(seeing.config.vision, seeing.config.hidden_size, lambda picture: known[picture.digest])


@pytest.fixture(scope="module")
def frozen(seeing):
    return replace(seeing, config=seeing.config.model_copy(update={"frozen": ("vision", "merger")}))


@pytest.mark.slow
def test_log_probs_and_gradients_of_the_text_are_the_stored_ones(seeing, frozen):
    subject = Subject(frozen, NEGATIVE_LOG_LIKELIHOOD, image_rows=stored_rows(seeing))
    assert subject.decoder.inputs[-1] == TOWER_ROWS
    assert not any(parameter.name.startswith(TOWER) for parameter in subject.decoder.get_parameters())
    update = subject.updater(seeing.groups, RATE, weights=seeing.weights)
    np.testing.assert_allclose(update.loss, seeing.facts["loss"], rtol=2e-6)
    seeing.check_log_probs(update.outputs)
    assert subject.gradients.keys() == {spec.name for spec in seeing.specs if not is_tower(spec)}
    seeing.check_norms(subject.gradients)


def test_a_picture_is_once_among_the_rows_and_sizes_are_few(seeing):
    inputs = stored_rows(seeing)
    first, second = seeing.pictures[:2]
    sizes = KnownSizes()
    table = inputs.table([first, second, first], sizes)
    rows = table.arrays()[TOWER_ROWS]
    assert not set(table.rows(first)) & set(table.rows(second))
    assert len(rows) < 1.5 * (first.tokens + second.tokens) + 1
    for picture in (first, second):
        np.testing.assert_array_equal(rows[table.rows(picture)], inputs.rows_of(picture))
    assert inputs.table([second], sizes).arrays()[TOWER_ROWS].shape == rows.shape  # the graph of the larger batch
    np.testing.assert_array_equal(inputs.table([], KnownSizes()).arrays()[TOWER_ROWS], np.zeros((1, inputs.width)))
