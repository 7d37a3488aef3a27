"""Servers that are programs of their own: adopted, or started as a child process. `ChildHost` is all of an `EngineHost`
of a child but its command and what its log means.

Ports
-----
The server binds its ports only later, in another process. Three things would otherwise take a port between its choice
and its binding. The kernel hands out ports for outgoing connections from the ephemeral range, so blocks lie below it.
Other asyncrl processes choose at the same time, so every block is claimed by binding an abstract Unix socket named
after it. The kernel makes the claim exclusive and ends it with the claiming process, however that ends. Another program
may still bind one; then the server fails to start and is started again on another block (`ChildHost`).

Processes
---------
A server may be several processes; SGLang is the HTTP server that we start, a detokenizer, and a scheduler per GPU. They
run below a reaper (`asyncrl.runtime.reaper`), our child, that ends all of them when its standard input, a pipe from
here, is closed: by `stop`, or by the kernel when this process dies. Any of the processes may die by itself. The event
loop is notified of each: of the HTTP server's end by the reaper's exit, of the others' by pidfds, which become readable
when their process ends; nothing polls for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Final, Self

import psutil

from asyncrl.comm.http_client import HttpError, HttpRefused
from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import is_out_of_memory
from asyncrl.config.setting import Device
from asyncrl.inference.client import connect
from asyncrl.inference.process import BASE_VERSION, EngineStartError, ServedEngine
from asyncrl.runtime import reaper, supervisor
from asyncrl.runtime.process.hardware import count_gpus, visible_gpus
from asyncrl.runtime.process.starting import LONGEST_STARTS, Effort
from asyncrl.runtime.process.worker import AsyncWorker

BLOCK_SIZE = 10
"""HTTP, and what an engine needs beside it; SGLang needs the most: nine, for NCCL and torch.distributed."""
FIRST_PORT, LAST_PORT = 20000, 29999
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LAST_LINES: Final = 60  # enough for two schedulers that fail at once, each with a traceback
_ERROR: Final = re.compile(r"\b\w*Error\b")
_MAX_LINE_BYTES: Final = 1 << 20  # SGLang logs its 500 settings as one line
_LOG_DRAIN_S: Final = 0.5
_STOP_MARGIN_S: Final = supervisor.GONE_LIMIT_S + 2.0  # for the reaper, after the command's grace period
_STOP_GRACE_S = 0.5
_BIND_ATTEMPTS = 3
_ADDRESS_IN_USE = ("address already in use", "errno 98", "eaddrinuse")
_MAX_SOCKET_FOLDER = 80  # a Unix socket's path holds 107 bytes, of which a server's file names take some 20

_READY_POLL_S, _LAST_READY_POLL_S = 0.2, 2.0
"""First and last interval of the readiness check, in s. It grows, so that answering the check does not count as
progress.
"""
_REQUEST_TIMEOUT_S = 5.0


class NoFreePorts(RuntimeError):
    """Every block of the range is taken."""


@dataclass(frozen=True, slots=True)
class PortBlock:
    """`BLOCK_SIZE` consecutive ports, ours until `release`: `base` for HTTP, the others for the engine's own use."""

    base: int
    claim: socket.socket = field(repr=False)

    def release(self) -> None:
        """Let others have the block."""
        self.claim.close()


def reserve_ports(host: str, *, first: int = FIRST_PORT, last: int = LAST_PORT) -> PortBlock:
    """Return a block of ports that are free at `host`, and that no other asyncrl process will choose.

    Raises:
        NoFreePorts: no block is free in `first` to `last`, below the kernel's ephemeral range.
    """
    last = min(last, _lowest_ephemeral() - 1)
    bases = list(range(first, last - BLOCK_SIZE + 2, BLOCK_SIZE))
    random.shuffle(bases)
    for base in bases:
        claim = _claim(base)
        if claim is None:
            continue
        if all(_is_free(host, port) for port in range(base, base + BLOCK_SIZE)):
            return PortBlock(base, claim)
        claim.close()
    raise NoFreePorts(f"no {BLOCK_SIZE} free consecutive ports in {first}-{last} on {host}: end what listens there")


