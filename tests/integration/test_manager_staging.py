"""The manager has every version brought to hosts that share no folder, through real staging servers."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.waits import Notifier
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.servers import ServerTargets, Target, host_of
from asyncrl.manager.settings import UpdateMode
from asyncrl.rollout.process import RolloutWorker
from asyncrl.runtime.process.worker import WorkerSpec
from asyncrl.runtime.settings import HostConfig
from asyncrl.staging.client import INPUTS, MODEL
from asyncrl.staging.manager import Staging, bring_folders
from asyncrl.staging.process import StagingService
from asyncrl.weights.manifest import Manifest, file_entry, verify, write_manifest

HOSTS = 5
LIMIT_S = 300.0


class Hosts:
    """Staging servers on addresses and disks of their own, and the manager's part in this loop."""

    def __init__(self, root: Path, security: HttpSecurity) -> None:
        self.root, self.security = root, security
        self.services: dict[int, StagingService] = {}
        self.urls: dict[int, str] = {}
        self.decisions = FleetDecisions(UpdateMode.interrupt, 10.0, targets=ServerTargets(staged=True))
        self.http = JsonHttp(security)
        self.has: dict[str, Target] = {}
        self._arrival = asyncio.Event()
        log = logging.getLogger("test")
        folders = {INPUTS: str(root / "inputs"), MODEL: str(root / "model")}
        self.plays: set[int] = set()
        self.reported: asyncio.Queue[str] = asyncio.Queue()
        self.had: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.staging = Staging(
            self.http, folders, self.decisions, self._arrived, needs=self._needs, tell=self.reported.put_nowait, log=log
        )
        self._task = asyncio.create_task(self.staging.run())

    def _needs(self, host: int, folder: str) -> bool:
        return host == 0 or (folder == INPUTS) == (host in self.plays)

    def _arrived(self, host: str, target: Target) -> None:
        self.decisions.targets.arrived(host, target)
        self.has[host] = target
        self._arrival.set()

    async def start(self, host: int) -> None:
        had = self.had

        def note(name: str, path: Path) -> None:
            had.put_nowait((host, name))

        service = StagingService(self.root / f"disk{host}", self.security, note)
        self.services[host], self.urls[host] = service, await service.http.start(f"127.0.0.{host + 1}")
        self.staging.registered(dict(self.urls))

    async def stop(self, host: int) -> None:
        await self.services.pop(host).close()

    def publish(self, version: int, *, damaged: bool = False) -> Path:
        folder = self.root / "weights" / f"v{version}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights" * 1000 * version)
        write_manifest(
            folder, Manifest("actor", version, {"model.safetensors": file_entry(folder / "model.safetensors")})
        )
        if damaged:
            (folder / "model.safetensors").write_bytes(b"WEIGHTS" * 1000 * version)
        target = Target(version, str(folder))
        self.decisions.targets.publish(target)
        self.staging.publish(target)
        return folder

    async def all_have(self, version: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            serving = [host_of(url) for host, url in self.urls.items() if host not in self.plays]
            while any(host not in self.has or self.has[host].version != version for host in serving):
                await self._arrival.wait()
                self._arrival.clear()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for host in list(self.services):
            await self.stop(host)
        await self.http.close()


@pytest.fixture
async def hosts(tmp_path: Path, http_security: HttpSecurity) -> AsyncIterator[Hosts]:
    (tmp_path / "model").mkdir()
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "inputs.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text("{}")
    hosts = Hosts(tmp_path, http_security)
    for host in range(HOSTS):
        await hosts.start(host)
    yield hosts
    await hosts.close()


def folders(hosts: Hosts, host: int) -> list[str]:
    return sorted(path.name for path in (hosts.root / f"disk{host}").iterdir())


async def test_each_host_gets_the_model_and_each_version_once_and_verified(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    published = hosts.publish(1)
    await hosts.all_have(1)
    came = [record.args for record in caplog.records if "came to host" in record.msg]
    assert len(came) == 2 * HOSTS + 1  # what RolloutWorkers read is on the origin's disk alone
    for host, target in hosts.has.items():
        assert verify(Path(target.copy)) == verify(published), host
    assert len({target.copy for target in hosts.has.values()}) == HOSTS
    assert {target.path for target in hosts.has.values()} == {str(hosts.root / "disk0" / "v1")}
    shutil.rmtree(published)  # the publisher is free to
    hosts.publish(2)
    await hosts.all_have(2)
    hosts.publish(3)
    await hosts.all_have(3)
    assert folders(hosts, 3) == ["model", "v2", "v3"]  # v2 was what its servers were about to read when v3 came


async def test_a_host_that_serves_nothing_gets_what_rollout_workers_read_and_no_weights(hosts: Hosts) -> None:
    hosts.plays.add(HOSTS)
    await hosts.start(HOSTS)
    async with asyncio.timeout(LIMIT_S):
        while await hosts.had.get() != (HOSTS, INPUTS):
            pass
    hosts.publish(1)
    await hosts.all_have(1)
    hosts.publish(2)
    await hosts.all_have(2)
    assert folders(hosts, HOSTS) == ["inputs"]
    assert folders(hosts, 1) == ["model", "v1", "v2"]  # v1 was what its servers were about to read
    assert host_of(hosts.urls[HOSTS]) not in hosts.has


async def test_a_dead_host_keeps_none_of_the_others_from_it_and_gets_it_when_it_is_back(hosts: Hosts) -> None:
    hosts.publish(1)
    await hosts.all_have(1)
    await hosts.stop(2)
    dead = hosts.urls.pop(2)
    hosts.publish(2)
    hosts.has.pop(host_of(dead))
    await hosts.all_have(2)
    await hosts.start(2)
    await hosts.all_have(2)


async def test_an_origin_that_began_again_takes_in_what_is_published_anew(hosts: Hosts) -> None:
    hosts.publish(1)
    await hosts.all_have(1)
    await hosts.stop(0)
    hosts.has.clear()
    for host in range(1, HOSTS):
        hosts.has[f"127.0.0.{host + 1}"] = Target(1, "")
    await hosts.start(0)
    await hosts.all_have(1)
    hosts.publish(2)
    await hosts.all_have(2)


async def test_a_version_that_is_damaged_at_the_publisher_arrives_nowhere_else_and_the_next_does(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.publish(1)
    await hosts.all_have(1)
    hosts.publish(2, damaged=True)
    async with asyncio.timeout(LIMIT_S):
        while "the manifest says" not in caplog.text:  # noqa: ASYNC110 - it is told to nobody but the log
            await asyncio.sleep(0.01)
    hosts.publish(3)
    await hosts.all_have(3)
    assert not (hosts.root / "disk1" / "v2").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk")
async def test_a_full_disk_is_on_the_terminal_with_host_and_folder_once_and_the_version_comes_when_there_is_room(
    hosts: Hosts,
) -> None:
    disk = hosts.root / f"disk{HOSTS}"
    disk.mkdir()
    await command("mount", "-t", "tmpfs", "-o", "size=128k", "none", str(disk))
    try:
        await hosts.start(HOSTS)
        hosts.publish(100)  # 700 kB
        async with asyncio.timeout(LIMIT_S):
            reported = await hosts.reported.get()
        await command("mount", "-o", "remount,size=16m", str(disk))
        await hosts.all_have(100)
        await hosts.stop(HOSTS)
    finally:
        await command("umount", "--lazy", str(disk))
    assert reported.startswith(f"WARNING: host 127.0.0.{HOSTS + 1} cannot store v100, it is tried again: ")
    assert reported.endswith(f"{disk}/v100: No space left on device")
    assert hosts.reported.empty()


async def command(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words)
    assert await process.wait() == 0


async def test_the_managers_loop_follows_servers_and_versions_and_each_host_gets_what_its_processes_read(
    tmp_path: Path, http_security: HttpSecurity
) -> None:
    config = ExperimentConfig()
    config.system.shared_filesystem = False
    config.system.hosts = [
        HostConfig(),
        HostConfig(name="serves", address="127.0.0.2", runs=["generation_server"]),
        HostConfig(name="trains on rollouts", address="127.0.0.3", runs=["rollout_worker"]),
    ]
    config.model.path = str(tmp_path / "model")
    for folder in ("model", "inputs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    write_run_config(config, tmp_path)
    manager = RolloutWorker(WorkerSpec("rollout_worker", 0, tmp_path))  # any process of the run
    decisions = FleetDecisions(UpdateMode.interrupt, 10.0, targets=ServerTargets(staged=True))
    arrived: asyncio.Queue[str] = asyncio.Queue()
    fleet: Any = SimpleNamespace(changed=Notifier(), arrived=lambda host, target: arrived.put_nowait(host))
    http, services = JsonHttp(http_security), []
    bringing = asyncio.create_task(bring_folders(manager, http, decisions, fleet, time.monotonic))
    came: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    try:
        for host in range(3):
            service = StagingService(
                tmp_path / f"disk{host}", http_security, lambda name, path, host=host: came.put_nowait((host, name))
            )
            services.append(service)
            manager.resolver.add(names.staging_server_key(host), await service.http.start(f"127.0.0.{host + 1}"))
        (tmp_path / "v1").mkdir()
        write_manifest(tmp_path / "v1", Manifest("actor", 1, {}))
        decisions.targets.publish(Target(1, str(tmp_path / "v1")))
        fleet.changed.notify()
        async with asyncio.timeout(LIMIT_S):
            expected = {(0, MODEL), (0, INPUTS), (1, MODEL), (2, INPUTS)}
            assert {await came.get() for _ in expected} == expected
            assert {await arrived.get() for _ in range(2)} == {"127.0.0.1", "127.0.0.2"}
        assert [service.store.get("v1") is not None for service in services] == [True, True, False]
    finally:
        bringing.cancel()
        await asyncio.gather(bringing, return_exceptions=True)
        for service in services:
            await service.close()
        await http.close()
        manager.resolver.close()
