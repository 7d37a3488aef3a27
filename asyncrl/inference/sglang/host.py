"""HTTP address of an SGLang server that is started here or already runs.

Both are `asyncrl.inference.engine_host.EngineHost`s: `start` returns once the server takes requests, with the initial
model's weights under version label "0"; `failed` waits for its end; `stop` lets go of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from asyncrl.comm.http.calls import HttpError, HttpRefused
from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory_advice import in_order, is_out_of_memory
from asyncrl.config.setting import Device
from asyncrl.inference.client import connect
from asyncrl.inference.engine_host import BASE_VERSION, EngineHost, EngineStartError, ServedEngine
from asyncrl.inference.sglang.command import build_command
from asyncrl.inference.sglang.ports import PortBlock, reserve_ports
from asyncrl.inference.sglang.process import ForwardedOutput, ProcessTree
from asyncrl.runtime.process.hardware import count_gpus, visible_gpus
from asyncrl.runtime.process.starting import LONGEST_STARTS, Effort
from asyncrl.runtime.process.worker import AsyncWorker

_READY_POLL_S, _LAST_READY_POLL_S = 0.2, 2.0
"""First and last interval of the readiness check, in s. It grows, so that answering the check does not count as
progress.
"""
_REQUEST_TIMEOUT_S = 5.0
_STOP_GRACE_S = 0.5
_BIND_ATTEMPTS = 3
_ADDRESS_IN_USE = ("address already in use", "errno 98", "eaddrinuse")
_CHILD_TITLE = "sglang::"  # what SGLang calls its schedulers and its detokenizer
_MAX_SOCKET_FOLDER = 80  # a Unix socket's path holds 107 bytes, of which SGLang's file names take some 20
_NO_ROOM_FOR_THE_CACHE = "not enough memory. please try to increase --mem-fraction-static"


def make_host(worker: AsyncWorker, *, scratch: str, guest: bool) -> EngineHost:
    """Return the host of the server of `worker`; `scratch` and `guest` as of `SGLangHost`."""
    generation, security = worker.config.generation, worker.http_security
    if generation.sglang.urls:
        folder, limit_s = Path(str(worker.config.model.path)), generation.start_timeout_s
        return AdoptedHost(generation.sglang.urls[worker.index], model_dir=folder, security=security, timeout_s=limit_s)
    device = generation.device
    if device == Device.auto:
        device = Device.cuda if count_gpus() else Device.cpu
    where = f"GPU {', '.join(visible_gpus())}" if device == Device.cuda else "the CPU"
    worker.log.info("SGLang computes on %s in %s", where, generation.dtype.on(device))
    return SGLangHost(
        worker.config,
        scratch=scratch,
        run_dir=worker.run_dir,
        device=device,
        security=security,
        log=worker.log,
        guest=guest,
    )


class SGLangHost:
    """A server started as a child process. See `asyncrl.inference.sglang.process` for its guarantees.

    Args:
        config: the experiment, `model.path` resolved.
        scratch: name of the server's scratch folder, which no other server of the run has.
        run_dir: the run's folder.
        device: device on which the server computes.
        security: the token that the server asks for, and TLS; None if the run has no secret.
        log: file that receives the server's output.
        guest: see `build_command`.
    """

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
        self._guest = guest
        self.shortage: tuple[str, str] | None = None
        self._config, self._device, self._security, self._log = config, device, security, log
        self._preferred_scratch = run_dir / "tmp" / scratch
        self._scratch: Path | None = None
        self._ports: PortBlock | None = None
        self._tree: ProcessTree | None = None

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
        self._ports = reserve_ports(self._config.system.host)
        command = build_command(
            self._config,
            model_dir=Path(str(self._config.model.path)),
            ports=self._ports,
            device=self._device,
            secrets_file=_write_secrets(self._scratch, self._security),
            scratch=self._scratch,
            guest=self._guest,
        )
        token = None if self._security is None else self._security.token
        output = ForwardedOutput(self._log, redact=token)
        self._tree = ProcessTree(command.argv, command.env, grace_s=_STOP_GRACE_S, output=output)
        await self._tree.start()
        try:
            await self._await_ready(command.url)
        except BaseException:
            await self.stop()
            raise
        self._tree.watch(_CHILD_TITLE)
        return ServedEngine(command.url, self._tree.pid)

    async def _await_ready(self, url: str) -> None:
        tree = self._tree
        assert tree is not None
        limit_s = self._config.generation.start_timeout_s
        death = asyncio.ensure_future(tree.died())
        ready = asyncio.ensure_future(wait_ready(url, self._security, limit_s, Effort(tree.root_pid).grew))
        try:
            await asyncio.wait({death, ready}, return_when=asyncio.FIRST_COMPLETED)
            reason = ""
            if death.done():
                reason = f"SGLang ended before it was ready: {death.result()}"
            elif ready.exception() is not None:
                reason = str(ready.exception())
            if reason:
                await tree.stop()  # its last lines are complete only then
                raise EngineStartError(explained(reason, tree.output.last_lines, tree.output.first_error))
        finally:
            for task in (death, ready):
                task.cancel()

    async def failed(self) -> str:
        """Wait until one of the server's processes ends; return which one, and the end of its log."""
        assert self._tree is not None, "not started"
        reason, output = await self._tree.died(), self._tree.output
        lines = [*output.last_lines, output.first_error]
        if short := next((line for line in lines if is_out_of_memory(line)), None):
            self.shortage = short, advice(lines)
        return explained(f"SGLang: {reason}", output.last_lines, output.first_error)

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


def _make_scratch(preferred: Path) -> Path:
    """Return an empty folder for Unix sockets: in the run's folder if its path is short enough for them."""
    if len(str(preferred)) > _MAX_SOCKET_FOLDER:
        return Path(tempfile.mkdtemp(prefix="asyncrl-"))
    shutil.rmtree(preferred, ignore_errors=True)  # left by a server that was killed
    preferred.mkdir(parents=True, mode=0o700)
    return preferred


def _write_secrets(scratch: Path, security: HttpSecurity | None) -> Path | None:
    """Write API key and TLS as a config file for SGLang, and return it. Only this user can read it; all users can read
    a command line.
    """
    if security is None:
        return None
    file = scratch / "secrets.yaml"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        pem = str(security.file)
        json.dump({"api-key": security.token, "ssl-keyfile": pem, "ssl-certfile": pem}, stream)  # JSON is YAML
    return file


def advice(lines: Sequence[str]) -> str:
    """Return what to do about the cause that `lines` of the log show; empty if none is known."""
    log = "\n".join(lines)
    if _NO_ROOM_FOR_THE_CACHE in log.lower():
        return (
            "its part of the GPU's memory holds the weights but no KV cache: raise "
            "generation.sglang.args.mem_fraction_static, or set a larger generation.sglang.tensor_parallel"
        )
    if is_out_of_memory(log):
        return in_order(
            [
                "lower generation.sglang.args.mem_fraction_static, the part for weights and KV cache",
                "lower generation.sglang.args.chunked_prefill_size",
                "set a larger generation.sglang.tensor_parallel",
                "give the server a GPU of its own",
            ]
        )
    return ""


def explained(reason: str, lines: Sequence[str], first_error: str) -> str:
    """Return `reason` with the log's last lines, then its first error and what to do: the end is read first."""
    message = [f"{reason}; the end of its log:", *lines]
    if first_error:
        message.append(f"the first error in its log: {first_error}")
    if what_to_do := advice([*lines, first_error]):
        message.append(what_to_do)
    return "\n".join(message)
