"""The program of a pod: starts processes there for the run's launcher, over the run's TLS and with its token.

    python -m asyncrl.runtime.hosts.pod_agent RUN_DIR HOST

Every process runs below a supervisor (`asyncrl.runtime.supervisor`). This program holds the standard input of all
supervisors, so the processes end with it, however it ends. `asyncrl.runtime.hosts.pod_carrier` is the other end.
Requests may be repeated, since a reply can be lost. A repeated start is recognised by its name, input and output by
their offsets. The exit code is returned as often as it is requested.

The launcher finds this program by a file in the run's folder. Each start of this program, and each new secret of the
run (another launch), begins a new *incarnation*, which does not know the processes of its predecessor. An older
incarnation ends when it finds the file of another one: the last one to start writes the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from asyncrl.comm.http.server import Body, HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.security.run_secret import RunSecret, SecretError
from asyncrl.comm.typed import decode_json
from asyncrl.config.run_dir import SECRET_FILE
from asyncrl.runtime import supervisor
from asyncrl.runtime.exit_codes import EXIT_FAILED
from asyncrl.runtime.hosts.pod_carrier import agent_file
from asyncrl.runtime.planning.worker_plan import HOST_VARIABLE

_LOOK_EVERY_S = 0.5
_HELD_BYTES = 16 << 20
"""Bytes of output kept for a launcher that does not fetch them; beyond that the process blocks in its next write."""
_ANSWER_BYTES = 1 << 20
_ENTRY_LIMIT_BYTES = 2 << 20
_LONGEST_WAIT_S = 5.0
_END_LIMIT_S = supervisor.GONE_LIMIT_S + 5.0


class Start(msgspec.Struct):
    """Start a supervisor with `python`, and give it `order`, the first line of its input."""

    name: str
    python: str
    order: str


class Tell(msgspec.Struct):
    """Give the supervisor these bytes, which begin at `offset` of its input after the order; `end` closes it."""

    name: str
    offset: int
    text: str
    end: bool


class Ask(msgspec.Struct):
    """Wait up to `wait_s` for output from `offset` on, or the end. What is before `offset` is dropped."""

    name: str
    offset: int
    wait_s: float


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._held, self._dropped, self._told = bytearray(), 0, 0
        self._code: int | None = None
        self._changed = asyncio.Condition()
        self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        output = self._process.stdout
        assert output is not None, "a pipe"
        while piece := await output.read(1 << 16):
            async with self._changed:
                self._held += piece
                self._changed.notify_all()
                await self._changed.wait_for(lambda: len(self._held) < _HELD_BYTES)
        code = await self._process.wait()
        async with self._changed:
            self._code = code if code >= 0 else 128 - code
            self._changed.notify_all()

    def tell(self, told: Tell) -> None:
        """Pass on the bytes that were not passed on before."""
        stream = self._process.stdin
        assert stream is not None, "a pipe"
        fresh = told.text.encode()[max(0, self._told - told.offset) :]
        self._told += len(fresh)
        if not stream.is_closing():
            stream.write(fresh)
            if told.end:
                stream.close()

    async def answer(self, ask: Ask) -> dict[str, object]:
        """Return output from the offset on, and the exit code with the last of it."""
        async with self._changed:
            fetched = ask.offset - self._dropped
            if not 0 <= fetched <= len(self._held):
                raise Refused(400, {"error": f"offset {ask.offset} is not held"}, "malformed")
            del self._held[:fetched]
            self._dropped = ask.offset
            self._changed.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(ask.wait_s, _LONGEST_WAIT_S)):
                    await self._changed.wait_for(lambda: bool(self._held) or self._code is not None)
            piece = bytes(self._held[:_ANSWER_BYTES])
            whole = len(piece) == len(self._held)
            return {"output": piece, "exit_code": self._code if whole else None}

    async def end(self) -> None:
        """Close the supervisor's input, so that it ends everything; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        async with self._changed:  # output is not fetched any more, and must not block the end
            self._held.clear()
            self._changed.notify_all()
        try:
            await asyncio.wait_for(self._process.wait(), _END_LIMIT_S)
        except TimeoutError:
            self._process.kill()
        self._collecting.cancel()


