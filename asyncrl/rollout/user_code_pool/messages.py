"""Messages over the pipes between a RolloutWorker and its pool's processes: a length, then MessagePack.

    4 bytes, little endian: length of what follows
    MessagePack of a `ChildCall` or a `PolicyAnswer` (to the process) or a `ChildReply` (from it)

A function is sent as its import path, its arguments as plain data. A request of a running call to the worker, such as
an environment's reward, is a `ChildReply` with `asks`; a `PolicyAnswer` answers it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.comm.typed import msgpack_decoder

LENGTH = struct.Struct("<I")
MAX_BYTES = 64 << 20
"""Largest size of a call or a reply in bytes. A reward may see the frames of a whole group: of eight episodes with 64
frames each, a frame may have 128 KiB, as a PNG of 256 x 256 pixels."""


class CodeTarget(msgspec.Struct, frozen=True):
    """A user's function or class at import path `path`, with its keyword arguments (of the constructor for a class)."""

    path: str
    args: dict[str, Any]


MAKE, USE = "make", "use"
"""Kinds of a `ChildCall`. `make` builds the process's object, an instance of `target` (an agent with `arguments`, else
an environment). `use` calls a method of it: `arguments` are the method's name, its arguments and its keyword arguments.
"""


class ChildCall(msgspec.Struct, frozen=True):
    """Call `target` with `arguments`. `sees` is `MAKE`, `USE` or the kind of the arguments, which says whether these
    are maps to be read as `Episode`s.
    """

    target: CodeTarget
    sees: str
    arguments: list[Any]


class ChildReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result as plain data, or the exception and the end of its traceback if `error` is set.

    `left_behind`: processes that the call started still run. `asks`: this is not the reply yet but a request: the
    arguments of the environment's reward, or a call of an agent. The call continues once the worker has answered.
    """

    value: Any = None
    error: str = ""
    traceback: str = ""
    left_behind: bool = False
    asks: list[Any] | None = None


class PolicyAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer of the worker to a request of the process; if `error` is set, the reason why it failed."""

    value: Any = None
    error: str = ""


_REPLY = msgpack_decoder(ChildReply)


def decode_reply(data: bytes) -> ChildReply:
    """Decode a reply of a process of the pool.

    Raises:
        ValueError: the data is not a reply.
    """
    try:
        return _REPLY.decode(data)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def plain(value: object) -> object:
    """Convert a value that MessagePack does not know to plain data: arrays and scalars of numpy, other mappings.

    Raises:
        NotImplementedError: it has no plain form.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if _is_frame(value):
        from asyncrl.api.picture import picture_from  # imports numpy, as the value has

        return picture_from(value)
    tolist = getattr(value, "tolist", None)  # numpy's arrays and scalars, without importing numpy
    if callable(tolist):
        return tolist()
    raise NotImplementedError(f"a {type(value).__module__}.{type(value).__qualname__} is not plain data")


def _is_frame(value: object) -> bool:
    """True for values that are sent as a picture: a uint8 array [height, width, 3], or a PIL image."""
    if type(value).__module__.startswith("PIL."):
        return True
    shape = getattr(value, "shape", ())
    return (
        isinstance(shape, tuple) and len(shape) == 3 and shape[2] == 3 and str(getattr(value, "dtype", "")) == "uint8"
    )


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


def packed(message: ChildCall | ChildReply | PolicyAnswer) -> bytes:
    """Encode `message`, with its length in front.

    Raises:
        ValueError: it contains something that is not plain data, or is larger than `MAX_BYTES`.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, NotImplementedError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"cannot travel to or from another process: {error}") from error
    if len(body) > MAX_BYTES:
        raise ValueError(f"has {len(body)} bytes, more than the {MAX_BYTES} that may travel to or from a process")
    return LENGTH.pack(len(body)) + body