def _claim(base: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0asyncrl-ports-{base}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(host: str, port: int) -> bool:
    family, everywhere = (socket.AF_INET6, "::") if ":" in host else (socket.AF_INET, "0.0.0.0")
    for address in {host, everywhere}:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _lowest_ephemeral() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except FileNotFoundError:  # not Linux; its BSD relatives begin at 49152
        return 49152


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command of a server: `argv`, additions to the environment, and the URL where it will answer."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str


class ForwardedOutput:
    """Output of a command, on its way to `log` line by line, and the lines that explain its end.

    Args:
        redact: a secret that is cut out of the lines; None if there is none.

    Attributes:
        last_lines: the newest lines.
        first_error: first line that names an error; `ProcessTree.watch` clears it.
    """

    def __init__(self, log: logging.Logger, redact: str | None = None) -> None:
        self.log, self._redact = log, redact
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.first_error = ""

    async def forward(self, output: asyncio.StreamReader | None) -> None:
        """Forward `output` until it ends."""
        assert output is not None
        while True:
            try:
                raw = await output.readline()
            except ValueError:  # longer than _MAX_LINE_BYTES; the reader dropped it
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if self._redact is not None:
                line = line.replace(self._redact, "***")
            self.last_lines.append(line)
            if not self.first_error and _ERROR.search(line):
                self.first_error = line
            self.log.info("%s", line)


class ProcessTree:
    """A command with everything it starts. Use it within one event loop.

    Args:
        argv: the command.
        env: added to this process's environment.
        grace_s: time that the command gets to end after SIGTERM, before everything is killed.
        output: where its output goes.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, grace_s: float, output: ForwardedOutput) -> None:
        self._argv, self._env, self._grace_s = tuple(argv), dict(env), grace_s
        self.output = output
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._died: asyncio.Future[str] | None = None
        self._pidfds: list[int] = []

    async def start(self) -> None:
        """Start the command."""
        self._died = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            supervisor.REAPER,
            str(self._grace_s),
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | self._env,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        forwarding = asyncio.create_task(self.output.forward(self._process.stdout))
        self._tasks = [forwarding, asyncio.create_task(self._reap(self._process, forwarding))]

    @property
    def root_pid(self) -> int:
        """Process id of the reaper, below which the command runs."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def pid(self) -> int:
        """Process id of the command.

        Raises:
            ProcessLookupError: it has ended.
        """
        assert self._process is not None, "not started"
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children()
            if children:  # the others are orphans that the reaper adopted later
                return min(children, key=psutil.Process.create_time).pid
        raise ProcessLookupError("the command has ended")

    def watch(self, title_prefix: str) -> int:
        """Count the death of any descendant whose title begins with `title_prefix` as the tree's death; return their
        number.
        """
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        self.output.first_error = ""
        segments = reaper.shared_memory(self._process.pid)
        self._process.stdin.write(b"".join(os.fsencode(segment) + b"\n" for segment in segments))
        loop = asyncio.get_running_loop()
        watched = [p for p in self._descendants() if _title(p).startswith(title_prefix)]
        for process in watched:
            title = f"{_title(process)} (pid {process.pid})"
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self._report(f"{title} ended")
                continue
            self._pidfds.append(pidfd)
            loop.add_reader(pidfd, self._on_descendant_death, pidfd, title)
        return len(watched)

    async def died(self) -> str:
        """Wait until the command or a watched descendant ends; return what ended."""
        assert self._died is not None, "not started"
        return await asyncio.shield(self._died)

    async def stop(self) -> None:
        """End the whole tree; return once all of it has ended. Idempotent."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), self._grace_s + _STOP_MARGIN_S)
        except TimeoutError:
            self.output.log.error("the reaper (pid %d) did not end; killing its process group", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for pidfd in self._pidfds:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reap(self, process: asyncio.subprocess.Process, forwarding: asyncio.Task[None]) -> None:
        code = await process.wait()
        await asyncio.wait({forwarding}, timeout=_LOG_DRAIN_S)
        forwarding.cancel()
        # the reaper reports 128 + n for signal n
        self._report(f"the server {reaper.describe_end(128 - code if code > 128 else code)}")

    def _on_descendant_death(self, pidfd: int, title: str) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._report(f"{title} ended")

    def _report(self, reason: str) -> None:
        if self._died is not None and not self._died.done():
            self._died.set_result(reason)

    def _descendants(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(" ".join(process.cmdline()).split())  # a changed title is padded with blanks
    return ""


class ChildHost(ABC):
    """A server started as a child process. See the module for its guarantees.

    Args:
        config: the experiment, `model.path` resolved.
        scratch: name of the server's scratch folder, which no other server of the run has.
        run_dir: the run's folder.
        device: device on which the server computes.
        security: the token that the server asks for, and TLS; None if the run has no secret.
        log: file that receives the server's output.
        colocated: it gives its memory back while the trainer needs the device.

    Attributes:
        label: name in messages.
        child_title: how the titles of the server's further processes begin, none of which it outlives.
    """

    label: ClassVar[str]
    child_title: ClassVar[str]

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        scratch: str,
        run_dir: Path,
        device: Device,
        security: HttpSecurity | None,
        log: logging.Logger,
        colocated: bool = False,
    ) -> None:
        self.colocated = colocated
        self.shortage: tuple[str, str] | None = None
        self.config, self.device, self.security, self._log = config, device, security, log
        self._preferred_scratch = run_dir / "tmp" / scratch
        self._scratch: Path | None = None
        self._ports: PortBlock | None = None
        self._tree: ProcessTree | None = None

    @classmethod
    def of_worker(cls, worker: AsyncWorker, *, scratch: str, colocated: bool) -> Self:
        """Return the host of the server of `worker`."""
        generation, device = worker.config.generation, worker.config.generation.device
        if device == Device.auto:
            device = Device.cuda if count_gpus() else Device.cpu
        where = f"GPU {', '.join(visible_gpus())}" if device == Device.cuda else "the CPU"
        worker.log.info("%s computes on %s in %s", cls.label, where, generation.dtype.on(device))
        return cls(
            worker.config,
            scratch=scratch,
            run_dir=worker.run_dir,
            device=device,
            security=worker.http_security,
            log=worker.log,
            colocated=colocated,
        )

    @abstractmethod
    def command(self, ports: PortBlock, scratch: Path) -> ServerCommand:
        """Return the server's command, with the initial model under label `BASE_VERSION`.

        Args:
            ports: where it listens.
            scratch: folder for its temporary files and Unix sockets; a short path.
        """

    @staticmethod
    @abstractmethod
    def advice(lines: Sequence[str]) -> str:
        """Return what to do about the cause that `lines` of the log show; empty if none is known."""

    async def start(self) -> ServedEngine:
        """Start the server; on a port that a stranger took in the meantime, start it again on another.

        Raises:
            EngineStartError: it ended, or was not ready within `generation.start_timeout_s`; with the end of its log.
        """
        for _ in range(_BIND_ATTEMPTS - 1):
            try:
                return await self._start_once()
            except EngineStartError as error:
                if not any(text in str(error).lower() for text in _ADDRESS_IN_USE):
                    raise
                self._log.warning("a port was taken before the server could bind it; starting it on others")
        return await self._start_once()

    async def _start_once(self) -> ServedEngine:
        await self.stop()
        self._scratch = _make_scratch(self._preferred_scratch)
        self._ports = reserve_ports(self.config.system.host)
        command = self.command(self._ports, self._scratch)
        token = None if self.security is None else self.security.token
        output = ForwardedOutput(self._log, redact=token)
        self._tree = ProcessTree(command.argv, command.env, grace_s=_STOP_GRACE_S, output=output)
        await self._tree.start()
        try:
            await self._await_ready(command.url)
        except BaseException:
            await self.stop()
            raise
        self._tree.watch(self.child_title)
        return ServedEngine(command.url, self._tree.pid)

    async def _await_ready(self, url: str) -> None:
        tree = self._tree
        assert tree is not None
        limit_s = self.config.generation.start_timeout_s
        death = asyncio.ensure_future(tree.died())
        ready = asyncio.ensure_future(wait_ready(url, self.security, limit_s, Effort(tree.root_pid).grew))
        try:
            await asyncio.wait({death, ready}, return_when=asyncio.FIRST_COMPLETED)
            reason = ""
            if death.done():
                reason = f"{self.label} ended before it was ready: {death.result()}"
            elif ready.exception() is not None:
                reason = str(ready.exception())
            if reason:
                await tree.stop()  # its last lines are complete only then
                raise EngineStartError(self.explained(reason, tree.output.last_lines, tree.output.first_error))
        finally:
            for task in (death, ready):
                task.cancel()

    async def failed(self) -> str:
        """Wait until one of the server's processes ends; return which one, and the end of its log."""
        assert self._tree is not None, "not started"
        reason, output = await self._tree.died(), self._tree.output
        lines = [*output.last_lines, output.first_error]
        if short := next((line for line in lines if is_out_of_memory(line)), None):
            self.shortage = short, self.advice(lines)
        return self.explained(f"{self.label}: {reason}", output.last_lines, output.first_error)

    async def stop(self) -> None:
        """End the server's processes, give its ports back and remove its files."""
        if self._tree is not None:
            await self._tree.stop()
            self._tree = None
        if self._ports is not None:
            self._ports.release()
            self._ports = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    @classmethod
    def explained(cls, reason: str, lines: Sequence[str], first_error: str) -> str:
        """Return `reason` with the log's last lines, then its first error and what to do: the end is read first."""
        message = [f"{reason}; the end of its log:", *lines]
        if first_error:
            message.append(f"the first error in its log: {first_error}")
        if what_to_do := cls.advice([*lines, first_error]):
            message.append(what_to_do)
        return "\n".join(message)


def _make_scratch(preferred: Path) -> Path:
    """Return an empty folder for Unix sockets: in the run's folder if its path is short enough for them."""
    if len(str(preferred)) > _MAX_SOCKET_FOLDER:
        return Path(tempfile.mkdtemp(prefix="asyncrl-"))
    shutil.rmtree(preferred, ignore_errors=True)  # left by a server that was killed
    preferred.mkdir(parents=True, mode=0o700)
    return preferred


class AdoptedHost:
    """A server that somebody else started; it outlives the run. It gets no token, as it is not the run's.

    Args:
        url: the server's address.
        model_dir: the initial model, at a path that the server can read. The server loads it unless it already serves
            this model under label "0". None: the server keeps its own model, under any label.
        security: has `url` among the adopted ones; None if the run has no secret.
        timeout_s: limit in seconds for the server to answer and load.
    """

    def __init__(self, url: str, *, model_dir: Path | None, security: HttpSecurity | None, timeout_s: float) -> None:
        self.shortage: tuple[str, str] | None = None
        self._url = url.rstrip("/")
        self._model_dir, self._security, self._timeout_s = model_dir, security, timeout_s

    async def start(self) -> ServedEngine:
        """Wait for the server and give it the initial model, unless it keeps its own.

        Raises:
            EngineStartError: it does not answer in time, asks for a token, or cannot load the model.
        """
        await wait_ready(self._url, self._security, self._timeout_s)
        keeps, wanted = self._model_dir is None, (BASE_VERSION, str(self._model_dir))
        try:
            async with connect(self._url, self._security) as client:
                info = await client.model_info()
                if not keeps and (info.weight_version, info.model_path) != wanted:
                    await client.update_weights(
                        str(self._model_dir), int(BASE_VERSION), abort_all=True, timeout_s=self._timeout_s
                    )
        except HttpError as error:
            if isinstance(error, HttpRefused) and error.status == HTTPStatus.UNAUTHORIZED:
                raise EngineStartError(
                    f"adopted server {self._url} asks for a token, and the run's is not for it: start it without "
                    "--api-key"
                ) from error
            what = "say which model it serves" if keeps else "serve the initial model"
            raise EngineStartError(f"adopted server {self._url} does not {what}: {error}") from error
        return ServedEngine(self._url, None)

    async def failed(self) -> str:
        """Never return. The GserverManager watches the server's health, and uses the server again once it answers."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """Do nothing: the server is not the run's."""


async def wait_ready(
    url: str, security: HttpSecurity | None, timeout_s: float, grew: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the server at `url` takes requests.

    Args:
        grew: returns True if the server has made progress since the last call.

    Raises:
        EngineStartError: the server was not ready within `timeout_s` seconds after its last progress, or within
            `LONGEST_STARTS` times as long in all; the message has the result of the last attempt.
    """
    last, pause_s, now = "no reply", _READY_POLL_S, asyncio.get_running_loop().time
    longest = now() + LONGEST_STARTS * timeout_s
    try:
        async with asyncio.timeout(timeout_s) as limit, connect(url, security) as client:
            while True:
                try:
                    return await client.ready(timeout_s=_REQUEST_TIMEOUT_S)
                except HttpError as error:
                    last = str(error)
                if grew():
                    limit.reschedule(min(now() + timeout_s, longest))
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LAST_READY_POLL_S)
    except TimeoutError:
        raise EngineStartError(
            f"server {url} made no progress towards being ready for generation.start_timeout_s={timeout_s:g}: {last}"
        ) from None
