"""The same command over several hosts: by ssh and by Slurm, stopped, continued, killed; nothing is left on any."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.commands.audit import audit
from asyncrl.observe.history.processes import ProcessHistory
from asyncrl.runtime.keeper import PLACE_VARIABLE
from asyncrl.runtime.memory_checkpoint import MemoryCheckpoint

from ..conftest import LIMIT_S
from ..etcd_cluster import EtcdCluster, needs_etcd
from ..ports import free_ports
from .clusters import await_that, pods, ray_cluster, slurm, ssh_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HOSTS = (
    "system.hosts=[{address: 127.0.0.1, runs: [master_worker, model_worker, gserver_manager]},"
    "{name: %s, address: 127.0.0.2, runs: [generation_server]},"
    "{name: %s, address: 127.0.0.3, runs: [rollout_worker]}]"
)
"""An address each, as hosts have; the launcher's own has no name."""
TRIAL = "hosts"
"""By this name processes are known, whoever started them; runs of other tests may go on beside these."""
TRAINING_HOSTS = (
    "[{address: 127.0.0.1, runs: [master_worker, gserver_manager, generation_server]},"
    "{name: %s, address: 127.0.0.2, runs: [model_worker]},"
    "{name: %s, address: 127.0.0.3, runs: [model_worker, rollout_worker]}]"
)


def over(launcher: str, first: str, second: str, *arguments: str) -> dict[str, Any]:
    """Settings of a run over three hosts."""
    setting, _, hosts = (HOSTS % (first, second)).partition("=")
    settings = {"trial_name": TRIAL, "system__launcher": launcher, setting.replace(".", "__"): hosts}
    return settings | ({"system__launcher_args": str(list(arguments))} if arguments else {})


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh") / "box", ["box2", "box3", "box4"]) as config:
        yield over("ssh", "box2", "box3", "-F", str(config))


def test_a_run_over_ssh_is_stopped_and_continued(start_run: Any, ctrl_c: Any, ssh: dict[str, Any]) -> None:
    first = start_run(total_train_steps=100_000, **ssh)
    first.wait_for_step(3)
    ctrl_c(first)
    assert first.wait() == 130, first.output + first.logs()
    assert_gone(first)

    goal = int(first.rows()[-1]["step"]) + 3  # it had trained some more before it was stopped
    second = start_run(total_train_steps=goal, **ssh)
    assert second.wait() == 0, second.output + second.logs()
    assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
    assert audit(second.run_dir).findings == ()
    assert_gone(second)


def test_a_server_that_dies_on_another_host_is_started_again_and_nothing_there_outlives_a_killed_launcher(
    start_run: Any, ssh: dict[str, Any]
) -> None:
    run = start_run(total_train_steps=100_000, **ssh)
    run.wait_for_step(2)
    (server,) = [process for process in workers_of(run) if "generation_server" in titled(process)]
    server.kill()
    run.wait_for_line("generation_server/0 (on box2) was killed by signal SIGKILL; it is started again")
    run.wait_for_line("generation_server/0 went on after")
    workers = workers_of(run)
    assert len(workers) == 5
    run.process.kill()
    await_that(lambda: not workers_of(run), f"the end of {workers}")


def test_with_ranks_on_two_hosts_a_death_costs_the_step_in_hand_and_a_lost_host_those_since_the_checkpoint(
    start_run: Any, ctrl_c: Any, ssh: dict[str, Any]
) -> None:
    """First a rank's, then that of a host with its memory: the run goes back to its newest checkpoint."""
    hosts = {"system__hosts": TRAINING_HOSTS % ("box2", "box3")}
    settings = {"trainer__parallel": "d2", "checkpoint__interval": 3, "eval__interval": 0, "seed": 1}
    run = start_run(total_train_steps=100_000, **ssh | hosts | settings)
    run.wait_for_step(4)
    kill(run, "model_worker/1")
    run.wait_for_line("the trainer went on after")
    log = (run.run_dir / "logs" / "master_worker-0.log").read_text()
    kept = int(log.rpartition("going on after step ")[2].partition(",")[0])
    assert kept >= 4
    run.wait_for_step(kept + 2)
    kill(run, "model_worker/1", "rollout_worker/0", memory=MemoryCheckpoint(run.run_dir, "127.0.0.3").folder)
    run.wait_for_line("the whole run is started again")
    run.wait_for_step(kept + 8)  # some checkpoint's interval further
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == list(range(1, len(run.rows()) + 1))
    assert "is not whole any more: all of it on 127.0.0.3" in run.logs()
    assert audit(run.run_dir).findings == ()
    assert_gone(run)
    assert not [host for host in ("127.0.0.2", "127.0.0.3") if MemoryCheckpoint(run.run_dir, host).folder.exists()]


def kill(run: Any, *names: str, memory: Path | None = None) -> None:
    """End processes of a host at once, and with them its memory."""
    killed = [process for process in workers_of(run) if any(f" {name} " in titled(process) for name in names)]
    for process in killed:
        process.suspend()
    if memory is not None:
        shutil.rmtree(memory)  # where nobody writes, neither these nor those that follow them
    for process in killed:
        process.kill()


