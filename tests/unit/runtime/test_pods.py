"""Processes in pods: a pod is a local process that runs the pods' program; a proxy before it cuts and freezes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.comm.http.calls import HttpRefused, HttpUnreachable, JsonHttp
from asyncrl.comm.security.run_secret import RunSecret
from asyncrl.runtime import supervisor
from asyncrl.runtime.hosts import pod_carrier
from asyncrl.runtime.hosts.pod_carrier import agent_file

LIMIT_S = 300.0
LINES = 2000


class Proxy:
    """Relays TCP connections; cuts most of them in the handshake or amid an answer."""

    CUT_AFTER_BYTES = (1 << 30, 500, 1 << 30, 1500, 3000)
    """So much of the pod's goes through, one connection after the other."""

    def __init__(self) -> None:
        self.cuts = self._seen = 0
        self.target: tuple[str, int] = ("", 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._relay, "127.0.0.1"), self._loop)
        self.port = server.result(LIMIT_S).sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*self.target)
        limit = self.CUT_AFTER_BYTES[self._seen % len(self.CUT_AFTER_BYTES)]
        self._seen += 1

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, left: int) -> None:
            try:
                while piece := await source.read(1 << 16):
                    left -= len(piece)
                    if left < 0:
                        self.cuts += 1
                        target.transport.abort()
                        return
                    target.write(piece)
                    await target.drain()
            except OSError:
                pass
            finally:
                target.close()

        await asyncio.gather(pump(reader, there[1], 1 << 30), pump(there[0], writer, limit))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)


def await_that(so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(LIMIT_S / 0.05)):
        if so():
            return
        pause.wait(0.05)
    pytest.fail("it did not come about")


