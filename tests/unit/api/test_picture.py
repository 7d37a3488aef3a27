"""Pictures as they enter: what is taken, what its pixels are, and what is refused by name."""

import base64
import hashlib
import io
import itertools
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from asyncrl.api.picture import (
    MAX_BYTES,
    MAX_PICTURES,
    MAX_PIXELS,
    MAX_SIDE,
    Picture,
    PictureError,
    PictureRef,
    PlacedPicture,
    check_spans,
    picture_from,
    size_of,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PLAIN = encoded(Image.fromarray(PIXELS))


@pytest.mark.parametrize(
    "value",
    [
        PLAIN,
        bytearray(PLAIN),
        f"data:image/png;base64,{base64.b64encode(PLAIN).decode()}",
        PIXELS,
        Image.fromarray(PIXELS),
        Picture.from_bytes(PLAIN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_form_gives_the_same_pixels(value):
    picture = picture_from(value)
    assert picture.sha256 == hashlib.sha256(picture.data).hexdigest()
    assert picture.size == (7, 5)
    assert np.array_equal(picture.pixels(), PIXELS)
    assert picture_from(picture.data_url) == picture
    assert str(picture) == f"[picture 7x5 {picture.sha256[:8]}]"


def test_the_same_array_is_the_same_picture_in_any_process():
    assert Picture.from_array(PIXELS) == Picture.from_array(PIXELS.copy())
    assert Picture.from_array(PIXELS) != Picture.from_array(PIXELS[::-1])
    assert len({Picture.from_array(PIXELS), Picture.from_array(PIXELS.copy())}) == 1


def test_a_jpeg_is_kept_as_it_is(tmp_path):
    data = encoded(Image.fromarray(PIXELS), "JPEG", quality=95)
    (tmp_path / "x.png").write_bytes(data)  # the name does not count
    picture = Picture.from_path(tmp_path / "x.png")
    assert (picture.data, picture.media_type, picture.size) == (data, "image/jpeg", (7, 5))


def test_a_jpeg_with_long_headers_has_a_size():
    image = Image.fromarray(PIXELS)
    data = encoded(image, "JPEG", progressive=True, comment=b"\xff\xc0" * 500, icc_profile=b"x" * 70000)
    assert size_of(data) == (7, 5)
    assert Picture.from_bytes(data).image().size == (7, 5)


def test_exif_turns_the_picture_as_viewers_do():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: a quarter turn to the right
    picture = Picture.from_bytes(encoded(Image.fromarray(PIXELS), exif=exif))
    assert picture.size == (5, 7)
    assert np.array_equal(picture.pixels(), np.rot90(PIXELS, -1))
    for form, orientation in itertools.product(("PNG", "JPEG"), range(1, 9)):
        exif[0x0112] = orientation
        picture = Picture.from_bytes(encoded(Image.fromarray(PIXELS), form, exif=exif))
        assert picture.size == picture.image().size


def test_transparency_shows_white():
    alpha = np.full((5, 7, 1), 255, np.uint8)
    alpha[2] = 0
    seen = Picture.from_bytes(encoded(Image.fromarray(np.concatenate([PIXELS, alpha], 2)))).pixels()
    assert (seen[2] == 255).all()
    assert np.array_equal(np.delete(seen, 2, 0), np.delete(PIXELS, 2, 0))


def test_a_palette_with_a_transparent_colour_shows_white():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    picture = Picture.from_bytes(encoded(image, transparency=1))
    assert picture.pixels().tolist() == [[[255, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3)], ids=["grey", "colours"])
def test_16_bits_keep_their_upper_8(colour, channels):
    values = [0x1234, 0x80FF, 0xFFFF]
    row = b"\0" + b"".join(struct.pack(">H", value) * channels for value in values)
    seen = Picture.from_bytes(png(3, 1, 16, colour, row)).pixels()
    assert seen[0, :, 0].tolist() == [0x12, 0x80, 0xFF]
    assert (seen == seen[:, :, :1]).all()


def test_a_bomb_is_refused_by_its_header_alone(monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was decoded"))
    for width, height in ((1 << 30, 1), (1, 1 << 30), (MAX_SIDE, MAX_PIXELS // MAX_SIDE + 1), (0, 5)):
        with pytest.raises(PictureError, match=f"{width} x {height} pixels"):
            Picture.from_bytes(png(width, height, 8, 2, b"\0" * 64))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (PLAIN[:20], "damaged: its PNG header"),
        (PLAIN[: len(PLAIN) // 2], "damaged"),
        (PLAIN[:60] + bytes(8) + PLAIN[68:], "damaged"),
        (encoded(Image.fromarray(PIXELS), "JPEG")[:30], "damaged: its JPEG header"),
        (encoded(Image.fromarray(PIXELS).resize((64, 64)), "JPEG")[:-300], "damaged"),
        (b"\xff\xd8\xff" + bytes(40), "damaged"),
        (encoded(Image.fromarray(PIXELS), "GIF"), "is GIF: give PNG or JPEG"),
        (encoded(Image.fromarray(PIXELS), "WEBP"), "is WebP"),
        (encoded(Image.fromarray(PIXELS), "BMP"), "is BMP"),
        (encoded(Image.fromarray(PIXELS), "TIFF"), "is TIFF"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is SVG"),
        (b'\n<?xml version="1.0"?><svg/>', "is SVG"),
        (b"\x7fELF" + bytes(50), "unknown format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(MAX_BYTES), "above the limit"),
        (
            encoded(Image.fromarray(PIXELS), save_all=True, append_images=[Image.fromarray(PIXELS[::-1])]),
            "is an animation",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_is_refused_by_name(data, why, tmp_path):
    with pytest.raises(PictureError, match=why):
        Picture.from_bytes(data)
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(PictureError, match=f"{re.escape(str(tmp_path))}/bad: .*{why}"):
        Picture.from_path(tmp_path / "bad")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("https://example.org/x.png", "is not a data URL, and nothing is fetched"),
        ("file:///etc/passwd", "is not a data URL"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,&&&", "not base64"),
        ("data:text/html;base64," + base64.b64encode(b"<html>").decode(), "unknown format"),
        (PIXELS.astype(np.float32), "float32"),
        (PIXELS[:, :, 0], r"uint8 \[5, 7\]"),
        (np.zeros((5, 7, 4), np.uint8), r"uint8 \[5, 7, 4\]"),
        (np.zeros((0, 7, 3), np.uint8), "empty"),
        (np.zeros((1, MAX_SIDE + 1, 3), np.uint8), "a side"),
        (17, "is a int"),
        (None, "is a NoneType"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value, why):
    with pytest.raises(PictureError, match=why):
        picture_from(value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.png", tmp_path, "\0"):
        with pytest.raises(PictureError, match="cannot be read"):
            Picture.from_path(path)


def test_received_bytes_must_have_the_hash_that_was_named():
    picture = Picture.from_bytes(PLAIN)
    assert Picture.received(PLAIN, picture.sha256) == picture
    with pytest.raises(PictureError, match="SHA-256"):
        Picture.received(PLAIN, "0" * 64)


def test_spans_follow_one_another_within_the_tokens():
    picture = Picture.from_bytes(PLAIN)
    first, second = PlacedPicture(1, 4, picture), PlacedPicture(5, 2, picture)
    check_spans((first, second), 7)
    assert first.ref == PictureRef(1, 4, picture.sha256)
    assert second.shifted(3) == PlacedPicture(8, 2, picture)
    for wrong, tokens in (((second, first), 7), ((first, PlacedPicture(4, 2, picture)), 7), ((first, second), 6)):
        with pytest.raises(ValueError, match="picture 1"):
            check_spans(wrong, tokens)
    many = [PlacedPicture(place, 1, picture) for place in range(MAX_PICTURES + 1)]
    check_spans(many[1:], len(many))
    with pytest.raises(ValueError, match="there are 1025 pictures: at most 1024"):
        check_spans(many, len(many))
    for position, length, sha256 in ((-1, 1, "0" * 64), (0, 0, "0" * 64), (0, 1, "0" * 63), (0, 1, "G" * 64)):
        with pytest.raises(ValueError, match="picture"):
            PictureRef(position, length, sha256)


def test_a_picture_travels_without_pillow():
    program = (
        "import sys; from asyncrl.api.picture import Picture; "
        f"picture = Picture.received({PLAIN!r}); print(picture, 'PIL' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("] ")[1].split() == ["False", "False"]
