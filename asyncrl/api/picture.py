"""Pictures of a run: encoded bytes, named by the hash of their content.

A `Picture` is a PNG or JPEG file in memory. A `PlacedPicture` has the picture's position in a sequence of token ids. It
is sent as a `PictureRef`; the bytes of each picture are sent separately, once per content.

A faulty picture is rejected where it enters, with a `PictureError` that gives the reason: other formats,
animations, damaged files, and sizes above the limits below. Sizes are read from the file's header before a pixel is
decoded, so a decompression bomb costs nothing.

Pixels (`Picture.pixels`) are those that a viewer shows: rotated according to EXIF, transparent parts on white, palettes
and grey as RGB, 16 bits per channel reduced to their upper 8.

Pillow is imported only to decode or encode; sending a picture does not need it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

MAX_BYTES = 16 << 20
"""Largest encoded picture, in bytes."""
MAX_SIDE = 16384
"""Longest side, in pixels."""
MAX_PIXELS = 1 << 25
"""Largest number of pixels, 32 million: 100 MB when decoded."""

MAX_PICTURES = 1024
"""Largest number of pictures of one prompt or sample."""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_OTHERS = {
    b"gif8": "GIF",
    b"riff": "WebP",
    b"bm": "BMP",
    b"ii*\0": "TIFF",
    b"mm\0*": "TIFF",
    b"<svg": "SVG",
    b"<?xml": "SVG",
}
_HASH = re.compile(r"[0-9a-f]{64}")
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<base64>;base64)?,", re.IGNORECASE)
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_FORMATS = ("PNG", "JPEG")
_ORIENTATION = 0x0112
"""EXIF tag of the orientation; the values in `_QUARTER_TURNS` swap width and height."""
_QUARTER_TURNS = (5, 6, 7, 8)
_ORIENTATION_MARKS = (b"Exif", b"eXIf", b"exif", b"Orientation")
"""Markers of EXIF and XMP. Every file with an orientation that Pillow reads contains one of them."""
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})


class PictureError(ValueError):
    """A picture that cannot be used. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG or JPEG file in memory. Pictures with equal content are equal.

    Create one with `from_bytes`, `from_path`, `from_data_url`, `from_array` or `from_image`, which check the whole
    file.
    """

    data: bytes = field(repr=False, compare=False)
    """The file's bytes."""
    sha256: str
    """Hash of `data`, 64 hexadecimal digits."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Picture:
        """Return the picture in the file content `data`, after decoding it once as a check.

        Raises:
            PictureError: the file is not a PNG or JPEG, is damaged or animated, or exceeds a limit.
        """
        picture = cls.received(bytes(data))
        picture.image()
        return picture

    @classmethod
    def received(cls, data: bytes, sha256: str | None = None) -> Picture:
        """Check format and limits of `data`, and return the picture without decoding it.

        Args:
            data: content of the file.
            sha256: hash given by the sender; None: compute it from the content.

        Raises:
            PictureError: the file is not a PNG or JPEG, exceeds a limit, or has another hash.
        """
        size_of(data)
        digest = hashlib.sha256(data).hexdigest()
        if sha256 is not None and digest != sha256:
            raise PictureError(f"the picture's bytes have the SHA-256 {digest}, expected {sha256}")
        return cls(data, digest)

    @classmethod
    def from_path(cls, path: str | Path) -> Picture:
        """Return the picture in a file.

        Raises:
            PictureError: the file cannot be read, or as for `from_bytes`.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise PictureError(f"{path} cannot be read: {error}") from None
        try:
            return cls.from_bytes(data)
        except PictureError as error:
            raise PictureError(f"{path}: {error}") from None

    @classmethod
    def from_base64(cls, text: str) -> Picture:
        """Return the picture in base64.

        Raises:
            PictureError: `text` is not base64, or as for `from_bytes`.
        """
        if len(text) > MAX_BYTES * 3 // 2:
            raise PictureError(f"the picture has {len(text)} characters of base64, above {MAX_BYTES} bytes")
        try:
            data = base64.b64decode("".join(text.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise PictureError(f"the picture is not base64: {error}") from None
        return cls.from_bytes(data)

    @classmethod
    def from_data_url(cls, url: str) -> Picture:
        """Return the picture in a URL `data:image/png;base64,...`.

        Raises:
            PictureError: it is not a data URL (other URLs are never fetched), it is not base64, or as for `from_bytes`.
        """
        match = _DATA_URL.match(url)
        if match is None:
            raise PictureError(
                f"{url[:60]!r} is not a data URL, and nothing is fetched from other URLs; send "
                "data:image/png;base64,..."
            )
        if match["base64"] is None:
            raise PictureError(f"{url[:60]!r} is not in base64: send data:image/png;base64,...")
        return cls.from_base64(url[match.end() :])

    @classmethod
    def from_array(cls, pixels_HW3: NDArray[np.uint8]) -> Picture:
        """Return the pixels `[height, width, 3]`, uint8, as a PNG.

        Raises:
            PictureError: the array is of another type or shape, or above a limit.
        """
        from PIL import Image

        pixels = np.asarray(pixels_HW3)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise PictureError(
                f"the picture is an array {pixels.dtype} {list(pixels.shape)}: give uint8 [height, width, 3]"
            )
        _check_size(pixels.shape[1], pixels.shape[0])
        return cls.from_image(Image.fromarray(pixels))

    @classmethod
    def from_image(cls, image: Image.Image) -> Picture:
        """Return a PIL image as a PNG, without loss.

        Raises:
            PictureError: the image cannot be read or written, or exceeds a limit.
        """
        _check_size(*image.size)
        file = io.BytesIO()
        try:
            _upright(image).save(file, "PNG", compress_level=1)  # a few percent larger, written in a fifth of the time
        except Exception as error:  # Pillow's plug-ins raise errors of any kind
            raise PictureError(f"the picture cannot be written as PNG: {error}") from None
        return cls.received(file.getvalue())

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels of the result of `image`, after a rotation that EXIF may request."""
        width, height = size_of(self.data)
        if any(mark in self.data for mark in _ORIENTATION_MARKS) and self._lies_on_its_side():
            return height, width
        return width, height

    def _lies_on_its_side(self) -> bool:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.data), formats=_FORMATS) as image:
                return image.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS
        except Exception as error:  # as in `image`
            raise PictureError(f"the picture is damaged: {error}") from None

    @property
    def media_type(self) -> str:
        """`image/png` or `image/jpeg`."""
        return "image/png" if self.data.startswith(_PNG) else "image/jpeg"

    @property
    def data_url(self) -> str:
        """The picture as a URL `data:image/png;base64,...`."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def image(self) -> Image.Image:
        """Decode to a PIL image in RGB, as a viewer shows it.

        Raises:
            PictureError: the file is damaged or animated.
        """
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.data), formats=_FORMATS) as image:
                if getattr(image, "n_frames", 1) > 1 and image.format == "PNG":
                    raise PictureError("the picture is an animation: give one frame")
                if image.size != (stored := size_of(self.data)):
                    raise PictureError(f"the picture is damaged: its headers name {stored} and {image.size} pixels")
                image.load()
                return _upright(image)
        except PictureError:
            raise
        except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
            raise PictureError(f"the picture is damaged: {error}") from None

    def pixels(self) -> NDArray[np.uint8]:
        """Decode to `[height, width, 3]`, RGB.

        Raises:
            PictureError: as for `image`.
        """
        return np.asarray(self.image())

    def __str__(self) -> str:
        width, height = self.size
        return f"[picture {width}x{height} {self.sha256[:8]}]"


