"""Decoding into types, from any thread.

msgspec analyses a type at its first use. If another thread uses the same type at that moment, or a type that contains
it, the process ends by SIGSEGV. This happened with msgspec 0.22, in two threads that read the same kind of file for the
first time. So types are analysed here, one after the other. All code of asyncrl that decodes into types uses these
functions.
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
        msgspec.DecodeError: `data` is not JSON, or not of this kind.
    """
    return json_decoder(kind).decode(data)


def decode_yaml(data: bytes, kind: type[T]) -> T:
    """Decode YAML into `kind`.

    Raises:
        msgspec.DecodeError: `data` is not YAML, or not of this kind.
    """
    msgpack_decoder(kind)  # analyses the type
    return msgspec.yaml.decode(data, type=kind)


def convert(value: Any, kind: type[T], *, str_keys: bool = False) -> T:
    """Convert plain data into `kind`; `str_keys`: all keys of mappings are strings, as JSON has them.

    Raises:
        msgspec.ValidationError: `value` is not of this kind.
    """
    msgpack_decoder(kind)  # analyses the type
    return msgspec.convert(value, kind, str_keys=str_keys)
