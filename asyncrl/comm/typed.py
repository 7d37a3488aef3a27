"""Decoding into types, from any thread.

msgspec works out a type when it is used first. It is not ready for another thread that uses the same type meanwhile, or
one that has it as a part: the process ends by SIGSEGV (msgspec 0.22, two threads that read the same kind of file for
the first time). So types are worked out here, one after the other. Everything in asyncrl that decodes into types does
so by these functions.
"""

from __future__ import annotations

import threading
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_working_out = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: UnionType) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON into `kind`."""
    found = _json.get(kind)
    if found is None:
        with _working_out:
            found = _json[kind] = msgspec.json.Decoder(kind)
    return found


@overload
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(kind: UnionType) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of MessagePack into `kind`."""
    found = _msgpack.get(kind)
    if found is None:
        with _working_out:
            found = _msgpack[kind] = msgspec.msgpack.Decoder(kind)
    return found


def decode_json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Decode JSON into `kind`.

    Raises:
        msgspec.DecodeError: it is not JSON, or not of this kind.
    """
    return json_decoder(kind).decode(data)


def convert(value: Any, kind: type[T], *, str_keys: bool = False) -> T:
    """Convert plain data into `kind`; `str_keys`: all keys of mappings are strings, as JSON has them.

    Raises:
        msgspec.ValidationError: it is not of this kind.
    """
    msgpack_decoder(kind)  # works the type out
    return msgspec.convert(value, kind, str_keys=str_keys)
