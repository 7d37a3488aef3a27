"""A run over hosts with addresses of their own goes on through what happens to the network between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from asyncrl.comm.name_resolve import make_resolver
from asyncrl.hosts.agent import SLOT_VARIABLE
from asyncrl.launch.commands.audit import audit

from ..conftest import LIMIT_S, Run, StartRun
from ..e2e.clusters import await_that, ssh_hosts
from ..etcd_cluster import EtcdCluster, needs_etcd
from .network import Network, network

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(1800)]

RUNS = (
    ["master_worker", "gserver_manager"],
    ["model_worker", "generation_server"],
    ["model_worker", "rollout_worker"],
)
"""By host; the first is the launcher's. The two ranks train together over the network."""
CUT_S = 20.0
"""Twice as long as a lease."""
SHORT_CUT_S = 12.0
SOME_STEPS = 2


class Spread:
    """A run over `RUNS`, with its names in etcd, which is on a machine of its own."""

    def __init__(self, closing: ExitStack, folder: Path) -> None:
        needs_etcd()
        self.network: Network = closing.enter_context(network(len(RUNS), outside=True))
        *self.hosts, names_host = self.network.hosts
        self._etcd = EtcdCluster(folder / "etcd", host=names_host.address)
        closing.callback(self._etcd.kill)
        self._etcd.start()
        entries, configs = [], []
        for host, runs in zip(self.hosts, RUNS, strict=True):
            name = f"host{len(entries) + 1}"
            if entries:
                configs.append(closing.enter_context(ssh_hosts(folder / name, [name], host.address, host.inside)))
            called = f"name: {name}, " if entries else ""
            entries.append(f"{{{called}address: {host.address}, runs: [{', '.join(runs)}]}}")
        config = folder / "ssh_config"
        config.write_text("".join(part.read_text() for part in configs))
        self.settings = {
            "system__launcher": "ssh",
            "system__launcher_args": f"['-F', '{config}']",
            "system__hosts": f"[{', '.join(entries)}]",
            "system__name_resolve": "etcd3",
            "system__name_resolve_root": self._etcd.address,
            "system__start_timeout_s": LIMIT_S,
            "trainer__parallel": "d2",
        }

    def published(self) -> dict[str, str]:
        """The address of each endpoint that is in name resolution, by name."""
        with make_resolver("etcd3", "/asyncrl/tiny/trial0", access=self._etcd.access()) as resolver:
            found = resolver.get_subtree()
        ends = {name: value.partition("//")[2].partition('"')[0] for name, value in found.items() if "//" in value}
        return {name: str(urlsplit(f"//{end}").hostname) for name, end in ends.items()}


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Spread]:
    with ExitStack() as closing:
        yield Spread(closing, tmp_path)


def makes_steps(run: Run, steps: int = SOME_STEPS) -> None:
    run.wait_for_step(int(run.rows()[-1]["step"]) + steps)


def silence(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_run_over_three_hosts_outlives_all_that_happens_between_them(
    spread: Spread, start_run: StartRun, ctrl_c: Any
) -> None:
    """One run, for what one disturbance leaves behind the next one has to do with; and starting one takes its time."""
    first, second, third = spread.hosts
    settings = spread.settings | {"eval__interval": 0, "checkpoint__interval": 0, "total_train_steps": 100_000}
    run = start_run(inside=first.inside, **settings)
    run.wait_for_step(2)
    expected = {
        "generation_servers/0": second.address,
        "gserver_manager": first.address,
        "trajectory_pullers/0": second.address,
        "trajectory_pullers/1": third.address,
        "workers/model_worker/0": second.address,
        "workers/model_worker/1": third.address,
        "workers/rollout_worker/0": third.address,
    }
    await_that(lambda: spread.published() == expected, f"{expected} in name resolution")

    for host, seconds in ((second, CUT_S), (third, SHORT_CUT_S), (first, SHORT_CUT_S)):
        with spread.network.cut_off(host):
            silence(seconds)
        makes_steps(run)
    third.delay_s = 0.1  # each way
    makes_steps(run, 1)
    third.delay_s = 0.0
    for host in spread.hosts:
        host.loss = 0.05
    makes_steps(run)
    for host in spread.hosts:
        host.loss = 0.0
    assert not (run.run_dir / "restarts.jsonl").exists(), run.output

    given_up = processes_of(run, "model_worker/1", "rollout_worker/0")
    assert len(given_up) == 2
    with spread.network.cut_off(third):
        (connection,) = connections_to(run, "host3")
        connection.terminate()
        run.wait_for_line("model_worker/1 (on host3) was lost with the connection to its host")
        run.wait_for_line("rollout_worker/0 (on host3) was lost with the connection to its host")
        assert all(process.is_running() for process in given_up)  # nobody could tell them
    run.wait_for_line("the brain went on after")
    run.wait_for_line("rollout_worker/0 went on after")
    await_that(lambda: not any(process.is_running() for process in given_up), f"the end of {given_up}")
    makes_steps(run)

    with spread.network.cut_off(third):
        ctrl_c(run)
        run.wait_for_line("stopping after a checkpoint")
        silence(3.0)  # the ranks are in a collective, or the master waits for its checkpoint
    assert run.wait(LIMIT_S) == 130, run.output + run.logs()
    steps = [int(row["step"]) for row in run.rows()]
    assert steps == list(range(1, len(steps) + 1))
    assert (run.run_dir / "checkpoints" / f"v{steps[-1]}").is_dir()
    assert run.summary()["restarts"].keys() == {"the brain", "rollout_worker/0"}
    assert audit(run.run_dir).findings == ()


def processes_of(run: Run, *workers: str) -> list[psutil.Process]:
    """Those of `workers` that run on other hosts than the launcher's."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            number_and_slot = process.environ().get(SLOT_VARIABLE, "").partition(" ")
            title = " ".join(process.cmdline())
            slots = [f"{worker} {run.run_dir}" for worker in workers if title.startswith(f"asyncrl {worker} ")]
            found += [process] if number_and_slot[2] in slots else []
    return found


def connections_to(run: Run, name: str) -> list[psutil.Process]:
    """Each `ssh` of this run's launcher to `name`; their command lines are the same."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    lines = [(child, child.cmdline()) for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child, line in lines if line[:1] == ["ssh"] and name in line]
