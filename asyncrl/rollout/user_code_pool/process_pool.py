"""A pool of processes for users' code. Each runs one call at a time, is killed at its limits, and is replaced
regularly.

Life of a process: it is started for a call that finds none idle (50 to 200 ms), and loads the function. Then it answers
calls over its pipes (0.1 ms each). It ends after `max_calls`, when it dies, or when a call exceeds its time, its memory
or its number of processes. A call that is cancelled or leaves processes behind ends it too.

`concurrent.futures` and `multiprocessing.Pool` cannot do this. A killed process breaks all calls of the executor, and
leaves a call of the `Pool` waiting forever. Neither can end one call at its limit, and both send and receive pickles.

A caller that needs several calls of one object, such as an environment, holds a process for them, which counts as one
call of `max_calls`. Any failure meanwhile ends the process with the object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.comm.waits import LOOK_S, RunningTimeout
from asyncrl.rollout.user_code_pool.call_records import TOO_SLOW, Activity, UserCodeError, timed
from asyncrl.rollout.user_code_pool.child import (
    LENGTH,
    LOAD,
    MAX_BYTES,
    ChildCall,
    ChildReply,
    CodeTarget,
    PolicyAnswer,
    decode_reply,
    main,
    packed,
)
from asyncrl.runtime.supervisor import Usage, end_marked, kill_tree, usage

START_LIMIT_S = 120.0
"""For a process to start, and for it to import the user's module."""
PRINTED_LIMIT = 64 << 10
"""Bytes that one process may print into the worker's log; the rest is read and thrown away."""
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    f"from {main.__module__} import {main.__name__}; {main.__name__}()"
)
"""Program of a process: it imports from where this one does. As PYTHONPATH that would be inherited by what user code
starts, also where it runs another Python, to which the packages of this one are of no use.
"""
_VARIABLE = "ASYNCRL_USER_PROCESS"
"""Environment variable with which a process, and all that it starts, are marked."""
_TAIL = 400

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one process and of all processes that it starts.

    Attributes:
        memory_bytes: limit on the address space of each process, and on the resident memory of all together.
        processes: limit on their number, itself included.
        max_calls: number of calls after which it is replaced.
    """

    memory_bytes: int
    processes: int
    max_calls: int


def excess(limits: ProcessLimits, usage: Usage) -> str | None:
    """Return why a process must be killed; None if it is within its limits."""
    if usage.processes > limits.processes:
        return f"started {usage.processes - 1} processes (rollout.user_code.process_children={limits.processes - 1})"
    if usage.resident_bytes > limits.memory_bytes:
        used, allowed = usage.resident_bytes >> 20, limits.memory_bytes >> 20
        return f"used {used} MB with what it started (rollout.user_code.process_memory_mb={allowed})"
    return None


class _Died(Exception):
    """The process ended, or wrote something that is not a reply."""


Answer = Callable[..., Awaitable[Any]]
"""Answers a request of a process, which a call of it makes."""


@dataclass(eq=False, slots=True)
class PoolProcess:
    """A process of the pool, held by one caller at a time, which ends with `give_back`."""

    pool: ProcessPool
    process: asyncio.subprocess.Process
    mark: str = ""
    """Value of `_VARIABLE`."""
    loaded: set[bytes] = field(default_factory=set)
    """Its targets."""
    calls: int = 0
    left_behind: bool = False
    """True if its last call left processes behind."""
    printed: int = 0
    """Bytes of its output so far; `tail` is their end."""
    tail: bytes = b""
    printing: asyncio.Task[None] | None = None
    waits: bool = False
    """True while it waits for an answer of the worker: its usage cannot grow, and what it waits for has limits."""
    slots: GroupSlots | None = None
    """Those among which its holder has it; None while it is idle."""

    async def ask(self, label: str, call: ChildCall, timeout_s: float, answer: Answer | None = None) -> Any:
        """Run `call` and return its result; `answer` replies to its requests meanwhile.

        Raises:
            UserCodeError: it raised, exceeded a limit, or its process died.
            Exception: an error of `answer`, which failed the call.
        """
        return _value(label, await self.reply_to(label, _given(label, call), timeout_s, answer))

    async def reply_to(self, label: str, call: bytes, timeout_s: float, answer: Answer | None = None) -> ChildReply:
        """Return the reply to the packed `call`, while enforcing the process's limits. Time in which it waits for
        `answer` does not count.

        Raises:
            UserCodeError: the process died or exceeded a limit.
            Exception: an error of `answer`, which failed the call.
        """
        asking = asyncio.create_task(self.exchange(call, answer))
        limit = RunningTimeout(timeout_s, paused=lambda: self.waits)
        try:
            async with limit:
                while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:  # most calls are over by then
                    await self._check(label)
                return asking.result()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UserCodeError(
                label, f"did not return within {timeout_s:g} s; its process was killed", how=TOO_SLOW
            ) from error
        except _Died as error:
            await self.end()
            code = self.process.returncode
            ended = f"exit code {code}" if code is None or code >= 0 else f"killed by {_signal_name(-code)}"
            raise UserCodeError(
                label, f"lost its process: it {error} ({ended}); {self.last_printed()}", how="lost its process"
            ) from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def exchange(self, call: bytes, answer: Answer | None = None) -> ChildReply:
        """Send the packed `call` (empty for the start), answer its requests, and return the reply; without limits.

        Raises:
            _Died: the process died.
            Exception: an error of `answer`, which failed the call.
        """
        failure: Exception | None = None
        reply = await self._exchange(call)
        while reply.asks is not None:
            if answer is None:
                raise _Died("asked where nobody answers")
            self.waits = True
            try:
                given = packed(PolicyAnswer(await answer(*reply.asks)))
            except Exception as error:
                error_text = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
                failure, given = error, packed(PolicyAnswer(error=error_text))
            finally:
                self.waits = False
            reply = await self._exchange(given)
        if reply.error and failure is not None:
            raise failure
        self.left_behind = reply.left_behind
        return reply

    async def _exchange(self, message: bytes) -> ChildReply:
        reader, writer = self.process.stdout, self.process.stdin
        assert reader is not None
        assert writer is not None
        try:
            if message:
                writer.write(message)
                await writer.drain()
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > MAX_BYTES:
                raise _Died(f"announced a reply of {length} bytes")
            return decode_reply(await reader.readexactly(length))
        except ValueError as error:
            raise _Died(f"wrote an invalid reply: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _Died("ended") from error

    async def _check(self, label: str) -> None:
        """Raise if the process is dead, or uses more than its limits."""
        if self.process.returncode is not None:  # a process that it started may still hold its pipes
            raise _Died("ended")
        used = None if self.waits else await asyncio.to_thread(usage, self.process.pid)
        if used is not None and (why := excess(self.pool.limits, used)):
            raise UserCodeError(label, f"{why}; its process was killed", how="exceeded a limit of its process")

    async def drain_prints(self, log: int = 2) -> None:
        """Copy the process's output to `log`, this worker's standard error, up to `PRINTED_LIMIT`.

        All output is read, whatever becomes of the log: a full pipe would block the process in its next print.
        """
        stream = self.process.stderr
        assert stream is not None
        while chunk := await stream.read(1 << 16):
            left = PRINTED_LIMIT - self.printed
            if left > 0:
                try:
                    os.write(log, chunk[:left])
                except OSError as error:  # a full disk, say
                    _log.warning("output of a process of the pool cannot be written to the log: %s", error)
                if len(chunk) >= left:
                    _log.warning("a process of the pool printed more than %d KB; no more of it", PRINTED_LIMIT >> 10)
            self.printed += len(chunk)
            self.tail = (self.tail + chunk)[-_TAIL:]

    def last_printed(self) -> str:
        """Return what the process printed last, for a message."""
        tail = self.tail.decode(errors="replace").strip()
        return f"it last printed: {tail}" if tail else "it printed nothing"

    async def give_back(self, *, whole: bool) -> None:
        """End the call or lease; not to be cancelled. The process is free for others if it is `whole` and can be used
        again.
        """
        self.calls += 1
        fit = whole and not self.left_behind and self.calls < self.pool.limits.max_calls
        try:
            if fit and self.process.returncode is None:
                self.pool.idle.append(self)
            else:
                await self.end()
        finally:
            assert self.slots is not None, "it is idle"
            self.slots.leave()
            self.slots = None

    async def end(self) -> None:
        """Kill the process and all that it started."""
        if self not in self.pool.processes:
            return
        self.pool.processes.discard(self)
        with contextlib.suppress(TimeoutError):  # it may be ending by itself, with an exit code that gives the reason
            async with asyncio.timeout(0.02):
                await self.process.wait()
        if self.process.returncode is None:
            await asyncio.to_thread(kill_tree, self.process.pid)
        await asyncio.to_thread(end_marked, self.mark, _VARIABLE)  # of a dead process, nothing is below it any more
        await self.process.wait()  # until its pipes are closed too, which what it started may have held
        if self.printing is not None:
            self.printing.cancel()
            await asyncio.gather(self.printing, return_exceptions=True)


class ProcessSlots:
    """Slots for the processes of a pool. Several are taken at once, in order of request, so that none starves.

    A group that is played at once may need all its environments before it continues with any. If it took their
    processes one by one, two groups could each hold some and wait for the rest forever. So the first environment of a
    group takes the slots of the whole group before any other group may take some; the last environment returns them
    (`GroupSlots`).
    """

    def __init__(self, number: int) -> None:
        self._free, self._turn = asyncio.Semaphore(number), asyncio.Lock()

    async def take(self, number: int) -> None:
        """Take `number` slots once they are free and earlier requests are served."""
        async with self._turn:  # one request at a time collects slots, and those that have theirs never wait for more
            taken = 0
            try:
                while taken < number:
                    await self._free.acquire()
                    taken += 1
            except asyncio.CancelledError:
                self.give(taken)
                raise

    def give(self, number: int) -> None:
        """Return `number` slots."""
        for _ in range(number):
            self._free.release()


class GroupSlots:
    """The slots of one group's environments, or the single slot of another caller.

    Args:
        slots: those of the pool.
        size: limit on the group's open environments.
    """

    def __init__(self, slots: ProcessSlots, size: int) -> None:
        self._slots, self._size = slots, size
        self._open = 0
        self._entering = asyncio.Lock()

    async def enter(self) -> None:
        """Record that an environment opens. The first one waits for the group's slots.

        Raises:
            RuntimeError: the group has as many open environments as it may have.
        """
        async with self._entering:
            if self._open == self._size:
                raise RuntimeError(
                    f"the group has {self._open} environments open, one for each of its episodes; close one before "
                    "another is reset"
                )
            if self._open == 0:
                await self._slots.take(self._size)
            self._open += 1

    def leave(self) -> None:
        """Record that an environment has closed."""
        self._open -= 1
        if self._open == 0:
            self._slots.give(self._size)


class ProcessPool:
    """Processes for users' code. Use it in one event loop, whose thread lives as long as the pool.

    Args:
        size: largest number of processes.
        limits: limits of each process.
        waits: activity that waiting for a process counts as.
    """

    def __init__(self, size: int, limits: ProcessLimits, waits: Activity = Activity.process_wait) -> None:
        self.limits, self._waits = limits, waits
        self.slots = ProcessSlots(size)
        self.processes: set[PoolProcess] = set()
        self.idle: list[PoolProcess] = []

    async def call(
        self,
        label: str,
        target: CodeTarget,
        sees: str,
        arguments: list[Any],
        timeout_s: float,
        running: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Any:
        """Call `target` with `arguments` and return its result. The wait for a free process does not count towards
        `timeout_s`.

        Args:
            running: context manager that is entered once a process is free, and left with its answer.

        Raises:
            UserCodeError: it raised, exceeded a limit, or its process died.
        """
        packed_call = _given(label, ChildCall(target, sees, arguments))
        async with self.leased(label) as process:
            with running():
                await self._load(process, label, target)
                reply = await process.reply_to(label, packed_call, timeout_s)
        return _value(label, reply)

    @contextlib.asynccontextmanager
    async def leased(self, label: str) -> AsyncIterator[PoolProcess]:
        """Hold a process within this block, once one is free; an error in the block ends it. See `lease`."""
        process, whole = await self.lease(label), False
        try:
            yield process
            whole = True
        finally:
            await asyncio.shield(process.give_back(whole=whole))

    async def lease(self, label: str, slots: GroupSlots | None = None) -> PoolProcess:
        """Return a process once one is free; give it back.

        Args:
            slots: those of the group that it is for; None: it takes one of its own.

        Raises:
            UserCodeError: the process did not start.
            RuntimeError: the group has as many processes as it may have.
        """
        slots = slots or GroupSlots(self.slots, 1)
        with timed(self._waits):
            await slots.enter()
            try:
                process = self.idle.pop() if self.idle else await self._start(label)
            except BaseException:
                slots.leave()
                raise
        process.slots = slots
        return process

    async def close(self) -> None:
        """Kill every process; running calls fail."""
        await asyncio.gather(*(process.end() for process in list(self.processes)))

    async def _start(self, label: str) -> PoolProcess:
        """Start a process, and wait until it is ready for calls."""
        pipe, mark = asyncio.subprocess.PIPE, uuid.uuid4().hex
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CHILD, json.dumps(list(filter(None, sys.path))), str(self.limits.memory_bytes)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env={**os.environ, _VARIABLE: mark},
        )
        process = PoolProcess(self, made, mark)
        self.processes.add(process)
        process.printing = asyncio.create_task(process.drain_prints())
        try:
            async with RunningTimeout(START_LIMIT_S):
                await process.exchange(b"")
        except BaseException as error:
            await asyncio.shield(process.end())
            if isinstance(error, TimeoutError | _Died):
                raise UserCodeError(
                    label, f"has no process: it did not start; {process.last_printed()}", how="has no process"
                ) from error
            raise
        return process

    async def _load(self, process: PoolProcess, label: str, target: CodeTarget) -> None:
        key = msgspec.msgpack.encode(target)
        if key not in process.loaded:
            reply = await process.reply_to(label, packed(ChildCall(target, LOAD, [])), START_LIMIT_S)
            _value(label, reply, "cannot be loaded in a process: ")
            process.loaded.add(key)


def _given(label: str, call: ChildCall) -> bytes:
    try:
        return packed(call)
    except ValueError as error:
        raise UserCodeError(label, f"was given what {error}", how="was given what cannot travel") from error


def _value(label: str, reply: ChildReply, begins: str = "raised ") -> Any:
    """Return the result of a call; raise its error, which `begins` introduces."""
    if not reply.error:
        return reply.value
    kind = reply.error.partition(":")[0]
    how = f"raised {kind}" if kind.isidentifier() else "returned what cannot travel"
    raise UserCodeError(label, f"{begins}{reply.error}\n{reply.traceback}", how=how)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
