"""Generation servers and RolloutWorkers come and go while a run goes on; it loses nothing by either."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.security import RunSecret
from asyncrl.config.run_dir import SECRET_FILE, read_run_config
from asyncrl.launch.__main__ import main
from asyncrl.launch.commands.audit import audit
from asyncrl.manager.messages import ServerStatus, StatusReply
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.trials.claim import open_resolver

from ..conftest import LIMIT_S, Gate
from ..warm import Template
from .clusters import await_that
from .joined import Joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Join = Callable[..., Any]


@pytest.fixture
def join(template: Template | None) -> Iterator[Callable[..., Joined]]:
    """`join(run_dir, *options)`: more processes for a run, servers by default."""
    started: list[Joined] = []

    def start(run_dir: Path, *options: str, kind: str = "generation_server") -> Joined:
        started.append(Joined(run_dir, ["--kind", kind, *options], template))
        return started[-1]

    yield start
    for joined in started:
        joined.process.kill()
        joined.end()


def status(run: Any) -> StatusReply:
    """Return the status of the manager of `run`."""

    async def ask() -> StatusReply:
        with open_resolver(read_run_config(run.run_dir), run.run_dir) as resolver:
            url = resolver.wait(names.MANAGER_KEY, LIMIT_S)  # its lease may just have run out
        http = JsonHttp(RunSecret.load(run.run_dir / SECRET_FILE).http())
        try:
            return await http.call("POST", f"{url}/status", timeout_s=LIMIT_S, reply=StatusReply)
        finally:
            await http.close()

    return asyncio.run(ask())


def servers(run: Any) -> dict[int, ServerStatus]:
    """Return the status of each server of `run`, as its manager reports it."""
    return {server.index: server for server in status(run).servers}


def players(run: Any) -> set[str]:
    """The RolloutWorkers of which a rollout was trained, by the ledger."""
    lines = [line for file in sorted((run.run_dir / "ledger").glob("*.jsonl")) for line in read_rows(file)]
    workers = {line["rollout"]: line["worker"] for line in lines if line["kind"] == "admitted"}
    return {workers[line["rollout"]] for line in lines if line["kind"] == "trained" and line["rollout"] in workers}


def await_use(run: Any, *indices: int) -> None:
    """Wait until each of these has been brought a version of the run, and had a request."""
    seen: set[int] = set()

    def so() -> bool:
        seen.update(server.index for server in servers(run).values() if server.version and server.sequences)
        return seen.issuperset(indices)

    await_that(so, f"requests at servers {indices}: {seen}", LIMIT_S)


def await_lines(joined: Joined, *lines: str) -> None:
    """Wait until it has printed all of them."""
    for line in lines:
        await_that(lambda line=line: line in joined.output, line, LIMIT_S)  # type: ignore[misc]


def test_servers_and_workers_that_join_are_used_and_leaving_costs_only_what_they_had_in_hand(
    start_run: Any, gate: Callable[[int], Gate], ctrl_c: Any, join: Join, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of each leave as they were asked to, in the middle of answers; then one more of each is killed with its
    command, as by the death of its machine. The last ends with the run: it finds that the manager is gone for good.
    Nothing joins afterwards.
    """
    held, first = gate(2), "rollout_worker/0"  # while they start the machine is theirs
    run = start_run(total_train_steps=100_000, eval__interval=0, **held.settings)
    run.wait_for_step(2)
    serving = join(run.run_dir, "--count", "2")
    playing = join(run.run_dir, "--count", "2", kind="rollout_worker")
    both = {"rollout_worker/1", "rollout_worker/2"}
    await_lines(serving, *(f"generation_server/{index} serves at " for index in (1, 2)))
    await_lines(playing, *(f"{name} takes part" for name in both))
    held.open()
    await_use(run, 1, 2)
    await_that(lambda: both <= players(run), f"trained rollouts of {both}", LIMIT_S)
    for joined in (serving, playing):
        joined.process.send_signal(signal.SIGINT)
    for joined in (serving, playing):
        joined.end()
        assert joined.process.returncode == 130, joined.output
    assert "generation_server/1 joins (pid" in serving.output
    assert "generation_server/2 left" in serving.output
    await_that(lambda: [*servers(run)] == [0], "the manager to see that the servers left", LIMIT_S)
    await_that(lambda: status(run).workers == [first], "the manager to see that the workers left", LIMIT_S)

    lost_server, lost_worker = join(run.run_dir), join(run.run_dir, kind="rollout_worker")
    await_use(run, 1)
    await_that(lambda: len(status(run).workers) == 2, "the manager to see that one came", LIMIT_S)
    for lost in (lost_server, lost_worker):
        lost.process.kill()
    await_that(lambda: [*servers(run)] == [0], "the manager to see that the server is gone", LIMIT_S)
    await_that(lambda: status(run).workers == [first], "the manager to see that the worker is gone", LIMIT_S)
    last = join(run.run_dir)
    await_use(run, 1)
    at = int(run.rows()[-1]["step"])
    run.wait_for_step(at + 3)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    last.end()
    assert last.process.returncode == 0, last.output
    assert "the run is over" in last.output
    for options, reason in (
        (["--kind", "rollout_worker"], "no run is active there"),
        (["--count", "0"], "--count=0"),
        ([], "no run is active there"),
    ):
        assert main(["join", str(run.run_dir), "--kind", "generation_server", *options]) == 2
        assert reason in capsys.readouterr().err
    assert audit(run.run_dir).findings == ()
    summary = run.summary()
    assert summary["restarts"] == {}
    assert set(summary["books"]["dropped"]) <= {"stale", "worker_died"}
    assert run.survivors() == []


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", str(tmp_path), "--kind", "generation_server"]) == 2
    assert "is not the folder of one of your runs" in capsys.readouterr().err