class Cluster:
    """A run's folder, and pods and carriers that were started."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.started: list[subprocess.Popen[bytes]] = []
        RunSecret.create(run_dir / "secret")

    def pod(self) -> subprocess.Popen[bytes]:
        before = self.incarnation()
        pod = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.runtime.hosts.pod_agent", str(self.run_dir), "far"],
            env=os.environ | {"ASYNCRL_HOST": "127.0.0.1"},
            start_new_session=True,
        )
        self.started.append(pod)
        await_that(lambda: self.incarnation() != before)
        return pod

    def incarnation(self) -> int:
        file = agent_file(self.run_dir, "far")
        return int(json.loads(file.read_text())["incarnation"]) if file.exists() else 0

    def url(self) -> str:
        return str(json.loads(agent_file(self.run_dir, "far").read_text())["url"])

    def through(self, proxy: Proxy) -> None:
        """Let carriers reach the pod through `proxy` alone."""
        file = agent_file(self.run_dir, "far")
        said = json.loads(file.read_text())
        proxy.target = ("127.0.0.1", int(said["url"].rpartition(":")[2]))
        file.write_text(json.dumps(said | {"url": f"https://127.0.0.1:{proxy.port}"}))

    def run(self, code: str, limit_s: float = LIMIT_S) -> subprocess.Popen[bytes]:
        """A carrier whose process runs this Python code."""
        order = supervisor.Order([sys.executable, "-c", code], {}, str(self.run_dir), LIMIT_S)
        command = [sys.executable, "-I", "-S", pod_carrier.__file__, str(self.run_dir), "far", str(limit_s)]
        carrier = subprocess.Popen([*command, sys.executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(carrier)
        assert carrier.stdin is not None
        carrier.stdin.write(json.dumps(order._asdict()).encode() + b"\n")
        carrier.stdin.flush()
        return carrier


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for process in reversed(cluster.started):
        process.kill()
        process.wait(LIMIT_S)


def first_pid(carrier: subprocess.Popen[bytes]) -> int:
    assert carrier.stdout is not None
    return int(carrier.stdout.readline())


def output_and_code(carrier: subprocess.Popen[bytes]) -> tuple[bytes, int]:
    assert carrier.stdout is not None
    output = carrier.stdout.read()
    return output, carrier.wait(LIMIT_S)


def test_a_process_goes_on_over_cuts_with_all_of_its_output_and_its_own_exit_code(cluster: Cluster) -> None:
    cluster.pod()
    proxy = Proxy()
    cluster.through(proxy)
    code = f"import time\nfor i in range({LINES}): print(i, flush=True); time.sleep(0.001)\nraise SystemExit(7)"
    carrier = cluster.run(code)
    output, ended = output_and_code(carrier)
    assert ended == 7
    assert [int(line) for line in output.splitlines()] == list(range(LINES))
    assert proxy.cuts > 3
    proxy.close()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_pod_that_vanishes_or_freezes_is_a_lost_process(cluster: Cluster, sign: signal.Signals) -> None:
    pod = cluster.pod()
    carrier = cluster.run("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    process = psutil.Process(first_pid(carrier))
    pod.send_signal(sign)
    output, code = output_and_code(carrier)
    assert code == 255
    assert b"lost with the pod of host far: no answer for" in output
    pod.kill()
    await_that(lambda: not process.is_running())


def test_processes_of_a_program_that_was_started_again_are_lost_at_once(cluster: Cluster) -> None:
    pod = cluster.pod()
    carrier = cluster.run("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    process = psutil.Process(first_pid(carrier))
    pod.kill()
    cluster.pod()
    output, code = output_and_code(carrier)
    assert (code, b"the pod's program was started again" in output) == (255, True)
    await_that(lambda: not process.is_running())
    assert output_and_code(cluster.run("print('again')")) == (b"again\n", 0)


def test_a_caller_without_the_runs_token_or_certificate_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.pod()
    right = RunSecret.load(tmp_path / "secret").http()
    other = RunSecret.create(tmp_path / "other").http()

    async def ask(http: JsonHttp) -> None:
        body = {"name": "x", "python": sys.executable, "order": "{}"}
        try:
            await http.call("POST", f"{cluster.url()}/start", body, timeout_s=LIMIT_S)
        finally:
            await http.close()

    async def with_wrong_token() -> None:
        await ask(JsonHttp(type(right)("0" * 64, right.file, right.certificate)))

    async def with_wrong_certificate() -> None:
        await ask(JsonHttp(other))

    with pytest.raises(HttpRefused, match="401"):
        asyncio.run(with_wrong_token())
    with pytest.raises(HttpUnreachable):
        asyncio.run(with_wrong_certificate())


def test_repeated_requests_to_start_a_process_start_one(cluster: Cluster, tmp_path: Path) -> None:
    """A carrier repeats a request whose answer did not come, also while the pod still works on the first."""
    pod = cluster.pod()
    order = supervisor.Order([sys.executable, "-c", "import time; time.sleep(600)"], {}, str(tmp_path), LIMIT_S)
    body = {"name": "x", "python": sys.executable, "order": json.dumps(order._asdict())}

    async def start() -> None:
        http = JsonHttp(RunSecret.load(tmp_path / "secret").http())
        calls = (http.call("POST", f"{cluster.url()}/start", body, timeout_s=LIMIT_S) for _ in range(8))
        await asyncio.gather(*calls)
        await http.close()

    asyncio.run(start())
    assert len(psutil.Process(pod.pid).children()) == 1


def test_a_process_ends_with_its_launcher_and_passes_its_signals_on(cluster: Cluster) -> None:
    cluster.pod()
    asleep = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    ended, stopped = cluster.run(asleep), cluster.run(asleep)
    processes = [psutil.Process(first_pid(carrier)) for carrier in (ended, stopped)]
    assert ended.stdin is not None
    assert stopped.stdin is not None
    ended.stdin.close()
    stopped.stdin.write(supervisor.STOP)
    stopped.stdin.flush()
    assert ended.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert stopped.wait(LIMIT_S) == 128 + supervisor.STOP_SIGNAL
    assert not any(process.is_running() for process in processes)


def test_a_pod_that_is_deleted_ends_its_processes_and_does_not_count_as_complete(cluster: Cluster) -> None:
    pod = cluster.pod()
    process = psutil.Process(first_pid(cluster.run("import os, time; print(os.getpid(), flush=True); time.sleep(600)")))
    pod.terminate()
    assert pod.wait(LIMIT_S) == 1
    assert not process.is_running()


def test_a_host_without_a_pod_is_lost_after_the_limit(cluster: Cluster) -> None:
    output, code = output_and_code(cluster.run("print(1)", limit_s=1.0))
    assert code == 255
    assert b"no pod of host far has answered within 1 s" in output
