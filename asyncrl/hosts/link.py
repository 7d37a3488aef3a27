"""The messages between a host's agent and the launcher, and their delivery over cut connections.

The agent calls the launcher, `POST /agent` over the run's HTTP: one call asks and is held until there is something, or
for `HOLD_S`, another one tells what has happened. Call and answer each have a `Parcel`. Each message has a number and
is repeated until the other end has confirmed it, so it takes effect once and in order: no process is started twice, no
output is missing, and no exit code is lost.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import suppress

import msgspec

from asyncrl.comm.waits import HOLD_S, RunningTimeout

GONE_S = 60.0
"""Silence of an agent after which its processes count as lost: before their peers give up (a minute and a half)."""
BACK_S = 2 * HOLD_S
"""The same once what carried the agent has ended: `ssh` may have ended alone."""
OLD_PYTHON = 103
"""Exit code of an interpreter that asyncrl does not support; its version is the last line of its errors."""
LONGEST_MESSAGE = 2 << 20
_PARCEL_BYTES = 1 << 20
_HELD_BYTES = 16 << 20


class Question(msgspec.Struct, frozen=True, tag=True):
    """The launcher's assumptions about a host, in place of an `Order`. The agent prints its `Findings` and ends.

    Attributes:
        address: address that processes bind to.
        working_folder: folder that processes start in; empty: they make their own below `fileroot`.
        fileroot: folder for runs.
        marker: name of a file that the launcher has put into `fileroot`; empty: the hosts share no folder.
    """

    address: str
    working_folder: str
    fileroot: str
    marker: str


class Findings(msgspec.Struct, frozen=True):
    """Findings on a host; an empty string where nothing is wrong.

    Attributes:
        address: error on binding to the address.
        working_folder: error on entering the folder.
        marker_seen: True if the launcher's file is there, or none was asked for.
        fileroot: reason why no run folder can be made.
        began, at: the host's time when its agent was started, and at the answer, in seconds since 1970.
    """

    address: str
    working_folder: str
    marker_seen: bool
    fileroot: str
    began: float
    at: float


class Order(msgspec.Struct, frozen=True, tag=True):
    """The launcher's address, and the proofs with which an agent calls it.

    Attributes:
        url: of the launcher.
        host: name of the agent's host in `system.hosts`.
        incarnation: number by which the launcher knows this agent from earlier and later ones of the host.
        token, certificate: by which the two prove themselves to each other.
        detached: the agent leaves its parent, and ends once its standard input does (Ray).
    """

    url: str
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
    """Output of the process, or of one that it started."""

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


class Parcel(msgspec.Struct, frozen=True):
    """The next messages, of which the first has number `first`; and how many of the other end were handled."""

    handled: int
    first: int
    messages: list[Message]


class Call(msgspec.Struct, frozen=True):
    """A call of the agent; the answer may wait for messages for `wait_s`."""

    host: str
    incarnation: int
    wait_s: float
    parcel: Parcel


class Link:
    """One end of the exchange between the launcher and an agent."""

    def __init__(self) -> None:
        self._unconfirmed: deque[Message] = deque()
        self._first = 0  # number of the first of these
        self._handled = 0
        self._bytes, self._most_bytes = 0, float(_HELD_BYTES)
        self._more = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._heard = asyncio.Event()
        self.was_heard = False
        """True once something has come from the other end."""

    def send(self, message: Message) -> None:
        """Have `message` delivered."""
        self._unconfirmed.append(message)
        self._bytes += _size(message)
        self._more.set()

    async def wait_for_space(self) -> None:
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

    async def waiting(self) -> None:
        """Wait until there is something that the other end has not confirmed."""
        while not self._unconfirmed:
            self._more.clear()
            await self._more.wait()

    async def silent(self, first_s: float, limit_s: float) -> None:
        """Return once nothing has arrived for `limit_s` of this process's running time, or at first for `first_s`."""
        wait_s = first_s
        with suppress(TimeoutError):
            while True:
                self._heard.clear()
                async with RunningTimeout(wait_s):
                    await self._heard.wait()
                wait_s = limit_s

    def parcel(self) -> Parcel:
        """Return the next messages that the other end has not confirmed."""
        messages, size = list[Message](), 0
        for message in self._unconfirmed:
            if messages and size + _size(message) > _PARCEL_BYTES:
                break
            messages.append(message)
            size += _size(message)
        return Parcel(self._handled, self._first, messages)

    def take(self, parcel: Parcel) -> list[Message]:
        """Return the messages of the other end that were not handled before."""
        self.was_heard = True
        self._heard.set()
        for _ in range(min(parcel.handled - self._first, len(self._unconfirmed))):
            self._bytes -= _size(self._unconfirmed.popleft())
            self._first += 1
        self._confirmed.set()
        fresh = parcel.messages[max(0, self._handled - parcel.first) :]
        self._handled += len(fresh)
        return fresh


def _size(message: Message) -> int:
    """Return about how many bytes a message has."""
    if isinstance(message, Start):
        return sum(map(len, message.environment)) + sum(map(len, message.files.values()))
    return len(message.text) if isinstance(message, Output) else 0
