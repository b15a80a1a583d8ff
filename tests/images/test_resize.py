"""The resize has the bits of Pillow 13's, stored ones and those of the Pillow that is installed."""

import numpy as np
import PIL
import pytest
from PIL import Image

from mindrlhf.images.resize import resize

HAS_NEW_ORDER = int(PIL.__version__.partition(".")[0]) >= 13


def pillow(pixels, height, width):
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def test_width_before_height_gives_what_older_pillows_gave(stored):
    """The order alone makes the difference: this image shrinks in height and grows in width."""
    image, (height, width) = stored["image_0"], stored["resized_0"].shape[:2]
    widened = resize(image, image.shape[0], width)
    np.testing.assert_array_equal(resize(widened, height, width), stored["resized_0_pillow12"])
    assert (resize(image, height, width) != stored["resized_0_pillow12"]).sum() > 3000


@pytest.mark.skipif(not HAS_NEW_ORDER, reason="Pillow 13 and later resize in this order")
@pytest.mark.parametrize("seed", range(8))
def test_any_shape_is_resized_as_the_installed_pillow_does(seed):
    rng = np.random.default_rng(seed)
    for _ in range(15):
        old, new = rng.integers(1, 160, 2), rng.integers(1, 160, 2)
        pixels = rng.integers(0, 256, (*old, 3), np.uint8)
        if rng.random() < 0.5:
            pixels = (pixels > 127).astype(np.uint8) * 255  # overshoots are cut off between the passes
        np.testing.assert_array_equal(resize(pixels, *new), pillow(pixels, *new), err_msg=f"{old} to {new}")


@pytest.mark.skipif(not HAS_NEW_ORDER, reason="Pillow 13 and later resize in this order")
@pytest.mark.parametrize(("old", "new"), [((1200, 1600), (448, 616)), ((2000, 37), (56, 28)), ((40, 3000), (28, 1344))])
def test_photographs_are_resized_in_blocks_with_the_same_bits(old, new):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (*old, 3), np.uint8)
    np.testing.assert_array_equal(resize(pixels, *new), pillow(pixels, *new))


def test_an_unchanged_size_is_left_alone(stored):
    image = stored["image_1"]
    np.testing.assert_array_equal(resize(image, *image.shape[:2]), image)


def test_a_plain_colour_stays():
    pixels = np.full((31, 17, 3), (255, 0, 93), np.uint8)
    np.testing.assert_array_equal(resize(pixels, 56, 28), np.full((56, 28, 3), (255, 0, 93), np.uint8))
