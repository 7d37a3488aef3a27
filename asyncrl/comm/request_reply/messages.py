"""Format of a call: the types of a request and its reply, and their encoding.

A package defines the calls that it serves, and its callers use the same types:

    class PublishedWeights(Reply, frozen=True):
        path: str

    class Publish(Request[PublishedWeights], frozen=True):
        version: int

The name on the wire, the verb, is the class's in snake case (`publish`). A body is msgpack and must be of its type
exactly: a missing, unknown or wrong field is refused with its path. No arrays and no pickle; free-form parts are
annotated `dict[str, Any]`.

    client ─▶ server    [ id + verb, request ]
    server ─▶ client    [ id + verb, reply ]  or  [ id, failure ]

`id` is the number that the client gave the call, unsigned, 64 bits, little-endian; a failure is a `Failure`.
"""

from __future__ import annotations

import re
import struct
import traceback
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

from asyncrl.comm.typed import msgpack_decoder

_ID = struct.Struct("<Q")
_MAX_TEXT = 32_000  # characters of a traceback: enough for any, bounded for a hostile exception
DEFAULT_MAX_BYTES = 64 << 20
"""Limit of one body: the master's metadata of a very large batch."""


class MessageError(ValueError):
    """A body is not of its type, cannot be encoded or is too large; or frames are neither a request nor a reply."""


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the replies' types."""


class Done(Reply, frozen=True):
    """Reply of a call that returns nothing."""


class Failure(Reply, frozen=True):
    """An exception as the client receives it: its type's name, message and traceback as text."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return `error` as a failure."""
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error)[:_MAX_TEXT], text[-_MAX_TEXT:])


R = TypeVar("R", bound=Reply)
_B = TypeVar("_B", bound=msgspec.Struct)


class Request(msgspec.Struct, Generic[R], frozen=True, forbid_unknown_fields=True):
    """Base of the requests' types; subclass `Request[<type of the reply>]`.

    Attributes:
        verb: the call's name on the wire and in errors, from the class's name.
        reply_type: the type of the server's answer.
    """

    verb: ClassVar[str]
    reply_type: ClassVar[type[Reply]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        (cls.reply_type,) = get_args(cls.__dict__["__orig_bases__"][0])
        cls.verb = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def encode(body: msgspec.Struct) -> bytes:
    """Return `body` as bytes.

    Raises:
        MessageError: a free-form part of it is not plain data, or it is larger than DEFAULT_MAX_BYTES.
    """
    try:
        encoded = msgspec.msgpack.encode(body, enc_hook=_as_builtin)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{type(body).__name__} is not plain data: {error}") from error
    if len(encoded) > DEFAULT_MAX_BYTES:
        raise MessageError(f"{type(body).__name__} takes {len(encoded)} bytes, limit {DEFAULT_MAX_BYTES}")
    return encoded


def decode(encoded: memoryview, body_type: type[_B], max_bytes: int) -> _B:
    """Return the body in `encoded`, which may be any bytes, as `body_type`.

    Raises:
        MessageError: it is not of that type. The message has the path of the first wrong field and the expected type.
    """
    if encoded.nbytes > max_bytes:
        raise MessageError(f"{body_type.__name__} of {encoded.nbytes} bytes is over the limit of {max_bytes}")
    try:
        body: _B = msgpack_decoder(body_type).decode(encoded)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MessageError(f"{body_type.__name__}: {error}") from error
    return body


def pack(call: int, verb: str, body: msgspec.Struct) -> list[bytes]:
    """Return the frames of call number `call`, or of its answer; a failure's verb is empty.

    Raises:
        MessageError: see `encode`.
    """
    return [_ID.pack(call) + verb.encode(), encode(body)]


def unpack(frames: Sequence[memoryview]) -> tuple[int, str, memoryview]:
    """Return the call's number, its verb and the body, still encoded.

    Raises:
        MessageError: this is not a message of request-reply.
    """
    if len(frames) != 2 or len(frames[0]) < _ID.size:
        raise MessageError("message is not a call's number and a body")
    return _ID.unpack_from(frames[0])[0], str(frames[0][_ID.size :], errors="replace"), frames[1]


def _as_builtin(value: Any) -> Any:
    """Return `value` as the built-in number that it derives from. `numpy.float64` is a float, and occurs in users'
    statistics.
    """
    for builtin in (float, int):
        if isinstance(value, builtin):
            return builtin(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")
