"""Pixels, sizes and patches are those that Hugging Face's processor stored, to the last bit."""

import json

import numpy as np
import pytest
from PIL import Image

from mindrlhf.configs.images import ImageSettings, read_image_settings
from mindrlhf.errors import UserError
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.images.sizes import image_tokens, resized_size


@pytest.fixture(scope="module")
def processor(folder):
    return ImageProcessor(read_image_settings(folder))


def test_pixels_patches_and_grids_are_the_stored_ones(processor, stored, facts):
    pictures = [processor.picture(stored[f"image_{i}"], "here") for i in range(len(facts["images"]))]
    for i, (picture, fact) in enumerate(zip(pictures, facts["images"], strict=True)):
        np.testing.assert_array_equal(picture.pixels, stored[f"resized_{i}"])
        assert (list(picture.grid), picture.tokens) == (fact["image_grid_thw"], fact["image_tokens"])
    patches = np.concatenate([picture.patches() for picture in pictures])
    assert patches.dtype == np.float32
    np.testing.assert_array_equal(patches, stored["pixel_values"])
    np.testing.assert_array_equal([picture.grid for picture in pictures], stored["image_grid_thw"])


def test_an_image_may_come_as_pillows_object(processor, stored):
    picture = processor.read(Image.fromarray(stored["image_2"]), "", "here")
    np.testing.assert_array_equal(picture.pixels, stored["resized_2"])


def test_sizes_are_the_stored_ones(facts):
    for height, width, least, most, rows, columns in facts["smart_resize"]["rows"]:
        settings = ImageSettings.model_construct(min_pixels=least, max_pixels=most)  # bounds in any order
        if rows is not None:
            assert resized_size(height, width, settings, "here") == (rows, columns), (height, width)
            continue
        with pytest.raises(UserError, match=r"^data.jsonl, line 3: the image has \d+ x \d+ pixels, .* 200 times"):
            resized_size(height, width, settings, "data.jsonl, line 3")


def test_tokens_count_all_frames():
    assert image_tokens((3, 8, 10), 2) == 60
    assert image_tokens((1, 6, 9), 3) == 6


def test_a_digest_is_of_the_pixels_and_the_shape(processor, stored):
    image = stored["image_4"]
    digests = {
        processor.picture(pixels, "here").digest
        for pixels in (image, image.copy(), image[:, ::-1], image.reshape((260, 200, 3)))
    }
    assert len(digests) == 3
    settings = ImageSettings(min_pixels=784, max_pixels=784 * 4)
    plain = np.zeros((28, 56, 3), np.uint8)
    wide, high = (ImageProcessor(settings).picture(one, "here") for one in (plain, plain.reshape((56, 28, 3))))
    assert wide.digest != high.digest  # equal bytes, another shape


def test_settings_are_written_as_the_released_file_has_them(folder):
    raw = json.loads((folder / "preprocessor_config.json").read_text())
    assert read_image_settings(folder).to_hf() == raw


def test_files_of_transformers_5_and_groups_of_edges_are_read(folder, tmp_path):
    group = {"size": {"shortest_edge": 6272, "longest_edge": 100352}, "merge_size": 2, "do_resize": True, "resample": 3}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": group}))
    found = read_image_settings(tmp_path)
    assert (found.min_pixels, found.max_pixels) == (6272, 100352)
    assert found.image_mean == read_image_settings(folder).image_mean


@pytest.mark.parametrize(
    ("given", "asked", "bounds"),
    [
        ({"min_pixels": 3136, "max_pixels": 12845056}, {}, (3136, 1003520)),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {"max_pixels": 2007040}, (3136, 2007040)),
        ({"min_pixels": 2007040, "max_pixels": 12845056}, {}, (2007040, 2007040)),
        ({"max_pixels": 50176}, {"min_pixels": 6272}, (6272, 50176)),
        ({}, {}, (3136, 1003520)),
    ],
)
def test_the_largest_area_has_a_safe_default(given, asked, bounds):
    settings = ImageSettings.from_hf(given, "file", **asked)
    assert (settings.min_pixels, settings.max_pixels) == bounds


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        ({"do_resize": False}, {}, "file: do_resize is False, and must be true"),
        ({"resample": 2}, {}, "file: resample is 2, and must be 3"),
        ({"rescale_factor": 0.5}, {}, "file: rescale_factor is 0.5, and must be 1/255"),
        ({"image_processor_type": "CLIPImageProcessor"}, {}, "image_processor_type is 'CLIPImageProcessor'"),
        ({"image_mean": [0.5, 0.5]}, {}, "file: image_mean.2 is missing"),
        ({"image_std": [0.5, 0.0, 0.5]}, {}, "image_std.1 is 0.0, and must be"),
        ({"size": 224}, {}, "file: size is 224, and must be an object"),
        ({"size": {"longest_edge": "big"}}, {}, "file: size.longest_edge is 'big', and must be a whole number"),
        ({"max_pixels": 1 << 40}, {"max_pixels": 1 << 40}, "max_pixels is 1099511627776, and must be"),
        ({}, {"max_pixels": 300}, "the settings over file: max_pixels 300 is below min_pixels 3136"),
        ({"min_pixels": 1}, {"max_pixels": 300}, "max_pixels 300 holds no token of 28 x 28 pixels"),
    ],
)
def test_processors_that_compute_something_else_are_refused(given, asked, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        ImageSettings.from_hf(given, "file", **asked)


def test_a_folder_without_the_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json, which says how images are resized"):
        read_image_settings(tmp_path)
