"""Generation servers and RolloutWorkers come and go while a run goes on; it loses nothing by either."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.security import RunSecret
from asyncrl.commands.audit import audit
from asyncrl.config.run_dir import SECRET_FILE, read_run_config
from asyncrl.launch import main
from asyncrl.manager.messages import ServerStatus, StatusReply
from asyncrl.observe.metrics.sinks import read_rows
from asyncrl.runtime.process.worker import open_resolver

from ..conftest import LIMIT_S, Gate
from ..warm import Template, WarmProcess
from .clusters import await_that

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Join = Callable[..., Any]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
JOIN = """
import sys

from asyncrl.commands import join
from asyncrl.launch import main

join.GONE_S = 30.0  # nobody goes on with a run here that has ended; its manager may be slow for longer than a lease
sys.exit(main(sys.argv[1:]))
"""


class Joined:
    """A `join` as a child, and what it has printed. `template` forks its processes."""

    def __init__(self, run_dir: Path, options: Sequence[str], template: Template | None) -> None:
        arguments, environment = ["join", str(run_dir), *options], os.environ | ONE_THREAD
        self.process: subprocess.Popen[str] | WarmProcess
        if template is not None:
            self.process = template.launch(arguments, environment)
        else:
            command = [sys.executable, "-c", JOIN, *arguments]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> None:
        """Wait for its end; `output` is all that it printed then."""
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line


@pytest.fixture
def join(template: Template | None) -> Iterator[Callable[..., Joined]]:
    """`join(run_dir, *options)`: more processes for a run, servers by default. With `cold` they are started as a user's
    are, and hold the run for over sooner.
    """
    started: list[Joined] = []

    def start(run_dir: Path, *options: str, kind: str = "generation_server", cold: bool = False) -> Joined:
        started.append(Joined(run_dir, ["--kind", kind, *options], None if cold else template))
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


def test_a_server_that_joins_is_used_and_leaving_costs_only_what_it_had_in_hand(
    start_run: Any, gate: Callable[[int], Gate], ctrl_c: Any, join: Join
) -> None:
    """It leaves as it was asked to, then by the death of its machine, all in the middle of answers."""
    held = gate(2)  # while servers start the machine is theirs
    run = start_run(total_train_steps=100_000, eval__interval=0, **held.settings)
    run.wait_for_step(2)
    joined = join(run.run_dir, "--count", "2")
    for index in (1, 2):
        line = f"generation_server/{index} serves at "
        await_that(lambda line=line: line in joined.output, line, LIMIT_S)  # type: ignore[misc]
    held.open()
    await_use(run, 1, 2)
    joined.process.send_signal(signal.SIGINT)
    joined.end()
    assert joined.process.returncode == 130, joined.output
    assert "generation_server/1 joins (pid" in joined.output
    assert "generation_server/2 left" in joined.output
    await_that(lambda: [*servers(run)] == [0], "the manager to see that they left", LIMIT_S)

    lost = join(run.run_dir, "--count", "1")
    await_use(run, 1)
    lost.process.kill()
    await_that(lambda: [*servers(run)] == [0], "the manager to see that it is gone", LIMIT_S)
    at = int(run.rows()[-1]["step"])
    run.wait_for_step(at + 3)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    assert audit(run.run_dir).findings == ()
    summary = run.summary()
    assert summary["restarts"] == {}
    assert set(summary["books"]["dropped"]) <= {"stale"}
    assert run.survivors() == []


def test_a_rollout_worker_that_joins_is_used_and_leaving_costs_only_what_it_had_in_hand(
    start_run: Any, gate: Callable[[int], Gate], ctrl_c: Any, join: Join
) -> None:
    """Two come; both leave in the middle of rollouts, as asked to; one more comes, and its machine dies."""
    held, first = gate(1), "rollout_worker/0"  # while they start the machine is theirs
    run = start_run(total_train_steps=100_000, eval__interval=0, **held.settings)
    run.wait_for_step(1)
    joined = join(run.run_dir, "--count", "2", kind="rollout_worker")
    both = {"rollout_worker/1", "rollout_worker/2"}
    for name in both:
        await_that(lambda name=name: f"{name} takes part" in joined.output, f"{name} to begin", LIMIT_S)  # type: ignore[misc]
    held.open()
    await_that(lambda: both <= players(run), f"trained rollouts of {both}", LIMIT_S)
    joined.process.send_signal(signal.SIGINT)
    joined.end()
    assert joined.process.returncode == 130, joined.output
    await_that(lambda: status(run).workers == [first], "the manager to see that they left", LIMIT_S)

    lost = join(run.run_dir, "--count", "1", kind="rollout_worker")
    await_that(lambda: len(status(run).workers) == 2, "the manager to see that one came", LIMIT_S)
    lost.process.kill()
    await_that(lambda: status(run).workers == [first], "the manager to see that it is gone", LIMIT_S)
    at = int(run.rows()[-1]["step"])
    run.wait_for_step(at + 3)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    assert audit(run.run_dir).findings == ()
    assert set(run.summary()["books"]["dropped"]) <= {"stale", "worker_died", "duplicate_prompt"}
    assert run.survivors() == []


def test_what_joined_ends_with_the_run(start_run: Any, gate: Callable[[int], Gate], ctrl_c: Any, join: Join) -> None:
    """It finds that the manager is gone for good; there is nothing left to do for it."""
    held = gate(1)
    run = start_run(total_train_steps=100_000, eval__interval=0, **held.settings)
    run.wait_for_step(1)
    joined = join(run.run_dir, cold=True)
    await_that(lambda: "generation_server/1 serves at " in joined.output, "the line that says so", LIMIT_S)
    held.open()
    await_use(run, 1)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    joined.end()
    assert joined.process.returncode == 0, joined.output
    assert "the run is over" in joined.output


def test_what_cannot_join_is_told_why(start_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = start_run(total_train_steps=1, eval__interval=0)
    assert run.wait() == 0, run.output + run.logs()
    for options, reason in (
        (["--kind", "rollout_worker"], "no run is active there"),
        (["--count", "0"], "--count=0"),
        ([], "no run is active there"),
    ):
        assert main(["join", str(run.run_dir), "--kind", "generation_server", *options]) == 2
        assert reason in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", str(tmp_path), "--kind", "generation_server"]) == 2
    assert "is not the folder of one of your runs" in capsys.readouterr().err
