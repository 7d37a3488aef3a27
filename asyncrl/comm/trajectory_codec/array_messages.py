"""Typed messages with arrays: the frames of trajectories, on sockets and in files. No pickle.

A message travels as one or two frames:

    header    msgpack map of a `Header`: magic, protocol version, kind, meta, and name, dtype and shape of each array
    payload   the arrays' raw little-endian bytes one after the other, each start rounded up to a multiple of 8

The payload frame is left out when there are no arrays. One payload frame instead of one per array costs a copy at the
sender (a memcpy, about 10 GB/s). It saves libzmq at least one system call per array: on plain sockets, the rate is
twice that of eight frames, at both 13 kB and 208 kB per message. The receiver makes read-only views into the payload.

Each kind of message has a type for its meta. For any bytes, `decode_as` either returns the arrays and a header whose
meta has that type, or raises CodecError. The error names the header's field and the expected type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.comm.sockets import Frame

Array: TypeAlias = NDArray[Any]

MAGIC: Final = "asyncrl"
PROTOCOL_VERSION: Final = 3
DEFAULT_MAX_BYTES = 1 << 30
"""Limit of one message, header and payload together. A GiB is 80 million trajectory tokens."""
MAX_HEADER_BYTES = 64 << 20  # the master's metadata of a very large batch; strings and lists within are bounded by it
MAX_ARRAYS = 4096
MAX_DIMS = 8
_MAX_ITEMS = 1 << 40  # of one array, far beyond any message and far below what numpy can address
_ALIGNMENT = 8  # bytes: the widest item, so that every view is aligned
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]

_DtypeCode: TypeAlias = Literal[
    "|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"
]  # fmt: skip
_DTYPES: dict[str, np.dtype[Any]] = {code: np.dtype(code) for code in get_args(_DtypeCode)}
_CODES: dict[np.dtype[Any], _DtypeCode] = {dtype: code for code, dtype in _DTYPES.items()}  # type: ignore[misc]

M = TypeVar("M")
_ENCODER = msgspec.msgpack.Encoder()


class ArraySpec(msgspec.Struct, frozen=True):
    """An array of the payload."""

    name: str
    dtype: _DtypeCode
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_DIMS)]


class Header(msgspec.Struct, Generic[M], frozen=True):
    """The first frame of every message."""

    magic: Literal["asyncrl"]
    protocol: Literal[3]
    kind: str
    meta: M
    arrays: Annotated[list[ArraySpec], msgspec.Meta(max_length=MAX_ARRAYS)]


class CodecError(ValueError):
    """A message that cannot be encoded, or bytes that are not a valid message."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """An array given in parts of its dtype, which fill its shape when joined end to end."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Sequence[Array | bytes]


def encode_joined(
    kind: str, meta: Any, columns: Mapping[str, Column], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> list[Frame]:
    """Return the frames of a message whose arrays are given in parts. Joining the parts here takes one copy instead of
    two.

    `meta` is plain data, or an object that msgspec turns into plain data.

    Raises:
        CodecError: `meta` is not plain data, an array's dtype is not a number or bool, or the message is larger than
            `max_bytes`.
    """
    specs: list[ArraySpec] = []
    parts: list[Any] = []
    size = 0
    for name, column in columns.items():
        code = _CODES.get(column.dtype)
        if code is None:
            known = ", ".join(dtype.name for dtype in _DTYPES.values())
            raise CodecError(f"array {name!r} of message {kind!r} has dtype {column.dtype}: use one of {known}")
        specs.append(ArraySpec(name, code, column.shape))
        nbytes = math.prod(column.shape) * column.dtype.itemsize
        parts += column.parts
        parts.append(_PADDING[-nbytes % _ALIGNMENT])
        size += nbytes + -nbytes % _ALIGNMENT
    try:
        header = _ENCODER.encode(Header(MAGIC, PROTOCOL_VERSION, kind, meta, specs))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"meta of message {kind!r} is not plain data: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        raise CodecError(f"meta of message {kind!r} takes {len(header)} bytes, over {MAX_HEADER_BYTES}: use arrays")
    if len(header) + size > max_bytes:
        raise CodecError(f"message {kind!r} takes {len(header) + size} bytes, limit {max_bytes}: split it")
    return [header, _join(parts)] if columns else [header]


def _join(parts: list[Any]) -> bytes:
    """Join these arrays and bytes end to end; `bytes.join` takes a third of the time of `np.concatenate`."""
    try:
        return b"".join(parts)
    except TypeError:  # a part is a view with gaps
        return b"".join(part.tobytes() if isinstance(part, np.ndarray) else part for part in parts)


def decode_as(
    decoder: msgspec.msgpack.Decoder[Header[M]], frames: Sequence[Frame], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[Header[M], dict[str, Array]]:
    """Return the header of the message in `frames`, with meta of the decoder's type, and the arrays by name.

    The arrays are read-only views into the last frame and keep it alive.

    Raises:
        CodecError: the frames are malformed or larger than `max_bytes` together, or meta is not of that type.
    """
    if not 1 <= len(frames) <= 2:
        raise CodecError(f"a message has 1 or 2 frames, got {len(frames)}")
    header, payload = memoryview(frames[0]), memoryview(frames[1] if len(frames) == 2 else b"").toreadonly()
    if header.nbytes + payload.nbytes > max_bytes or header.nbytes > MAX_HEADER_BYTES:
        raise CodecError(f"message of {header.nbytes} + {payload.nbytes} bytes is over the limit of {max_bytes}")
    decoded = decode_typed(decoder, header, f"header of protocol version {PROTOCOL_VERSION}")
    return decoded, _decode_arrays(decoded.arrays, payload)


def decode_typed(decoder: msgspec.msgpack.Decoder[M], data: Frame | msgspec.Raw, what: str) -> M:
    """Decode `data` as the decoder's type.

    Raises:
        CodecError: `data` is not of that type. The message names it as `what`, with the wrong field (`$` is the whole)
            and the expected type.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"{what}: {error}") from error


def _decode_arrays(specs: list[ArraySpec], payload: memoryview) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    offset = 0
    for spec in specs:
        dtype, count = _DTYPES[spec.dtype], math.prod(spec.shape)
        if math.prod(length or 1 for length in spec.shape) > _MAX_ITEMS:  # numpy limits this also for an empty array
            raise CodecError(f"array {spec.name!r:.80} has shape {spec.shape}: it is too large")
        end = offset + count * dtype.itemsize
        if end > payload.nbytes or spec.name in arrays:
            raise CodecError(f"array {spec.name!r:.80} of shape {spec.shape} comes twice or passes the payload's end")
        array: Array = np.frombuffer(payload, dtype, count, offset) if count else np.empty(0, dtype)
        arrays[spec.name] = array if len(spec.shape) == 1 else array.reshape(spec.shape)
        offset = end + -end % _ALIGNMENT
    if offset != payload.nbytes:
        raise CodecError(f"payload has {payload.nbytes} bytes, its arrays take {offset}")
    return arrays
