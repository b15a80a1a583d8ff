"""Images in every form that rows have, and hostile ones: each costs one sentence with its row."""

import base64
import io
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from mindrlhf.errors import UserError
from mindrlhf.images.decode import FORMATS, MOST_FILE_BYTES
from mindrlhf.images.sources import read_image

ROW = "rows.jsonl, line 7: images[0]"
RNG = np.random.default_rng(3)
PIXELS = RNG.integers(0, 256, (9, 14, 3), np.uint8)


def encoded(pixels=PIXELS, kind="PNG", **options) -> bytes:
    return of_image(Image.fromarray(pixels), kind, **options)


def of_image(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def refusal(source, folder=".") -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError) as error:
            read_image(source, folder, ROW)
    message = str(error.value)
    assert message.startswith(f"{ROW}: ")
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 1300
    return message


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "imgs" / "one"
    path.parent.mkdir()
    for name in (path, path.with_suffix(".png")):
        name.write_bytes(encoded())
    return path.with_suffix(".png")


PNG = encoded()
TEXT = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "source",
    [
        *("imgs/one.png", "imgs/one", PNG, bytearray(PNG), memoryview(PNG), TEXT, f"data:image/png;base64,{TEXT}"),
        *("\n".join((TEXT[:60], TEXT[60:])), {"bytes": PNG, "path": None}, {"bytes": None, "path": "imgs/one.png"}),
        *({"path": "imgs/one.png"}, {"bytes": PNG, "path": "of/another/machine.png"}, Image.fromarray(PIXELS)),
        {"bytes": TEXT},
    ],
    ids=lambda source: type(source).__name__,
)
def test_an_image_is_read_from_each_form(photo, source):
    found = read_image(source, photo.parents[1], ROW)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, PIXELS)


def test_absolute_paths_and_path_objects_are_read(photo):
    for source in (str(photo), photo, f"file://{photo}"):
        np.testing.assert_array_equal(read_image(source, "elsewhere", ROW), PIXELS)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_decoded(kind):
    found = read_image(encoded(np.full((9, 14, 3), (200, 40, 90), np.uint8), kind), ".", ROW)
    assert found.shape == (9, 14, 3)
    assert np.abs(found.astype(int) - (200, 40, 90)).max() <= (60 if kind == "GIF" else 8)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "RGBX", "YCbCr"])
def test_each_mode_becomes_what_pillow_makes_of_it(mode):
    image = Image.fromarray(PIXELS).convert("P" if mode == "PA" else mode).convert(mode)
    np.testing.assert_array_equal(read_image(image, ".", ROW), np.asarray(image.convert("RGB")))


def test_transparency_is_dropped_with_its_warning():
    image = Image.fromarray(PIXELS).convert("P")
    content = of_image(image, transparency=bytes(range(200)))
    np.testing.assert_array_equal(read_image(content, ".", ROW), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (2, PIXELS[:, ::-1]),
        (3, PIXELS[::-1, ::-1]),
        (6, np.rot90(PIXELS, -1)),
        (8, np.rot90(PIXELS)),
        (99, PIXELS),
    ],
)
def test_a_photograph_is_turned_upright(orientation, turned):
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(read_image(encoded(exif=exif.tobytes()), ".", ROW), turned)


