"""A pool of processes for users' code. Each runs one call at a time, is killed at its limits, and is replaced
regularly.

Life of a process: it is started for a call that finds none idle (50 to 200 ms), and loads the function. Then it answers
calls over its pipes (0.1 ms each). It ends after `max_calls`, when it dies, or when a call exceeds its time, its memory
or its number of processes. A call that is cancelled or leaves processes behind ends it too.

`concurrent.futures` and `multiprocessing.Pool` cannot do this. A killed process breaks all calls of the executor, and
leaves a call of the `Pool` waiting forever. Neither can end one call at its limit, and both send and receive pickles.

A caller that needs several calls of one object, such as an environment, leases a process. A lease counts as one call of
`max_calls`, and any failure in it ends the process with the object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.comm.waits.limits import LOOK_S
from asyncrl.comm.waits.running_time import RunningTimeout
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
from asyncrl.rollout.user_code_pool.timing import Activity, timed
from asyncrl.rollout.user_code_pool.user_code_errors import TOO_SLOW, UserCodeError

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
_ROUNDS = 50
"""Number of searches for process groups to kill. A program that starts groups faster than they are found keeps them."""
_CHILDREN = "/proc/thread-self/children"
"""The kernel's list of a thread's children; some kernels have none."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a process and all that it started use at a moment."""

    processes: int
    resident_bytes: int


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


