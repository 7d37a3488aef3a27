"""A process of the pool: reads calls, runs them one after the other in its main thread, answers.

It calls functions, or holds one object, an environment or an agent, whose methods it calls. Messages over its pipes are
a length, then MessagePack:

    4 bytes, little endian: length of what follows
    MessagePack of a `ChildCall` or a `PolicyAnswer` (to the process) or a `ChildReply` (from it)

A function is sent as its import path, its arguments as plain data. A request of a running call to the worker, such as
an environment's reward, is a `ChildReply` with `asks`; a `PolicyAnswer` answers it.

The process ends with the worker. Output of the called function goes to the error stream, never between the replies. The
process is the reaper of all processes that its calls start, so that those left behind are found. It imports no torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import msgspec

from asyncrl.api import Environment
from asyncrl.api.reward import Episode
from asyncrl.comm.typed import convert, msgpack_decoder
from asyncrl.config.plugin_code.import_paths import load_plugin

LENGTH = struct.Struct("<I")
MAX_BYTES = 64 << 20
"""Largest size of a call or a reply in bytes. A reward may see the frames of a whole group: of eight episodes with 64
frames each, a frame may have 128 KiB, as a PNG of 256 x 256 pixels."""
LOAD, MAKE, USE = "load", "make", "use"
"""Kinds of a `ChildCall`. `load` only loads its target. `make` builds the process's object, an instance of `target` (an
agent with `arguments`, else an environment). `use` calls a method of it: `arguments` are the method's name, its
arguments and its keyword arguments.
"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TRACEBACK_CHARS = 4000


class CodeTarget(msgspec.Struct, frozen=True):
    """A user's function or class at import path `path`, with its keyword arguments (of the constructor for a class)."""

    path: str
    args: dict[str, Any]


class ChildCall(msgspec.Struct, frozen=True):
    """Call `target` with `arguments`. `sees` is `LOAD`, `MAKE`, `USE` or the kind of the arguments, which says whether
    these are maps to be read as `Episode`s.
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


def main() -> None:
    """Serve calls until the pipe closes."""
    calls, replies = _own_pipes()
    _limit(int(sys.argv[1]))
    own_pid = os.getpid()
    loaded: dict[bytes, Callable[..., Any]] = {}
    held = _Held(calls, replies)
    decoder = msgpack_decoder(ChildCall)
    _send(replies, ChildReply())
    while head := calls.read(LENGTH.size):
        call = decoder.decode(calls.read(*LENGTH.unpack(head)))
        reply = _answer(call, loaded, held)
        if os.getpid() != own_pid:  # this is a process that the function forked
            os._exit(0)
        _send(replies, reply, left_behind=_left_behind())


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol's pipes away from standard input and output, which user code may use."""
    calls, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return os.fdopen(calls, "rb"), os.fdopen(replies, "wb")


def _limit(memory_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Held:
    """The process's single object, and its requests to the worker."""

    def __init__(self, calls: BinaryIO, replies: BinaryIO) -> None:
        self._calls, self._replies = calls, replies
        self._object: Any = None
        self._runner = asyncio.Runner()  # one loop for all calls: the object may hold objects bound to it

    def make(self, target: CodeTarget, agent: Sequence[Any]) -> None:
        """Construct the object: an environment or, with the arguments of `ChildAgent`, an agent, which is constructed
        once.

        Raises:
            TypeError: it is not an environment.
        """
        if agent:
            from asyncrl.rollout.user_code_pool.agent_protocol import ChildAgent  # it brings numpy and tokenizers

            model, chat = agent
            self._object = self._object or ChildAgent(target.path, target.args, model, chat, self._ask)
            return
        found: Any = load_plugin(target.path)
        made = found(reward=self._reward, **target.args)
        if not isinstance(made, Environment):
            raise TypeError(f"{target.path} made a {type(made).__name__}; it needs to be an asyncrl.api.Environment")
        self._object = made

    def use(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the object's `method` and return its result."""
        value = getattr(self._object, method)(*args, **kwargs)
        if inspect.isawaitable(value):
            value = self._runner.run(_awaited(value))
        if method == "close":
            self._object = None
        return value

    def _reward(self, data: Any, completion: str) -> Any:
        """Request the environment's reward from the worker; a number, or an awaitable on an event loop."""
        value = self._ask(data, completion)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return value
        return _awaited_value(value)

    def _ask(self, *what: Any) -> Any:
        self._replies.write(packed(ChildReply(asks=list(what))))
        self._replies.flush()
        (length,) = LENGTH.unpack(self._calls.read(LENGTH.size))
        answer = msgpack_decoder(PolicyAnswer).decode(self._calls.read(length))
        if answer.error:
            raise RuntimeError(answer.error)
        return answer.value


async def _awaited_value(value: Any) -> Any:
    return value


def _answer(call: ChildCall, loaded: dict[bytes, Callable[..., Any]], held: _Held) -> ChildReply:
    try:
        if call.sees == MAKE:
            held.make(call.target, call.arguments)
            return ChildReply()
        if call.sees == USE:
            return ChildReply(held.use(*call.arguments))
        function = _loaded(call.target, loaded)
        if call.sees == LOAD:
            return ChildReply()
        value = function(*_arguments(call))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return ChildReply(value)
    except BaseException as error:  # the process serves further calls, whatever the function raises
        trace = traceback.format_exc()[-_TRACEBACK_CHARS:]
        return ChildReply(error=f"{type(error).__name__}: {_text(error)}", traceback=trace)


def _loaded(target: CodeTarget, loaded: dict[bytes, Callable[..., Any]]) -> Callable[..., Any]:
    key = msgspec.msgpack.encode(target)
    if key not in loaded:
        found: Any = load_plugin(target.path)
        if inspect.isclass(found):
            instance: Any = found(**target.args)
            loaded[key] = instance
        else:
            loaded[key] = partial(found, **target.args)
    return loaded[key]


def _arguments(call: ChildCall) -> Sequence[Any]:
    if call.sees == "episode":
        return [convert(call.arguments[0], Episode)]
    if call.sees == "group":
        return [convert(call.arguments[0], list[Episode])]
    return call.arguments


async def _awaited(value: Any) -> Any:
    return await value


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception as unprintable:
        return f"(its text cannot be made: {type(unprintable).__name__})"


def _left_behind() -> bool:
    """True if the calls so far left processes behind. Ended processes are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _send(replies: BinaryIO, reply: ChildReply, *, left_behind: bool = False) -> None:
    try:
        data = packed(msgspec.structs.replace(reply, left_behind=left_behind))
    except ValueError as error:
        data = packed(ChildReply(error=f"what it returned {error}", left_behind=left_behind))
    replies.write(data)
    replies.flush()
