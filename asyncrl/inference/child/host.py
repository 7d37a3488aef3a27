"""A server that is started as a child process: all of an `EngineHost` but its command and what its log means."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory_advice import is_out_of_memory
from asyncrl.config.setting import Device
from asyncrl.inference.child.ports import PortBlock, reserve_ports
from asyncrl.inference.child.process_tree import ForwardedOutput, ProcessTree, ServerCommand
from asyncrl.inference.engine_host import EngineStartError, ServedEngine, wait_ready
from asyncrl.runtime.process.hardware import count_gpus, visible_gpus
from asyncrl.runtime.process.starting import Effort
from asyncrl.runtime.process.worker import AsyncWorker

_STOP_GRACE_S = 0.5
_BIND_ATTEMPTS = 3
_ADDRESS_IN_USE = ("address already in use", "errno 98", "eaddrinuse")
_MAX_SOCKET_FOLDER = 80  # a Unix socket's path holds 107 bytes, of which a server's file names take some 20


class ChildHost(ABC):
    """A server started as a child process. See `asyncrl.inference.child.process_tree` for its guarantees.

    Args:
        config: the experiment, `model.path` resolved.
        scratch: name of the server's scratch folder, which no other server of the run has.
        run_dir: the run's folder.
        device: device on which the server computes.
        security: the token that the server asks for, and TLS; None if the run has no secret.
        log: file that receives the server's output.
        guest: it gives its memory back while the trainer needs the device.

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
        guest: bool = False,
    ) -> None:
        self.guest = guest
        self.shortage: tuple[str, str] | None = None
        self.config, self.device, self.security, self._log = config, device, security, log
        self._preferred_scratch = run_dir / "tmp" / scratch
        self._scratch: Path | None = None
        self._ports: PortBlock | None = None
        self._tree: ProcessTree | None = None

    @classmethod
    def of_worker(cls, worker: AsyncWorker, *, scratch: str, guest: bool) -> Self:
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
            guest=guest,
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
