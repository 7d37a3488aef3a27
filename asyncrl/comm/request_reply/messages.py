"""The messages of request-reply: one of codec.py behind a call's number and, in replies, the outcome.

    client ─▶ server    [ id, header, payload? ]                 kind: the method
    server ─▶ client    [ id + "R" or "E", header, payload? ]    kind: "reply" or "error"

`id` is the client's own number of the call, an unsigned 64-bit little-endian number. An error's meta holds `type`,
`message` and `traceback`, three strings.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Sequence

from asyncrl.comm.codec import CodecError, Frame, Message

_ID = struct.Struct("<Q")
_OUTCOME = struct.Struct("<Qc")
_REPLY, _ERROR = b"R", b"E"
ERROR_KIND = "error"
_MAX_TEXT = 32_000  # characters of a traceback: enough for any, bounded for a hostile exception
DEFAULT_MAX_BYTES = 1 << 30


def pack_request(call: int, encoded: Sequence[Frame]) -> list[Frame]:
    """Frames of call number `call`."""
    return [_ID.pack(call), *encoded]


def unpack_request(frames: Sequence[memoryview]) -> tuple[int, Sequence[memoryview]]:
    """The call's number and the encoded request.

    Raises:
        CodecError: this is no request.
    """
    if not frames or len(frames[0]) != _ID.size:
        raise CodecError("message does not begin with a call's number")
    return _ID.unpack(frames[0])[0], frames[1:]


def pack_reply(call: int, encoded: Sequence[Frame], *, failed: bool) -> list[Frame]:
    """Frames of the answer to call number `call`."""
    return [_OUTCOME.pack(call, _ERROR if failed else _REPLY), *encoded]


def unpack_reply(frames: Sequence[memoryview]) -> tuple[int, bool, Sequence[Frame]]:
    """The call's number, whether it failed, and the encoded reply.

    Raises:
        CodecError: this is no reply.
    """
    if not frames or len(frames[0]) != _OUTCOME.size:
        raise CodecError("message does not begin with a call's number and outcome")
    call, outcome = _OUTCOME.unpack(frames[0])
    if outcome not in (_REPLY, _ERROR):
        raise CodecError(f"reply has the outcome {outcome!r}, expected {_REPLY!r} or {_ERROR!r}")
    return call, outcome == _ERROR, frames[1:]


def error_message(error: BaseException) -> Message:
    """What the client is told about `error`."""
    text = "".join(traceback.format_exception(error))
    return Message(
        ERROR_KIND,
        {"type": type(error).__name__, "message": str(error)[:_MAX_TEXT], "traceback": text[-_MAX_TEXT:]},
    )
