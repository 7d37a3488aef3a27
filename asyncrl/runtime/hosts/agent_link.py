"""What a host's agent and the launcher send each other, and the link that carries it over cut connections.

A frame is its length, four bytes, and a `Frame` in MessagePack. Each message has a number and is repeated on the next
connection until the other end has confirmed it, so it takes effect once and in order: no process is started twice, no
output is missing, and no exit code is lost. A connection that is silent for `CUT_S` is closed; the agent opens another.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from asyncrl.comm.typed import msgpack_decoder
from asyncrl.comm.waits.running_time import RunningTimeout

ALIVE_EVERY_S = 10.0
"""Each end sends something at least this often."""
CUT_S = 30.0
SILENCE_S = 120.0
"""Silence of the launcher after which an agent ends its processes. Longer than a launcher may be paused, a virtual
machine moved, or a network down."""
GONE_S = 60.0
"""Silence of an agent after which its processes count as lost: before their peers give up (a minute and a half)."""
BACK_S = 5.0
"""Longest time, in s, for an agent to be connected again once what carried it has ended: `ssh` may have ended alone."""
LONGEST_FRAME = 2 << 20
OUT_OF_ORDER = -1
"""Number of a message to an agent whose link is closed: it is handled, whatever its number should have been."""
_HELD_BYTES = 16 << 20
CUT = (OSError, EOFError, ValueError, msgspec.MsgspecError)
"""Errors of a connection that is cut, silent, or brings what is malformed."""


class Order(msgspec.Struct, frozen=True):
    """What an agent has to know to reach the launcher; it is also the first frame of each of its connections.

    Attributes:
        address, port: of the launcher.
        host: name of the agent's host in `system.hosts`.
        incarnation: number by which the launcher knows this agent from earlier and later ones of the host.
        token, certificate: by which the two prove themselves to each other.
        detached: the agent leaves its parent, and ends once its standard input does (Ray).
    """

    address: str
    port: int
    host: str
    incarnation: int
    token: str
    certificate: str
    detached: bool = False


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start process number `process` below a supervisor.

    Attributes:
        command: its command line.
        environment: NAME=VALUE, added to the environment of the agent.
        folder: working folder; created with `files`, by name, if there are some.
        gpus: the process sees these of the GPUs that the cluster gave the agent; None: those of the environment.
    """

    process: int
    command: list[str]
    environment: list[bytes]
    folder: str
    files: dict[str, str]
    gpus: list[int] | None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ask the process to stop."""

    process: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """End the process with everything that it started."""

    process: int


class End(msgspec.Struct, frozen=True, tag=True):
    """End all processes, and yourself."""


class Output(msgspec.Struct, frozen=True, tag=True):
    """What the process, or one that it started, has printed."""

    process: int
    text: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process has ended with this exit code; a negative one is a signal."""

    process: int
    code: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """The agent has ended all processes, and ends."""

    why: str


Message = Start | Stop | Kill | End | Output | Ended | Left


class Frame(msgspec.Struct, frozen=True):
    """A message and its number, or a sign of life; and the number of messages of the other end that were handled."""

    handled: int
    number: int = 0
    message: Message | None = None


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the content of the next frame.

    Raises:
        EOFError: the connection has ended.
        ValueError: the frame is longer than `LONGEST_FRAME`.
    """
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > LONGEST_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {LONGEST_FRAME} are taken")
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, content: Frame | Order) -> None:
    """Send one frame."""
    encoded = msgspec.msgpack.encode(content)
    writer.write(len(encoded).to_bytes(4, "big") + encoded)


class Link:
    """One end of the connection between the launcher and an agent, which may be cut and opened again."""

    def __init__(self) -> None:
        self._unconfirmed: deque[Message] = deque()
        self._first = 0  # number of the first of these
        self._handled = 0
        self._bytes, self._most_bytes = 0, float(_HELD_BYTES)
        self._work = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._heard = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self.connected, self.cut = asyncio.Event(), asyncio.Event()
        """Of the two, `connected` is set while there is a connection, and `cut` while there is none."""
        self.cut.set()
        self.was_heard = False
        """True once the other end has been connected."""

    def send(self, message: Message) -> None:
        """Have `message` delivered; it waits while there is no connection."""
        self._unconfirmed.append(message)
        self._bytes += _size(message)
        self._work.set()

    async def room(self) -> None:
        """Wait while the other end has not confirmed too much of what was sent."""
        while self._bytes > self._most_bytes:
            self._confirmed.clear()
            await self._confirmed.wait()

    def hold_all(self) -> None:
        """Let nobody wait for room any more."""
        self._most_bytes = math.inf
        self._confirmed.set()

    async def delivered(self) -> None:
        """Wait until the other end has confirmed all that was sent."""
        while self._unconfirmed:
            self._confirmed.clear()
            await self._confirmed.wait()

    async def silent(self, first_s: float, limit_s: float) -> None:
        """Return once nothing has arrived for `limit_s` of this process's running time, or at first for `first_s`."""
        wait_s = first_s
        with suppress(TimeoutError):
            while True:
                self._heard.clear()
                async with RunningTimeout(wait_s):
                    await self._heard.wait()
                wait_s = limit_s

    async def exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Callable[[Message], None]
    ) -> None:
        """Exchange messages over this connection, in place of an earlier one, until it ends.

        Raises:
            OSError, EOFError, ValueError, MsgspecError: `CUT`.
        """
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer, self._work = writer, asyncio.Event()
        self.connected.set()
        self.cut.clear()
        tasks = {asyncio.create_task(self._speak(writer, self._work)), asyncio.create_task(self._hear(reader, handle))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.transport.abort()
            if self._writer is writer:
                self.connected.clear()
                self.cut.set()

    async def _speak(self, writer: asyncio.StreamWriter, work: asyncio.Event) -> None:
        number = self._first
        while True:
            work.clear()
            while number - self._first < len(self._unconfirmed):
                write_frame(writer, Frame(self._handled, number, self._unconfirmed[number - self._first]))
                number += 1
                await writer.drain()
            write_frame(writer, Frame(self._handled))
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_EVERY_S):
                    await work.wait()

    async def _hear(self, reader: asyncio.StreamReader, handle: Callable[[Message], None]) -> None:
        while True:
            async with RunningTimeout(CUT_S):
                frame = msgpack_decoder(Frame).decode(await read_frame(reader))
            self.was_heard = True
            self._heard.set()
            for _ in range(min(frame.handled - self._first, len(self._unconfirmed))):
                self._bytes -= _size(self._unconfirmed.popleft())
                self._first += 1
                self._confirmed.set()
            if frame.message is not None:
                if frame.number in (self._handled, OUT_OF_ORDER):
                    self._handled += 1
                    handle(frame.message)
                self._work.set()


def _size(message: Message) -> int:
    return len(message.text) if isinstance(message, Output) else 0