@dataclass(frozen=True, slots=True)
class PictureRef:
    """A picture in a sequence of token ids, by hash: the form in messages.

    The span `[position, position + length)` runs from the picture's first placeholder to its last. For most models
    it contains only placeholders. Models that cut a picture into tiles or lines (Idefics3, Mistral 3) have ordinary
    tokens between the placeholders. A placeholder's id outside of every span is an ordinary token.
    """

    position: int
    length: int
    sha256: str

    def __post_init__(self) -> None:
        if self.position < 0 or self.length < 1:
            raise ValueError(
                f"picture at position {self.position} with length {self.length}: expected at least 0 and 1"
            )
        if not _HASH.fullmatch(self.sha256):
            raise ValueError(f"picture's sha256 is {self.sha256!r:.80}, expected 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a sequence of token ids; see `PictureRef` for its span."""

    position: int
    length: int
    picture: Picture

    @property
    def ref(self) -> PictureRef:
        """The form in messages."""
        return PictureRef(self.position, self.length, self.picture.sha256)

    @property
    def end(self) -> int:
        """Position after the last placeholder."""
        return self.position + self.length

    def shifted(self, offset: int) -> PlacedPicture:
        """Return the same picture `offset` tokens later."""
        return PlacedPicture(self.position + offset, self.length, self.picture)


def check_count(count: int) -> None:
    """Check that a prompt or a sample may have `count` pictures.

    Raises:
        PictureError: there are too many.
    """
    if count > MAX_PICTURES:
        raise PictureError(f"there are {count} pictures: at most {MAX_PICTURES} in one prompt or sample")


def check_spans(pictures: Sequence[PlacedPicture | PictureRef], tokens: int) -> None:
    """Check that the spans of `pictures` follow one another within `tokens` tokens.

    Raises:
        ValueError: there are too many, or they overlap, are out of order or reach beyond the end.
    """
    check_count(len(pictures))
    end = 0
    for number, placed in enumerate(pictures):
        if placed.position < end or placed.length < 1:
            raise ValueError(f"picture {number} at position {placed.position} begins before {end}: give them in order")
        end = placed.position + placed.length
        if end > tokens:
            raise ValueError(f"picture {number} ends at position {end}, and there are {tokens} tokens")


def size_of(data: bytes) -> tuple[int, int]:
    """Return the width and height in the header of a PNG or JPEG file.

    Raises:
        PictureError: the file is neither, its header is damaged, or it exceeds a limit.
    """
    if len(data) > MAX_BYTES:
        raise PictureError(f"the picture has {len(data)} bytes, above the limit of {MAX_BYTES}")
    if data.startswith(_PNG):
        if len(data) < 24 or data[12:16] != b"IHDR":
            raise PictureError("the picture is damaged: its PNG header is cut off")
        width, height = struct.unpack(">II", data[16:24])
    elif data.startswith(_JPEG):
        width, height = _jpeg_size(data)
    else:
        raise PictureError(f"the picture is {_format_name(data)}: give PNG or JPEG")
    _check_size(width, height)
    return width, height


def _format_name(data: bytes) -> str:
    if not data:
        return "empty"
    name = next((name for magic, name in _OTHERS.items() if data.lstrip()[:8].lower().startswith(magic)), "")
    return name or f"of an unknown format (it begins with {data[:8]!r})"


def _jpeg_size(data: bytes) -> tuple[int, int]:
    position = 2
    while position + 9 <= len(data):
        if data[position] != 0xFF:
            break
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
        elif marker in _WITHOUT_LENGTH:
            position += 2
        elif marker in _START_OF_FRAME:
            height, width = struct.unpack(">HH", data[position + 5 : position + 9])
            return width, height
        else:
            position += 2 + struct.unpack(">H", data[position + 2 : position + 4])[0]
    raise PictureError("the picture is damaged: its JPEG header is cut off")


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise PictureError(f"the picture has {width} x {height} pixels: it is empty")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise PictureError(
            f"the picture has {width} x {height} pixels: at most {MAX_SIDE} a side and {MAX_PIXELS} in all"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Return `image` in RGB as a viewer shows it."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion clips them at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.new("RGBA", image.size, "white")
        image.alpha_composite(over)
    return image if image.mode == "RGB" else image.convert("RGB")


def evenly(frames: Sequence[Picture], count: int) -> list[Picture]:
    """Choose `count` of `frames` (at least one), evenly from first to last. With fewer frames some are repeated.

    A `count` of 1 chooses the last frame.
    """
    indices = np.linspace(len(frames) - 1, 0, count).round().astype(int)[::-1]
    return [frames[index] for index in indices]


def picture_from(value: Any) -> Picture:
    """Convert `value` to a picture: a `Picture`, file content, a data URL, an array or a PIL image.

    Raises:
        PictureError: `value` has another type, or cannot be used.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture.from_bytes(bytes(value))
    if isinstance(value, str):
        return Picture.from_data_url(value)
    if isinstance(value, np.ndarray):
        return Picture.from_array(value)
    if hasattr(value, "convert") and hasattr(value, "save"):  # PIL.Image.Image, without importing Pillow
        return Picture.from_image(value)
    raise PictureError(
        f"the picture is a {type(value).__name__}: give PNG or JPEG bytes, a data URL, a uint8 array "
        "[height, width, 3] or a PIL image"
    )