class _Incarnation:
    def __init__(self, secret: RunSecret) -> None:
        self.number = secrets.randbits(62)
        self._processes: dict[str, _Process] = {}
        self._starting = asyncio.Lock()
        http = secret.http()
        routes = {
            "/start": HttpRoute(self._start, "POST", _ENTRY_LIMIT_BYTES),
            "/tell": HttpRoute(self._tell, "POST"),
            "/ask": HttpRoute(self._ask, "POST"),
        }
        self._server = HttpServer(routes, token=http.token, tls=http.server_context())

    async def open(self) -> str:
        """Listen on the pod's own address; return the URL."""
        return await self._server.start(os.environ[HOST_VARIABLE])

    async def close(self) -> None:
        """End every process and stop listening."""
        await asyncio.gather(*(process.end() for process in self._processes.values()))
        await self._server.close()

    async def _start(self, _: web.BaseRequest, body: Body) -> web.Response:
        asked = _decoded(body, Start)
        async with self._starting:  # a repeated request may arrive before the first one has started the process
            if asked.name not in self._processes:
                self._processes[asked.name] = await _supervised(asked)
        return json_response({})

    async def _tell(self, _: web.BaseRequest, body: Body) -> web.Response:
        told = _decoded(body, Tell)
        self._process(told.name).tell(told)
        return json_response({})

    async def _ask(self, _: web.BaseRequest, body: Body) -> web.Response:
        ask = _decoded(body, Ask)
        return json_response(await self._process(ask.name).answer(ask))

    def _process(self, name: str) -> _Process:
        process = self._processes.get(name)
        if process is None:
            raise Refused(410, {"error": f"this incarnation started no process {name[:100]}"}, "unknown_process")
        return process


async def _supervised(asked: Start) -> _Process:
    process = await asyncio.create_subprocess_exec(
        *(asked.python, "-I", "-S", supervisor.__file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None, "a pipe"
    process.stdin.write(asked.order.encode() + b"\n")
    return _Process(process)


T = TypeVar("T")


def _decoded(body: Body, form: type[T]) -> T:
    try:
        return decode_json(body, form)
    except msgspec.DecodeError as error:
        raise Refused(400, {"error": str(error)}, "malformed") from error


async def serve(run_dir: Path, host: str, stop: asyncio.Event) -> None:
    """Serve one launch after the other, until `stop` is set or a later incarnation serves this host."""
    while not stop.is_set():
        secret = _secret(run_dir)
        if secret is None:
            await _pause(stop)
            continue
        incarnation = _Incarnation(secret)
        url, file = await incarnation.open(), agent_file(run_dir, host)
        try:
            _publish(file, url, incarnation.number)
            while not stop.is_set() and _same(_secret(run_dir), secret):
                if (serving := _incarnation_in(file)) is None:
                    _publish(file, url, incarnation.number)
                elif serving != incarnation.number:
                    print("a later incarnation serves this host", flush=True)
                    return
                await _pause(stop)
        finally:
            await incarnation.close()


async def _pause(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _LOOK_EVERY_S)


def _secret(run_dir: Path) -> RunSecret | None:
    """Return the run's secret; None if there is none yet."""
    try:
        return RunSecret.load(run_dir / SECRET_FILE)
    except SecretError:
        if (run_dir / SECRET_FILE).exists():
            raise
        return None


def _same(now: RunSecret | None, known: RunSecret) -> bool:
    return now is not None and now.token == known.token


def _incarnation_in(file: Path) -> int | None:
    with suppress(FileNotFoundError):
        return int(json.loads(file.read_text())["incarnation"])
    return None


def _publish(file: Path, url: str, number: int) -> None:
    """Write this incarnation's address to the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{number}")
    aside.write_text(json.dumps({"url": url, "incarnation": number}))
    aside.replace(file)


async def _main(run_dir: Path, host: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(run_dir, host, stop)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2]))
    sys.exit(EXIT_FAILED)  # with 0 the host's Job would be complete: a drained pod would get no successor
