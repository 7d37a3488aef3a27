"""A real run with its names in etcd goes on through what happens to etcd, and to the way there; no process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.comm.name_resolve import make_resolver

from ..conftest import LIMIT_S, Run
from ..e2e.clusters import await_that
from ..etcd_cluster import PASSWORD, USER, EtcdCluster, needs_etcd

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(1800)]

LEASE_S = 5.0
OUTAGE_S = 3 * LEASE_S
CUT_S = 2 * LEASE_S
PATIENCE_S = 3.0
PACE_S = 1.0
"""How long a group of answers takes: the run goes on during an outage, and leaves the processors to others."""
PACED = f"""
import asyncio
from asyncrl.plugins.agents.single_turn import SingleTurnAgent

class Paced(SingleTurnAgent):
    async def run_group(self, prompt, make_env, client):
        if not prompt.prompt_id.startswith("rehearsal-"):
            await asyncio.sleep({PACE_S})
        return await super().run_group(prompt, make_env, client)
"""
KINDS = ("master_worker", "model_worker", "gserver_manager", "generation_server", "rollout_worker")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members, with TLS."""
    needs_etcd()
    cluster = EtcdCluster(tmp_path / "etcd", 3, tls=True)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


class Watched:
    """A run whose processes are to stay the same, and to make steps."""

    def __init__(self, run: Run, etcd: EtcdCluster, **login: str) -> None:
        self.run, self._login = run, login
        self.etcd = etcd
        run.wait_for_step(2)
        self._processes = {psutil.Process(run.worker(f"{kind}/0").pid) for kind in KINDS}
        expected = {f"status/{kind}/0" for kind in KINDS}
        await_that(lambda: expected < self._names(), f"{expected} in etcd", LIMIT_S)  # a lease may just have run out
        self.entries = self._names()

    def continues(self) -> None:
        """Two more steps are made, by the same processes, which find each other by the same names."""
        made = int(self.run.rows()[-1]["step"])
        self.run.wait_for_step(made + 2)
        assert all(process.is_running() for process in self._processes), self.run.output + self.run.logs()
        assert not (self.run.run_dir / "restarts.jsonl").exists(), self.run.output
        await_that(lambda: self._names() >= self.entries, f"{self.entries} in etcd", LIMIT_S)

    def _names(self) -> set[str]:
        access = self.etcd.access(**self._login)
        with make_resolver("etcd3", "/asyncrl/tiny/trial0", access=access) as resolver:
            return {name for name in resolver.get_subtree() if not name.startswith("model_version")}


def over(etcd: EtcdCluster, **login: str) -> dict[str, Any]:
    """Settings of a run with its names there."""
    settings = {f"system__etcd__{name}": value for name, value in (etcd.files() | login).items()}
    settings |= {"system__name_resolve": "etcd3", "system__name_resolve_root": etcd.address}
    return settings | {"system__lease_s": LEASE_S, "total_train_steps": 100_000}


def silence(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_run_outlives_all_that_happens_to_etcd_and_a_trainer_that_is_cut_off(
    start_run: Any, ctrl_c: Any, etcd: EtcdCluster, tmp_path: Path
) -> None:
    """One run, for what one outage leaves behind the next one has to do with; and starting one takes its time."""
    (tmp_path / "password").touch(0o600)
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    login = {"user": USER, "password_file": str(tmp_path / "password")}
    etcd.switch_authentication_on()
    (tmp_path / "paced.py").write_text(PACED)
    paced = {"agent__path": f"{tmp_path / 'paced.py'}:Paced", "eval__interval": 0}
    run = start_run(**over(etcd, **login), **paced)
    watched = Watched(run, etcd, **login)
    assert not [line for line in command_lines(run) if PASSWORD in line]

    etcd.pause()
    silence(OUTAGE_S)
    etcd.resume()
    watched.continues()
    assert "is gone or silent" not in (run.run_dir / "logs" / "gserver_manager-0.log").read_text()

    etcd.compact()
    etcd.kill(etcd.leader())
    watched.continues()

    etcd.kill()
    silence(OUTAGE_S)
    etcd.start()
    watched.continues()

    trainer = [run.worker(f"{kind}/0").pid for kind in ("master_worker", "model_worker")]
    for pid in trainer:
        os.kill(pid, signal.SIGSTOP)
    silence(CUT_S)  # its leases run out meanwhile
    for pid in trainer:
        os.kill(pid, signal.SIGCONT)
    watched.continues()

    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()


def test_etcd_away_for_longer_than_the_patience_ends_the_run_with_a_sentence(start_run: Any, etcd: EtcdCluster) -> None:
    run = start_run(**over(etcd), system__name_resolve_timeout_s=PATIENCE_S)
    run.wait_for_step(2)
    etcd.kill()
    assert run.wait() == 1, run.output + run.logs()
    assert "system.name_resolve_timeout_s=3" in run.output
    assert "Traceback" not in run.output


def command_lines(run: Run) -> list[str]:
    """Return the command line of every process of the run, with its environment."""
    lines = []
    for process in [psutil.Process(run.process.pid), *run.remember_processes().values()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has just ended
            lines.append(" ".join([*process.cmdline(), *process.environ().values()]))
    return lines