def png_of(width, height):
    """A PNG whose header promises pixels that are not there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def frames():
    return [Image.fromarray(np.full((9, 14, 3), shade, np.uint8)) for shade in (0, 120, 250)]


def moving(kind):
    first, *rest = frames()
    return of_image(first, kind, save_all=True, append_images=rest)


HOSTILE = {
    "nothing": (b"", "the bytes are no image"),
    "text": (b"not an image at all", "the bytes are no image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "the bytes are no image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "the bytes are no image"),
    "header only": (PNG[:24], "the bytes are no image"),
    "truncated png": (PNG[:-40], "the image is damaged"),
    "truncated jpeg": (encoded(np.repeat(np.repeat(PIXELS, 20, 0), 20, 1), "JPEG")[:-400], "the image is damaged"),
    "bomb": (png_of(50_000, 50_000), "the image has more pixels than can be read"),
    "large": (png_of(9_000, 9_000), "the image has 9000 x 9000 pixels, and at most"),
    "promised pixels": (png_of(800, 800), "the image is damaged"),
    "line": (
        encoded(np.zeros((1, 5000, 3), np.uint8)),
        "the image has 5000 x 1 pixels, and one side may be",
    ),
    "column": (encoded(np.zeros((5000, 1, 3), np.uint8)), "the image has 1 x 5000 pixels"),
    "16 bits": (
        of_image(Image.fromarray(np.zeros((9, 9), np.uint16))),
        "values are of Pillow's mode 'I",
    ),
    "floats": (of_image(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), "are of Pillow's mode 'F'"),
    "moving gif": (moving("GIF"), "the image is an animation"),
    "moving png": (moving("PNG"), "the image is an animation"),
    "pages": (moving("TIFF"), "the image is an animation"),
    "empty object": (Image.new("RGB", (0, 5)), "the image has 0 x 5 pixels"),
    "none": (None, "the image is None, and must be a path"),
    "number": (7, "the image is 7, and must be a path"),
    "list": ([1, 2, 3], r"the image is \[1, 2, 3\], and must be a path"),
    "empty text": ("", "the image is '', and must be a path"),
    "no file": ("imgs/none.png", "there is no image file .*imgs/none.png; paths are relative"),
    "no file without a suffix": ("imgs/none", "there is no image file"),
    "a folder": (".", "there is no image file"),
    "an odd name": ("a\0b.png", "there is no image file"),
    "a long name": ("x" * 4000 + ".png", "there is no image file"),
    "a device": ("/dev/zero", "there is no image file"),
    "an address": ("https://example.com/cat.png", "download it"),
    "no base64": ("*" * 60, "is no file's path and no base64"),
    "base64 of text": (base64.b64encode(b"word " * 20).decode(), "the bytes are no image"),
    "another uri": ("data:image/png,abc", "has no base64"),
    "a bad uri": ("data:image/png;base64,a", "is no file's path and no base64"),
    "empty group": ({}, "has neither 'bytes' nor 'path'"),
    "group of nothing": ({"bytes": None, "path": None}, "has neither 'bytes' nor 'path'"),
    "another group": ({"url": "x.png"}, "has the key 'url'"),
    "nested group": ({"bytes": {"bytes": PNG}}, "and must be a path"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_cost_one_sentence(name, tmp_path):
    source, message = HOSTILE[name]
    assert re.search(message, refusal(source, tmp_path))


def test_files_are_named_with_their_row(tmp_path):
    (tmp_path / "empty.png").touch()
    assert f"{tmp_path}/empty.png: the image's file has 0 bytes" in refusal("empty.png", tmp_path)
    (tmp_path / "cut.png").write_bytes(PNG[:-40])
    assert f"{tmp_path}/cut.png: the image is damaged" in refusal("cut.png", tmp_path)
    with open(tmp_path / "huge.png", "wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)
    assert f"huge.png: the image's file has {MOST_FILE_BYTES + 1} bytes" in refusal("huge.png", tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes_give_pixels_or_one_sentence(kind):
    """Thirty damages of each format: bytes changed, cut out, put in; seeded, so that each run tries the same."""
    rng = np.random.default_rng(FORMATS.index(kind))
    whole = encoded(kind=kind)
    refused = 0
    for _ in range(30):
        content = bytearray(whole)
        for _ in range(rng.integers(1, 8)):
            content[rng.integers(len(content))] = rng.integers(256)
        start = rng.integers(len(content))
        if rng.random() < 0.3:
            del content[start : start + rng.integers(1, 40)]
        elif rng.random() < 0.3:
            content[start:start] = rng.bytes(rng.integers(1, 40))
        found = pixels_or_message(bytes(content))
        if isinstance(found, str):
            refused += 1
            assert found.startswith(f"{ROW}: the ")
            assert "\n" not in found
        else:
            assert found.dtype == np.uint8
            assert found.shape[2:] == (3,)
    assert refused


def pixels_or_message(content):
    try:
        return read_image(content, ".", ROW)
    except UserError as error:
        return str(error)
