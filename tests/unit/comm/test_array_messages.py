from __future__ import annotations

import contextlib
import datetime
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl.comm.trajectory_codec.array_messages import (
    DEFAULT_MAX_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    CodecError,
    Column,
    Header,
    decode_as,
    encode_joined,
)
from tests.examples import examples

_HEADER = msgspec.msgpack.Decoder(Header[dict[str, bool | int | float | str | list[Any] | dict[str, Any] | None]])


@dataclass
class Message:
    """Message that the functions below turn into frames and back."""

    kind: str
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def encode(message: Message, max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    columns = {name: Column(a.dtype, a.shape, [np.ascontiguousarray(a)]) for name, a in message.arrays.items()}
    return encode_joined(message.kind, message.meta, columns, max_bytes=max_bytes)


def decode(frames: list[bytes], max_bytes: int = DEFAULT_MAX_BYTES) -> Message:
    header, arrays = decode_as(_HEADER, frames, max_bytes=max_bytes)
    return Message(header.kind, header.meta, arrays)


_DTYPES = ["b1", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
arrays = st.sampled_from(_DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
messages = st.builds(
    Message,
    st.text(),
    st.dictionaries(st.text(), plain, max_size=4),
    st.dictionaries(st.text(), arrays, max_size=4),
)


def header(specs: object, **fields: object) -> bytes:
    """A header of these arrays, given as name, dtype and shape, with other `fields`."""
    if isinstance(specs, list):
        specs = [dict(zip(("name", "dtype", "shape"), spec, strict=False)) for spec in specs]
    plain = {"magic": MAGIC, "protocol": PROTOCOL_VERSION, "kind": "k", "meta": {}, "arrays": specs}
    return msgspec.msgpack.encode(plain | fields)


@given(messages)
def test_decoding_gives_back_what_was_encoded(message: Message) -> None:
    decoded = decode(encode(message))
    assert (decoded.kind, decoded.meta) == (message.kind, message.meta)
    assert list(decoded.arrays) == list(message.arrays)
    for name, array in message.arrays.items():
        assert decoded.arrays[name].dtype == array.dtype
        assert decoded.arrays[name].shape == array.shape
        assert decoded.arrays[name].tobytes() == array.tobytes()


def test_decoded_arrays_are_aligned_read_only_views_into_the_payload() -> None:
    frames = encode(Message("k", {}, {"a": np.arange(3, dtype=np.int8), "b": np.arange(4.0)}))
    decoded = decode(frames)
    payload = np.frombuffer(frames[1], np.uint8)
    for array in decoded.arrays.values():
        assert np.shares_memory(array, payload)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_views_of_a_writable_buffer_are_read_only_too() -> None:
    frames = [bytearray(frame) for frame in encode(Message("k", {}, {"a": np.arange(3)}))]
    with pytest.raises(ValueError, match="read-only"):
        decode(frames).arrays["a"][0] = 7


def test_strided_and_transposed_arrays_arrive_in_order() -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    decoded = decode(encode(Message("k", {}, {"strided": base[:, ::2], "transposed": base.T})))
    np.testing.assert_array_equal(decoded.arrays["strided"], base[:, ::2])
    np.testing.assert_array_equal(decoded.arrays["transposed"], base.T)


def test_a_message_without_arrays_is_one_frame() -> None:
    assert len(encode(Message("k", {"a": 1}))) == 1


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", ">i4", "c8", "V4"])
def test_arrays_of_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(CodecError, match=r"'bad'.*use one of"):
        encode(Message("k", {}, {"bad": np.zeros(2, dtype)}))


@pytest.mark.parametrize("value", [object(), np.float32(1), 1j, 2**70])
def test_meta_that_is_not_plain_data_is_refused(value: object) -> None:
    with pytest.raises(CodecError, match="not plain data"):
        encode(Message("k", {"value": value}))


def test_messages_over_the_limit_are_refused_at_both_ends() -> None:
    message = Message("k", {}, {"a": np.zeros(1000, np.uint8)})
    with pytest.raises(CodecError, match="limit 100"):
        encode(message, max_bytes=100)
    with pytest.raises(CodecError, match="over the limit of 100"):
        decode(encode(message), max_bytes=100)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"", b""],
        [header([]), b"left over"],
        [header([["a", "<i4", [2]]]), b"1234567"],
        [header([["a", "<i4", [2]]])],
        [header([["a", "|O", [1]]]), b"12345678"],
        [header([["a", "<i4", [-2]]]), b"12345678"],
        [header([["a", "<i4", [True, 2]]]), b"12345678"],
        [header([["a", "<i4", [0, 2**30, 2**30, 2**30]]]), b""],
        [header([["a", "<i4", [2**31]]]), b""],
        [header([["a", "<i4", [1] * 9]]), b"12345678"],
        [header([["a", "<i4", 2]]), b"12345678"],
        [header([["a", ["<i4"], [2]]]), b"12345678"],
        [header([["a", "<i4", [2]], ["a", "<i4", [2]]]), b"1234567812345678"],
        [header([["a", "<i4"]]), b"12345678"],
        [header([[]] * 5000)],
        [header({})],
        [header([], meta=[1])],
        [header([], meta={b"bytes": 1})],
        [header([], meta={"when": datetime.datetime.now(datetime.UTC)})],
        [header([], meta={"code": msgspec.msgpack.Ext(5, b"x")})],
        [header([], kind=1)],
        [header([]) + b"tail"],
        [header([], magic="other")],
        [header([], protocol=PROTOCOL_VERSION + 1)],
        [msgspec.msgpack.encode([MAGIC, PROTOCOL_VERSION, "k", {}, []])],
        [msgspec.msgpack.encode({"a": 1})],
        [b"\x91" * 100_000],
        [b"\xdd\xff\xff\xff\xff"],
        [header([]).removesuffix(b"\x90") + b"\xdd\xff\xff\xff\xff"],
        [header([], meta={"a": 0}).replace(b"\xa1a\x00", b"\xa1a" + b"\x91" * 100_000)],
        [header([], kind="kind").replace(b"\xa4kind\xa4kind", b"\xa4kind\xa4kin\xff")],
    ],
)
def test_malformed_frames_raise_codec_error(frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        decode(frames)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (header([["a", "|O", [1]]]), "arrays[0].dtype"),
        (header([["a", "<i4", [-2]]]), "Expected `int` >= 0 - at `$.arrays[0].shape[0]`"),
        (header([], kind=1), "Expected `str`, got `int` - at `$.kind`"),
        (header([], protocol=1), "$.protocol"),
        (header([], meta=[1]), "Expected `object`, got `array` - at `$.meta`"),
    ],
)
def test_a_malformed_header_names_the_field_and_what_was_expected(frame: bytes, named: str) -> None:
    with pytest.raises(CodecError, match=re.escape(named)):
        decode([frame])


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_raise_nothing_but_codec_error(frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        decode(frames)


@settings(max_examples=examples(300))
@given(messages, st.data())
def test_damaged_messages_decode_or_raise_codec_error(message: Message, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    frame = data.draw(st.sampled_from(frames))
    for _ in range(data.draw(st.integers(1, 4))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(0, len(frame))) :]
    with contextlib.suppress(CodecError):
        decode(frames)