@dataclass(eq=False, slots=True)
class _Process:
    """A process of the pool, with its loaded target, its number of answered calls, and the end of its output."""

    process: asyncio.subprocess.Process
    loaded: set[bytes] = field(default_factory=set)
    calls: int = 0
    printed: int = 0
    tail: bytes = b""
    printing: asyncio.Task[None] | None = None
    waits: bool = False
    """True while it waits for an answer of the worker, in which its usage cannot grow."""

    async def ask(self, call: bytes, answer: Callback | None = None) -> ChildReply:
        """Send the packed `call` (empty for the start) and return the reply.

        Args:
            answer: answers requests of the call; None if it may not make any.

        Raises:
            _Died: the process died.
            Exception: an error of `answer`, which fails the call.
        """
        failure: Exception | None = None
        reply = await self._reply(call)
        while reply.asks is not None:
            if answer is None:
                raise _Died("asked where nobody answers")
            self.waits = True
            try:
                given = packed(PolicyAnswer(await answer(*reply.asks)))
            except Exception as error:
                failure, given = error, packed(PolicyAnswer(error=_sendable(error)))
            finally:
                self.waits = False
            reply = await self._reply(given)
        if reply.error and failure is not None:
            raise failure
        return reply

    async def _reply(self, call: bytes) -> ChildReply:
        reader, writer = self.process.stdout, self.process.stdin
        assert reader is not None
        assert writer is not None
        try:
            if call:
                writer.write(call)
                await writer.drain()
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > MAX_BYTES:
                raise _Died(f"announced a reply of {length} bytes")
            return decode_reply(await reader.readexactly(length))
        except ValueError as error:
            raise _Died(f"wrote an invalid reply: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _Died("ended") from error

    async def drain_prints(self, log: int = 2) -> None:
        """Copy the process's output to `log`, this worker's standard error, up to `PRINTED_LIMIT`.

        All output is read, whatever becomes of the log: a full pipe would block the process in its next print.
        """
        stream = self.process.stderr
        assert stream is not None
        while chunk := await stream.read(1 << 16):
            room = PRINTED_LIMIT - self.printed
            if room > 0:
                try:
                    os.write(log, chunk[:room])
                except OSError as error:  # a full disk, say
                    _log.warning("output of a process of the pool cannot be written to the log: %s", error)
                if len(chunk) >= room:
                    _log.warning("a process of the pool printed more than %d KB; no more of it", PRINTED_LIMIT >> 10)
            self.printed += len(chunk)
            self.tail = (self.tail + chunk)[-_TAIL:]


Callback = Callable[..., Awaitable[Any]]


class Lease:
    """A process of the pool that is held for the calls of one object. `give_back` must be called to end the lease."""

    def __init__(self, pool: ProcessPool, process: _Process) -> None:
        self._pool, self._process = pool, process
        self._last: ChildReply | None = None

    async def ask(self, label: str, call: ChildCall, timeout_s: float, answer: Callback) -> Any:
        """Run `call` in the process and return its result; `answer` replies to its questions meanwhile.

        Raises:
            UserCodeError: it raised, exceeded a limit, or its process died; the lease cannot be used any more.
        """
        self._last = None
        reply = await self._pool.limited(self._process, label, _given(label, call), timeout_s, answer)
        if reply.error:
            raise _raised(label, "raised ", reply)
        self._last = reply
        return reply.value

    async def give_back(self, *, whole: bool) -> None:
        """End the lease. The process is free for others if it is `whole` and nothing failed."""
        await self._pool.take_back(self._process, self._last if whole else None)


class ProcessPool:
    """Processes for users' code. Use it in one event loop, whose thread lives as long as the pool.

    Args:
        size: largest number of processes.
        limits: limits of each process.
    """

    def __init__(self, size: int, limits: ProcessLimits) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self.started = 0
        """Processes started so far."""

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
        with timed(Activity.process_wait):
            process, reply = await self._acquire(label), None
        try:
            with running():
                await self._load(process, label, target)
                reply = await self.limited(process, label, packed_call, timeout_s)
        finally:
            await self.take_back(process, reply)
        if reply.error:
            raise _raised(label, "raised ", reply)
        return reply.value

    async def lease(self, label: str) -> Lease:
        """Lease a process for one object, once one is free.

        Raises:
            UserCodeError: the process did not start.
        """
        return Lease(self, await self._acquire(label))

    async def take_back(self, process: _Process, reply: ChildReply | None) -> None:
        """End a call or lease.

        Keep the process if its last `reply` (None for a failure) shows that it can be used again.
        """
        process.calls += 1
        fit = reply is not None and not reply.left_behind and process.calls < self._limits.max_calls
        try:
            if fit and process.process.returncode is None:
                self._idle.append(process)
            else:
                await asyncio.shield(self._end(process))
        finally:
            self._slots.release()

    async def _acquire(self, label: str) -> _Process:
        await self._slots.acquire()
        try:
            return self._idle.pop() if self._idle else await self._start(label)
        except BaseException:
            self._slots.release()
            raise

    async def close(self) -> None:
        """Kill every process; running calls fail."""
        await asyncio.gather(*(self._end(process) for process in list(self._all)))

    async def _start(self, label: str) -> _Process:
        """Start a process, and wait until it is ready for calls."""
        pipe = asyncio.subprocess.PIPE
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CHILD, json.dumps(list(filter(None, sys.path))), str(self._limits.memory_bytes)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        process = _Process(made)
        self._all.add(process)
        self.started += 1
        process.printing = asyncio.create_task(process.drain_prints())
        try:
            async with RunningTimeout(START_LIMIT_S):
                await process.ask(b"")
        except BaseException as error:
            await asyncio.shield(self._end(process))
            if isinstance(error, TimeoutError | _Died):
                raise UserCodeError(
                    label, f"has no process: it did not start; {_printed(process)}", how="has no process"
                ) from error
            raise
        return process

    async def _load(self, process: _Process, label: str, target: CodeTarget) -> None:
        key = msgspec.msgpack.encode(target)
        if key in process.loaded:
            return
        reply = await self.limited(process, label, packed(ChildCall(target, LOAD, [])), START_LIMIT_S)
        if reply.error:
            raise _raised(label, "cannot be loaded in a process: ", reply)
        process.loaded.add(key)

    async def limited(
        self, process: _Process, label: str, call: bytes, timeout_s: float, answer: Callback | None = None
    ) -> ChildReply:
        """Return the reply to `call`, while enforcing the process's limits. Time in which `answer` answers the process
        does not count: what it calls has limits of its own.

        Raises:
            UserCodeError: the process died or exceeded a limit, or `answer` raised the error.
        """
        answering = 0

        async def answered(*args: Any) -> Any:
            nonlocal answering
            assert answer is not None
            answering += 1
            try:
                return await answer(*args)
            finally:
                answering -= 1

        asking = asyncio.create_task(process.ask(call, None if answer is None else answered))
        limit = RunningTimeout(timeout_s, paused=lambda: answering > 0)
        try:
            async with limit:
                while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:  # most calls are over by then
                    await self._check(process, label)
                return asking.result()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UserCodeError(
                label, f"did not return within {timeout_s:g} s; its process was killed", how=TOO_SLOW
            ) from error
        except _Died as error:
            code = await self._exit_code(process)
            raise UserCodeError(
                label, f"lost its process: it {error} ({code}); {_printed(process)}", how="lost its process"
            ) from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _check(self, process: _Process, label: str) -> None:
        """Raise if the process is dead, or uses more than its limits."""
        if process.process.returncode is not None:  # a process that it started may still hold its pipes
            raise _Died("ended")
        used = None if process.waits else await asyncio.to_thread(usage, process.process.pid)
        if used is not None and (why := excess(self._limits, used)):
            raise UserCodeError(label, f"{why}; its process was killed", how="exceeded a limit of its process")

    async def _exit_code(self, process: _Process) -> str:
        await self._end(process)
        code = process.process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        return f"killed by {_signal_name(-code)}"

    async def _end(self, process: _Process) -> None:
        """Kill the process and all that it started."""
        if process not in self._all:
            return
        self._all.discard(process)
        if process.process.returncode is None:
            try:  # it may be ending by itself, with an exit code that gives the reason
                async with asyncio.timeout(0.02):
                    await process.process.wait()
            except TimeoutError:
                await asyncio.to_thread(kill_tree, process.process.pid)
        await process.process.wait()
        if process.printing is not None:
            process.printing.cancel()
            await asyncio.gather(process.printing, return_exceptions=True)


def _given(label: str, call: ChildCall) -> bytes:
    try:
        return packed(call)
    except ValueError as error:
        raise UserCodeError(label, f"was given what {error}", how="was given what cannot travel") from error


def _raised(label: str, begins: str, reply: ChildReply) -> UserCodeError:
    kind = reply.error.partition(":")[0]
    how = f"raised {kind}" if kind.isidentifier() else "returned what cannot travel"
    return UserCodeError(label, f"{begins}{reply.error}\n{reply.traceback}", how=how)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _sendable(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


def _printed(process: _Process) -> str:
    tail = process.tail.decode(errors="replace").strip()
    return f"it last printed: {tail}" if tail else "it printed nothing"


@dataclass(frozen=True, slots=True)
class _Running:
    pid: int
    parent: int
    group: int
    resident_bytes: int


def usage(pid: int) -> Usage:
    """Return the resources that `pid` and its descendants use. Only their own folders in /proc are read."""
    tree, left = ([], [pid]) if os.path.exists(_CHILDREN) else (_tree(pid), [])
    while left:
        number = left.pop()
        process = _process(number)
        if process is None:
            continue
        tree.append(process)
        with contextlib.suppress(OSError):  # it has ended in the meantime
            for thread in os.listdir(f"/proc/{number}/task"):
                with open(f"/proc/{number}/task/{thread}/children", "rb") as file:
                    left += map(int, file.read().split())
    return Usage(len(tree), sum(process.resident_bytes for process in tree))


def kill_tree(pid: int) -> None:
    """Kill `pid`, leader of its process group and reaper of its descendants, and all of these."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(_ROUNDS):
            groups = {process.group for process in _tree(pid)} - {pid}
            if not groups:
                break
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)  # the kernel lets none of the group fork past it


def _tree(root: int) -> list[_Running]:
    children: dict[int, list[_Running]] = {}
    tree = []
    for process in _processes():
        if process.pid == root:
            tree.append(process)
        children.setdefault(process.parent, []).append(process)
    for process in tree:
        tree += children.get(process.pid, ())
    return tree


def _processes() -> Iterator[_Running]:
    """Yield every running process. Zombies are left out, because they use no resources and cannot be killed.

    To kill a tree, all processes of the machine are read: a process whose sibling ends just then may be missing in the
    kernel's list of children.
    """
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := _process(int(name))) is not None:
            yield process


def _process(pid: int) -> _Running | None:
    """Return the process with this id; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    state, parent, group, *rest = stat[stat.rindex(b")") + 2 :].split()
    return None if state == b"Z" else _Running(pid, int(parent), int(group), int(rest[18]) * _PAGE)
