"""Hosts without a shared folder, over ssh: what they read comes over HTTP."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.hosts.agent import SLOT_VARIABLE
from asyncrl.launch.commands.audit import audit
from asyncrl.observe.status import ProcessHistory

from ..conftest import LIMIT_S
from ..etcd_cluster import EtcdCluster, needs_etcd
from ..warm import Template
from .clusters import await_that, ssh_hosts
from .hosts import assert_gone, processes_of, titled, with_python
from .joined import Joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class OwnDisks:
    """Settings of a run whose hosts have a disk each: box2 and box3 serve, box4 plays; and the disks."""

    settings: dict[str, Any]
    disks: dict[str, Path]


@pytest.fixture
def own_disks(tmp_path: Path, python_there: str) -> Iterator[OwnDisks]:
    needs_etcd()
    etcd = EtcdCluster(tmp_path / "etcd")
    etcd.start()
    disks = {name: tmp_path / name for name in ("box2", "box3", "box4")}
    hosts = (
        "[{address: 127.0.0.1, runs: [master_worker, model_worker, gserver_manager]},"
        "{name: box2, address: 127.0.0.2, runs: [generation_server], fileroot: '%s'},"
        "{name: box3, address: 127.0.0.3, runs: [generation_server], fileroot: '%s'},"
        "{name: box4, address: 127.0.0.4, runs: [rollout_worker], fileroot: '%s'}]"
    )
    settings = {
        "trial_name": "own_disks",
        "total_train_steps": 100_000,
        "eval__interval": 0,
        "generation__servers": 2,
        "rollout__workers": 2,
        "system__launcher": "ssh",
        "system__shared_filesystem": False,
        "system__hosts": hosts % tuple(disks.values()),
        "system__name_resolve": "etcd3",
        "system__name_resolve_root": etcd.address,
    }
    with ssh_hosts(tmp_path / "ssh", list(disks)) as config:
        settings = with_python(settings, python_there)
        yield OwnDisks(settings | {"system__launcher_args": str(["-F", str(config)])}, disks)
    etcd.kill()


@pytest.mark.etcd
def test_other_code_on_a_host_without_a_shared_folder_ends_the_run_by_name(
    start_run: Any, own_disks: OwnDisks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = (tmp_path / "rewards.py").read_text()
    there = own_disks.disks["box4"] / "tiny" / "own_disks"  # where its processes are, which find modules there first
    for folder, content in ((tmp_path / "mine", rewards), (there, rewards.replace("02468", "13579"))):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "my_digits.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'mine'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    fewer = {"generation__servers": 1, "rollout__workers": 1}
    run = start_run(**own_disks.settings | fewer | {"reward__path": "my_digits:even_digits"})
    assert run.wait() == 1
    differs = f"1 module(s) of this host (127.0.0.4) are not those of the launcher's: my_digits differs from {tmp_path}"
    assert differs in run.output
    assert_gone(run)


@pytest.mark.etcd
def test_hosts_without_a_shared_folder_get_all_that_they_read_over_http(
    start_run: Any, ctrl_c: Any, own_disks: OwnDisks, tmp_path: Path, template: Template | None
) -> None:
    """Three other hosts with a disk each, of which nobody tells them the launcher's: what they read is on their own,
    also where data and code are gone from the launcher's disk by then.
    """
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held_out.jsonl"
    data.write_text("".join(f'{{"prompt": "{row}+{row + 1}="}}\n' for row in range(2000)))
    held_out.write_text("".join(f'{{"prompt": "{row}+{row}="}}\n' for row in range(8)))
    read = {"dataset__path": data, "eval__path": held_out, "eval__interval": 3}
    run = start_run(**own_disks.settings | read)
    run.wait_for_step(3)
    folders = {name: disk / run.run_dir.relative_to(tmp_path) for name, disk in own_disks.disks.items()}

    def elsewhere(kind: str) -> list[psutil.Process]:
        return [process for process in processes_of(run) if f" {kind}/" in titled(process)]

    def assert_reads_its_own_disk(process: psutil.Process) -> None:
        environment = {  # the mark of its place names the run, by its folder
            name: value for name, value in process.environ().items() if name != SLOT_VARIABLE
        }
        reported = " ".join(environment.values()) + (Path(process.cwd()) / "config.yaml").read_text()
        assert Path(process.cwd()) in folders.values()
        assert str(run.run_dir) not in reported
        assert not [file.path for file in process.open_files() if Path(file.path).is_relative_to(run.run_dir)]

    started = [*elsewhere("generation_server"), *elsewhere("rollout_worker")]
    assert len(started) == 4
    for process in started:
        assert_reads_its_own_disk(process)
    log = run.run_dir / "logs" / "gserver_manager-0.log"

    def served(server: int) -> list[int]:
        return [int(v) for v in re.findall(rf"generation server {server} serves v(\d+) ", log.read_text())]

    await_that(lambda: min(len(served(0)), len(served(1))) >= 2, f"two versions on both: {log}")
    seen = ProcessHistory(run.run_dir / "observed")

    def came_home() -> bool:
        seen.refresh()
        lasts = {name: process.last for name, process in seen.processes.items()}
        workers = {"generation_server/0", "generation_server/1", "rollout_worker/0", "rollout_worker/1"}
        return workers <= lasts.keys() and "clock_ahead_s" in lasts.get("staging_server/1", {})

    await_that(came_home, "lines of the other hosts' processes")
    for server in range(2):  # the model of the launcher's is called otherwise
        assert "serving model on https://" in (log.parent / f"generation_server-{server}.log").read_text()
    came = re.findall(r" (v\d+|model|inputs) came to host (\d) from (host \d|its own disk)", log.read_text())
    assert len({(folder, host) for folder, host, _ in came}) == len(came)  # once for each host
    assert {(folder, host) for folder, host, source in came if source == "its own disk"} == {
        (folder, host) for folder, host, _ in came if host == "0"
    }
    assert {host for folder, host, _ in came if folder == "inputs"} == {"0", "3"}
    assert {host for folder, host, _ in came if folder != "inputs"} == {"0", "1", "2"}
    for folder in (folders["box2"], folders["box3"]):
        versions = folder / "staged"
        await_that(lambda at=versions: 1 <= len([*at.glob("*/v*")]) <= 3, f"removal of those before: {versions}")  # type: ignore[misc]
    for folder in folders.values():
        assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "observed", "secret", "staged"]
        assert (folder / "secret").stat().st_mode & 0o077 == 0

    for file in (data, held_out, tmp_path / "rewards.py"):  # there are only those that were brought from now on
        file.unlink()
    (before,) = [process for process in elsewhere("rollout_worker") if "rollout_worker/1 " in titled(process)]
    before.kill()
    run.wait_for_line("rollout_worker/1 (on box4) was killed by signal SIGKILL; it is started again")
    run.wait_for_line("rollout_worker/1 went on after")
    for process in elsewhere("rollout_worker"):
        assert_reads_its_own_disk(process)
    joining = Joined(run.run_dir, ["--kind", "rollout_worker"], template)  # on the launcher's host
    try:
        await_that(lambda: "rollout_worker/2 takes part" in joining.output, "a third worker", LIMIT_S)
    finally:
        joining.process.send_signal(signal.SIGTERM)
        joining.end()
    assert "rollout_worker/2 left" in joining.output
    gone_at = int(run.rows()[-1]["step"])
    run.wait_for_step(gone_at + 6)  # an evaluation later
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    assert run.summary()["restarts"] == {"rollout_worker/1": 1}
    assert [row for row in run.rows() if row["step"] > gone_at and "eval/held_out/reward_mean" in row]
    assert audit(run.run_dir).findings == ()
    assert_gone(run)