def test_a_host_that_is_not_there_is_named_before_the_trial_begins(start_run: Any, ssh: dict[str, Any]) -> None:
    nowhere = over("ssh", "nowhere.invalid", "box3", *ast.literal_eval(ssh["system__launcher_args"]))
    run = start_run(**nowhere)
    assert run.wait() == 2
    assert "error: system.hosts[1].name='nowhere.invalid': ssh knows no host of this name" in run.output
    assert not run.run_dir.exists()


def test_a_run_on_slurm_is_stopped_and_continued_in_an_allocation(
    start_run: Any, ctrl_c: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm(tmp_path / "slurm", nodes=2) as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        first = start_run("async_ppo", total_train_steps=100_000, **over("slurm", "n1", "n2"))
        first.wait_for_step(3)
        ctrl_c(first)
        assert first.wait() == 130, first.output + first.logs()
        allocate = ["salloc", "--no-shell", "--nodes=2", "--cpus-per-task=4"]
        told = subprocess.run(allocate, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S)
        monkeypatch.setenv("SLURM_JOB_ID", re.findall(r"Granted job allocation (\d+)", told.stderr)[0])
        goal = int(first.rows()[-1]["step"]) + 3
        second = start_run(total_train_steps=goal, **over("slurm", "n1", "n2"))
        assert second.wait() == 0, second.output + second.logs()
        assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
        assert audit(second.run_dir).findings == ()
        assert_gone(second)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two nodes beside the launcher's own: one asked for by its address, one that Ray chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with ray_cluster(nodes=2) as address:
            settings = over("ray", "box2", "box3", f"--address={address}")
            hosts = (
                settings["system__hosts"].replace("address: 127.0.0.3", "cpus: 1").replace("box2,", "box2, cpus: 1,")
            )
            assert hosts.count("cpus: 1") == 2
            yield settings | {"system__hosts": hosts, "system__start_timeout_s": 300}


def test_a_run_on_ray_is_stopped_and_continued(start_run: Any, ctrl_c: Any, ray: dict[str, Any]) -> None:
    first = start_run(total_train_steps=100_000, **ray)
    first.wait_for_step(3)
    (rollouts,) = [process for process in workers_of(first) if "rollout_worker/0" in titled(process)]
    assert rollouts.environ()["ASYNCRL_HOST"] == "127.0.0.3"  # no two hosts on one node
    ctrl_c(first)
    assert first.wait() == 130, first.output + first.logs()
    assert_gone(first)

    goal = int(first.rows()[-1]["step"]) + 3
    second = start_run(total_train_steps=goal, **ray)
    assert second.wait() == 0, second.output + second.logs()
    assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
    assert audit(second.run_dir).findings == ()
    assert_gone(second)
    await_that(lambda: not ray_actors(), f"the end of {ray_actors()}")


def test_on_ray_a_dead_server_and_a_dead_actor_are_replaced_and_a_killed_launcher_leaves_nothing(
    start_run: Any, ray: dict[str, Any]
) -> None:
    run = start_run(total_train_steps=100_000, **ray)
    run.wait_for_step(2)
    (server,) = [process for process in workers_of(run) if "generation_server" in " ".join(process.cmdline())]
    server.kill()
    run.wait_for_line("generation_server/0 (on box2) was killed by signal SIGKILL; it is started again")
    run.wait_for_line("generation_server/0 went on after")

    (actor,) = [process for process in ray_actors() if "127.0.0.3" in titled(parent(process))]  # that node's raylet
    (before,) = [process for process in workers_of(run) if "rollout_worker/0" in titled(process)]
    actor.kill()
    run.wait_for_line("rollout_worker/0 (on box3) was lost with the connection to its host; it is started again")
    run.wait_for_line("rollout_worker/0 went on after")
    await_that(lambda: not before.is_running(), "the end of what the dead actor had started")

    assert len(workers_of(run)) == 5
    run.process.kill()
    await_that(lambda: not workers_of(run), f"the end of {workers_of(run)}")
    await_that(lambda: not ray_actors(), f"the end of {ray_actors()}")


def test_where_no_ray_answers_the_run_says_so(start_run: Any, ray: dict[str, Any]) -> None:
    (port,) = free_ports(1)
    run = start_run(**ray | {"system__launcher_args": f"['--address=127.0.0.1:{port}']"})
    assert run.wait() == 1
    assert f"no cluster at address '127.0.0.1:{port}'" in run.output
    assert_gone(run)


def test_a_run_over_pods_is_stopped_and_continued_and_survives_a_pod_that_is_started_again(
    start_run: Any, ctrl_c: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods are local processes: this test does not show how a real cluster behaves."""
    monkeypatch.setenv("ASYNCRL_HOST", "127.0.0.1")  # as in the launcher's pod
    monkeypatch.setenv("MY_API_KEY", "a secret of the launcher")
    hosts = over("kubernetes", "box2", "box3")
    hosts["system__hosts"] = re.sub(r", address: [\d.]+|address: [\d.]+, ", "", hosts["system__hosts"])
    hosts |= {"system__kubernetes__image": "asyncrl", "system__kubernetes__namespace": "training"}
    hosts["system__kubernetes__claims"] = f"{{shared: '{tmp_path}'}}"
    first = start_run(total_train_steps=100_000, **hosts)
    with pods(first.run_dir, {"box3": "127.0.0.3"}):
        with pods(first.run_dir, {"box2": "127.0.0.2"}) as there:
            first.wait_for_step(2)
            (server,) = [process for process in workers_of(first) if "generation_server" in titled(process)]
            assert server.environ()["ASYNCRL_HOST"] == "127.0.0.2"
            assert server.environ()["MY_API_KEY"] == "a secret of the launcher"
            there["box2"].kill()
        with pods(first.run_dir, {"box2": "127.0.0.2"}):
            first.wait_for_line("generation_server/0 (on box2) was lost with the connection to its host")
            first.wait_for_line("generation_server/0 went on after")
            ctrl_c(first)
            assert first.wait() == 130, first.output + first.logs()
            assert_gone(first)

            goal = int(first.rows()[-1]["step"]) + 3
            second = start_run(total_train_steps=goal, **hosts)
            assert second.wait() == 0, second.output + second.logs()
    assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
    assert audit(second.run_dir).findings == ()
    assert_gone(second)


def ray_actors() -> list[psutil.Process]:
    """The actors of runs that are left on this machine."""
    return [process for process in psutil.process_iter() if titled(process).startswith("ray::HostActor")]


def parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None


def titled(process: psutil.Process | None) -> str:
    """Its command line; nothing where it has ended."""
    try:
        return "" if process is None else " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def workers_of(run: Any) -> list[psutil.Process]:
    """All processes of this run that are left on this machine, whoever started them."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if line.startswith("asyncrl ") and f"[{run.run_dir.parent.name}/{TRIAL}]" in line:
                found += [process] if process.cwd() == os.getcwd() else []
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_gone(run: Any) -> None:
    await_that(lambda: not workers_of(run), f"the end of {workers_of(run)}")


@dataclass
class OwnDisks:
    """Settings of a run whose hosts have a disk each: box2 and box3 serve, box4 plays; and the disks."""

    settings: dict[str, Any]
    disks: dict[str, Path]


@pytest.fixture
def own_disks(ssh: dict[str, Any], tmp_path: Path) -> Iterator[OwnDisks]:
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
        "system__shared_filesystem": False,
        "system__hosts": hosts % tuple(disks.values()),
        "system__name_resolve": "etcd3",
        "system__name_resolve_root": etcd.address,
    }
    yield OwnDisks(ssh | settings, disks)
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
    run = start_run(**own_disks.settings | {"reward__path": "my_digits:even_digits"})
    assert run.wait() == 1
    differs = f"1 module(s) of this host (127.0.0.4) are not those of the launcher's: my_digits differs from {tmp_path}"
    assert differs in run.output
    await_that(lambda: not processes_of(run), f"the end of {processes_of(run)}")


@pytest.mark.etcd
def test_hosts_without_a_shared_folder_get_all_that_they_read_over_http(
    start_run: Any, ctrl_c: Any, own_disks: OwnDisks, tmp_path: Path
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
            name: value for name, value in process.environ().items() if name != PLACE_VARIABLE
        }
        told = " ".join(environment.values()) + (Path(process.cwd()) / "config.yaml").read_text()
        assert Path(process.cwd()) in folders.values()
        assert str(run.run_dir) not in told
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
    joined = tmp_path / "joined.txt"
    with joined.open("w") as output:  # on the launcher's host
        command = [sys.executable, "-m", "asyncrl.launch", "join", str(run.run_dir), "--kind", "rollout_worker"]
        joining = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        await_that(lambda: "rollout_worker/2 takes part" in joined.read_text(), f"a third worker: {joined}", LIMIT_S)
    finally:
        joining.terminate()
        joining.wait(LIMIT_S)
    assert "rollout_worker/2 left" in joined.read_text()
    gone_at = int(run.rows()[-1]["step"])
    run.wait_for_step(gone_at + 6)  # an evaluation later
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    assert run.summary()["restarts"] == {"rollout_worker/1": 1}
    assert [row for row in run.rows() if row["step"] > gone_at and "eval/held_out/reward_mean" in row]
    assert audit(run.run_dir).findings == ()
    await_that(lambda: not processes_of(run), f"the end of {processes_of(run)}")


def processes_of(run: Any) -> list[psutil.Process]:
    """All processes of this run on this machine, wherever their folders are."""
    trial, folders = f"[{run.run_dir.parent.name}/{run.run_dir.name}]", (os.getcwd(), str(run.run_dir.parents[1]))
    found = []
    for process in psutil.process_iter():
        try:
            if titled(process).startswith("asyncrl ") and trial in titled(process):
                found += [process] if process.cwd().startswith(folders) else []
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
