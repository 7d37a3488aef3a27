"""The process around an SGLang server, with a stand-in for SGLang that does what the test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from aiohttp import ClientSession, TCPConnector, web

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.child_host import AdoptedHost, wait_ready
from asyncrl.inference.process import EngineStartError
from asyncrl.inference.sglang.host import SGLangHost
from asyncrl.runtime import supervisor

from ..ports import reserved_port

TOKEN = "the-secret-of-the-run"
LIMIT_S = 300.0

FAKE_SGLANG = textwrap.dedent(
    """
    import http.server, json, mmap, os, signal, subprocess, sys
    from pathlib import Path
    from setproctitle import setproctitle

    argv = sys.argv[1:]
    assert argv[:2] == ["-m", "sglang.launch_server"], argv
    option = lambda name: argv[argv.index(name) + 1]
    mode, state = os.environ["FAKE_MODE"], Path(os.environ["FAKE_STATE"])
    attempts = int(state.read_text()) + 1 if state.exists() else 1
    state.write_text(str(attempts))
    print("server_args", argv, "--config" in argv and json.loads(Path(option("--config")).read_text()), flush=True)
    if mode == "port_taken" and attempts == 1:
        sys.exit("OSError: [Errno 98] Address already in use")
    if mode == "broken":
        print("RuntimeError: boom", *("line" for _ in range(80)), "the end", sep="\\n", flush=True)
        sys.exit(1)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    scheduler = "import time; from setproctitle import setproctitle as s; s('sglang::scheduler'); print(flush=True)"
    command = [sys.executable, "-c", f"{scheduler}; time.sleep(600)"]
    scheduler = subprocess.Popen(command, stdout=subprocess.PIPE)
    scheduler.stdout.readline()  # as SGLang's own is there before anything is answered
    segment = Path("/dev/shm") / f"asyncrl_test_{os.getpid()}"
    segment.write_bytes(bytes(4096))
    mapped = mmap.mmap(os.open(segment, os.O_RDWR), 4096)
    print("segment", segment, flush=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            print("asked", flush=True)
            self.send_response(503 if mode == "never_ready" else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", int(option("--port"))), Handler)
    if "--config" in argv:
        import ssl

        context, files = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), json.loads(Path(option("--config")).read_text())
        context.load_cert_chain(files["ssl-certfile"], files["ssl-keyfile"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
    """
)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A run's folder with a path so short that sockets may lie in it."""
    with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
        yield Path(folder)


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    """A config whose SGLang is the stand-in."""
    fake = tmp_path / "fake_sglang.py"
    fake.write_text(FAKE_SGLANG)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$@"\n')
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    config = ExperimentConfig()
    config.model.path = str(model)
    config.generation.start_timeout_s = LIMIT_S
    config.generation.sglang.python = str(interpreter)
    config.generation.sglang.env = {"FAKE_MODE": "", "FAKE_STATE": str(tmp_path / "attempts")}
    return config


Make = Callable[[str], SGLangHost]


@pytest.fixture
def security(http_security: HttpSecurity) -> HttpSecurity:
    """The run's certificate, with a token that is easily found in a log."""
    return dataclasses.replace(http_security, token=TOKEN)


def adopting(security: HttpSecurity, url: str) -> HttpSecurity:
    return dataclasses.replace(security, adopted=frozenset({url}))


@pytest_asyncio.fixture
async def make(config: ExperimentConfig, tmp_path: Path, security: HttpSecurity) -> AsyncIterator[Make]:
    """Builds hosts whose stand-in behaves in a given mode, and ends them after the test."""
    hosts = []

    def build(mode: str) -> SGLangHost:
        config.generation.sglang.env["FAKE_MODE"] = mode
        log = logging.getLogger("sglang-under-test")
        host = SGLangHost(config, scratch="sglang0", run_dir=tmp_path, device="cpu", security=security, log=log)
        hosts.append(host)
        return host

    yield build
    for host in hosts:
        await host.stop()


Started = Callable[[], set[psutil.Process]]


@pytest.fixture
def started() -> Started:
    """Tells which processes the test itself has started; those of earlier tests and fixtures are not meant."""
    earlier = set(psutil.Process().children(recursive=True))
    return lambda: set(psutil.Process().children(recursive=True)) - earlier


def segment_in(text: str) -> Path:
    return Path(text.partition("segment ")[2].split()[0])


async def test_start_returns_when_requests_are_taken_and_stop_leaves_nothing(
    make: Make, started: Started, tmp_path: Path, caplog: pytest.LogCaptureFixture, security: HttpSecurity
) -> None:
    caplog.set_level(logging.INFO)
    host = make("normal")
    served = await host.start()
    connector = TCPConnector(ssl=security.client_context())
    async with ClientSession(connector=connector) as session, session.get(served.url + "/ready") as reply:
        assert reply.status == 200
    assert served.pid is not None
    tree = started()
    assert served.pid in {process.pid for process in tree}
    segment = segment_in(caplog.text)
    assert segment.exists()

    await host.stop()

    assert not [process for process in tree if process.is_running()]
    assert not segment.exists()
    assert not list((tmp_path / "tmp").iterdir())
    port = int(served.url.rpartition(":")[2])
    socket.create_server(("127.0.0.1", port)).close()


async def test_the_servers_log_is_forwarded_without_the_secret(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await make("normal").start()
    assert "server_args" in caplog.text
    assert "'api-key': '***'" in caplog.text
    assert TOKEN not in caplog.text


async def test_the_secret_is_on_no_command_line_and_in_a_file_of_the_owner_only(
    make: Make, started: Started, tmp_path: Path
) -> None:
    await make("normal").start()
    assert not [p for p in started() if any(TOKEN in argument for argument in p.cmdline())]
    (secrets,) = (tmp_path / "tmp").rglob("secrets.yaml")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600


@pytest.mark.parametrize("victim", ["sglang.launch_server", "sglang::scheduler"])
async def test_the_death_of_any_of_its_processes_is_noticed_and_the_rest_ends_with_stop(
    make: Make, started: Started, victim: str
) -> None:
    host = make("normal")
    served = await host.start()
    tree = [p for p in started() if "reaper.py" not in " ".join(p.cmdline())]
    (target,) = [p for p in tree if (p.pid == served.pid) == (victim == "sglang.launch_server")]
    target.kill()
    async with asyncio.timeout(LIMIT_S):
        reason = await host.failed()
    assert ("killed by SIGKILL" if target.pid == served.pid else victim) in reason
    segment = segment_in(reason)
    await host.stop()
    assert not segment.exists()
    assert not [process for process in tree if process.is_running()]


async def test_a_supervisor_leaves_the_reaper_time_to_clean_up(make: Make, started: Started) -> None:
    await make("normal").start()
    tree = {process.pid for process in started()}
    assert len(tree) >= 3
    ended_at_once = {each.pid for each in supervisor.descendants(os.getpid(), spare_cleaners=True)}
    assert not tree & ended_at_once


async def test_it_can_be_started_again_after_a_death(make: Make, security: HttpSecurity) -> None:
    host = make("normal")
    first = await host.start()
    assert first.pid is not None
    await wait_ready(first.url, security, LIMIT_S)
    psutil.Process(first.pid).kill()
    await host.failed()
    second = await host.start()
    assert second.pid != first.pid
    await wait_ready(second.url, security, LIMIT_S)


async def test_a_server_that_does_not_start_says_why_and_leaves_nothing(make: Make, started: Started) -> None:
    with pytest.raises(
        EngineStartError, match=r"exited with code 1(?s:.*)the end\n(?s:.*)first error in its log: RuntimeError: boom"
    ):
        await make("broken").start()
    assert not started()


async def test_a_server_that_is_not_ready_in_time_is_ended(
    make: Make, started: Started, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    starting = asyncio.create_task(make("never_ready").start())
    async with asyncio.timeout(LIMIT_S / 2):
        while caplog.messages.count("asked") < 2:  # noqa: ASYNC110 - then the first was answered
            await asyncio.sleep(0.05)
    clock.forward(LIMIT_S)
    with pytest.raises(EngineStartError, match=rf"generation\.start_timeout_s={LIMIT_S:g}: .*/ready answered 503"):
        await starting
    assert not started()


async def test_a_port_taken_in_the_meantime_costs_another_attempt_only(make: Make, config: ExperimentConfig) -> None:
    host, attempts = make("port_taken"), Path(config.generation.sglang.env["FAKE_STATE"])
    await host.start()
    assert await asyncio.to_thread(attempts.read_text) == "2"


async def test_a_server_that_ignores_sigterm_is_killed(
    make: Make, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.inference.child_host._STOP_GRACE_S", 0.2)
    host = make("stubborn")
    await host.start()
    tree = started()
    await host.stop()
    assert not [process for process in tree if process.is_running()]


async def test_a_killed_owner_takes_the_whole_tree_and_its_shared_memory_along(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    config.generation.sglang.env["FAKE_MODE"] = "normal"
    owner_code = textwrap.dedent(
        f"""
        import asyncio, logging, sys
        from pathlib import Path
        from asyncrl.config.experiment import ExperimentConfig
        from asyncrl.inference.sglang.host import SGLangHost

        async def main():
            logging.basicConfig(level=logging.INFO, stream=sys.stdout)
            config = ExperimentConfig()
            config.model.path = {config.model.path!r}
            config.generation.sglang.python = {config.generation.sglang.python!r}
            config.generation.sglang.env = {dict(config.generation.sglang.env)!r}
            host = SGLangHost(config, scratch="sglang0", run_dir=Path({str(tmp_path)!r}), device="cpu", security=None,
                              log=logging.getLogger())
            await host.start()
            print("READY", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", owner_code, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    output = (await owner.stdout.readuntil(b"READY")).decode()
    tree = psutil.Process(owner.pid).children(recursive=True)
    segment = segment_in(output)
    assert len(tree) >= 3
    assert segment.exists()

    owner.send_signal(signal.SIGKILL)
    await owner.wait()

    _, alive = await asyncio.to_thread(psutil.wait_procs, tree, timeout=LIMIT_S)
    assert not alive
    assert not segment.exists()


class RunningServer:
    """A server that somebody else started, as far as adopting it goes."""

    def __init__(self) -> None:
        self.info = {"weight_version": "default", "model_path": "elsewhere"}
        self.updates: list[dict[str, object]] = []
        self.update_reply: tuple[int, dict[str, object]] = (200, {"success": True})
        self.token: str | None = None
        self.tokens: set[str | None] = set()

    async def handle(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization"))
        if request.path == "/ready":
            return web.Response()
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/model_info":
            return web.json_response(self.info)
        update = await request.json()
        self.updates.append(update)
        status, body = self.update_reply
        if status == 200:
            self.info = {field: update[field] for field in self.info}
        return web.json_response(body, status=status)


@contextlib.asynccontextmanager
async def running(server: RunningServer) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_an_adopted_server_is_given_the_initial_model_under_version_0_and_no_token(
    tmp_path: Path, security: HttpSecurity
) -> None:
    server = RunningServer()
    async with running(server) as url:
        security = adopting(security, url)
        served = await AdoptedHost(url + "/", model_dir=tmp_path, security=security, timeout_s=LIMIT_S).start()
        assert (served.url, served.pid) == (url, None)
        (update,) = server.updates
        assert update["abort_all_requests"] is True
        assert server.info == {"weight_version": "0", "model_path": str(tmp_path)}
        await AdoptedHost(url, model_dir=tmp_path, security=security, timeout_s=LIMIT_S).start()
        assert len(server.updates) == 1
    assert server.tokens == {None}


async def test_an_adopted_server_that_cannot_serve_the_model_is_refused_with_its_reason(
    tmp_path: Path, security: HttpSecurity
) -> None:
    server = RunningServer()
    server.update_reply = (400, {"success": False, "message": "no such folder"})
    async with running(server) as url:
        security = adopting(security, url)
        host = AdoptedHost(url, model_dir=tmp_path, security=security, timeout_s=LIMIT_S)
        with pytest.raises(EngineStartError, match="no such folder"):
            await host.start()
        server.token = "another"
        with pytest.raises(EngineStartError, match="asks for a token, and the run's is not for it"):
            await host.start()


async def test_a_server_that_is_not_there_is_reported_with_the_limit(tmp_path: Path) -> None:
    with reserved_port() as gone:
        port = gone.getsockname()[1]
        host = AdoptedHost(f"http://127.0.0.1:{port}", model_dir=tmp_path, security=None, timeout_s=2.0)
        with pytest.raises(EngineStartError, match=r"start_timeout_s=2: .*/ready cannot be reached"):
            await host.start()
