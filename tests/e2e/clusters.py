"""Real ssh servers, Slurm and Ray on this machine, for tests: in folders of their own, ended by their process ids."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ..conftest import LIMIT_S
from ..ports import free_ports


def need(*programs: str) -> list[str]:
    """Paths of system programs; the test is skipped where one is missing."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    found = [shutil.which(program, path=path) for program in programs]
    if missing := [program for program, place in zip(programs, found, strict=True) if place is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    return [place for place in found if place is not None]


@contextmanager
def ssh_hosts(
    folder: Path, names: Sequence[str], address: str = "127.0.0.1", inside: Sequence[str] = ()
) -> Iterator[Path]:
    """One ssh server that goes by several names; gives the configuration file for `ssh -F`. Its host is this one, or
    that of `address`, on which a command line runs that begins with `inside`.
    """
    sshd, keygen = need("sshd", "ssh-keygen")
    (port,) = free_ports(1)
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    if os.getuid() == 0:  # sshd gives up its rights there
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nMaxStartups 100:30:200\nMaxSessions 100\n"
    )
    public = (folder / "host.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[{address}]:{port} {' '.join(public)}\n")
    (folder / "config").write_text(
        f"Host {' '.join(names)}\n  HostName {address}\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        "  StrictHostKeyChecking yes\n  LogLevel ERROR\n"
    )
    server = subprocess.Popen([*inside, sshd, "-D", "-f", folder / "sshd_config", "-E", folder / "log"])
    try:
        await_that(lambda: (folder / "pid").exists(), f"sshd: {folder}/log")
        yield folder / "config"
    finally:
        server.terminate()
        server.wait(LIMIT_S)


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[dict[str, str]]:
    """A Slurm whose nodes n1, n2, ... are this machine; gives the environment for its commands."""
    munged, slurmctld, slurmd, sinfo = need("munged", "slurmctld", "slurmd", "sinfo")
    for name in ("munge", "state", "run"):
        (folder / name).mkdir(parents=True)
    for place in (folder, *(parent for parent in folder.parents if parent.owner() == getpass.getuser())):
        if place == Path("/"):
            break
        place.chmod(stat.S_IMODE(place.stat().st_mode) | 0o755)  # the daemons of the job must reach the socket
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    ports = free_ports(nodes + 1)
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser={getpass.getuser()}\n"
        f"SlurmdUser={getpass.getuser()}\nAuthType=auth/munge\nCredType=cred/munge\n"
        f"AuthInfo=socket={folder}/munge/socket,cred_expire=5\nSlurmctldPort={ports[0]}\n"
        f"SlurmctldPidFile={folder}/run/ctld.pid\nSlurmdPidFile={folder}/run/%n.pid\n"
        f"SlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/%n.log\nStateSaveLocation={folder}/state\n"
        f"SlurmdSpoolDir={folder}/spool-%n\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        "JobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
        "SchedulerType=sched/backfill\nSlurmdParameters=config_overrides\nMpiDefault=none\nMailProg=/bin/true\n"
        "AccountingStorageType=accounting_storage/none\nReturnToService=2\nSwitchType=switch/none\nKillWait=30\n"
        f"NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[-1]}] CPUs=8 "
        "RealMemory=2000\nPartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )
    environment = os.environ | {"SLURM_CONF": str(conf)}
    names = [f"n{number}" for number in range(1, nodes + 1)]
    started = []
    try:
        where = [f"--{what}={folder}/munge/{name}" for what, name in (("key-file", "key"), ("socket", "socket"))]
        where += [f"--{what}={folder}/munge/{name}" for what, name in (("pid-file", "pid"), ("log-file", "log"))]
        where += [f"--seed-file={folder}/munge/seed", "--force", "--num-threads=2", "--foreground"]
        started.append(subprocess.Popen([munged, *where], stderr=subprocess.DEVNULL))
        await_that(lambda: (folder / "munge" / "socket").exists(), f"munged: {folder}/munge/log")
        started.append(subprocess.Popen([slurmctld, "-D", "-c"], env=environment, stderr=subprocess.DEVNULL))
        for name in names:
            (folder / f"spool-{name}").mkdir()
            started.append(subprocess.Popen([slurmd, "-D", "-N", name], env=environment, stderr=subprocess.DEVNULL))

        def all_idle() -> bool:
            asked = [sinfo, "-h", "-N", "-t", "idle", "-o", "%N"]
            reported = subprocess.run(
                asked, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
            return sorted(reported.stdout.split()) == names

        await_that(all_idle, f"slurm: {folder}/*.log")
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(LIMIT_S)


@contextmanager
def pods(run_dir: Path, hosts: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A local process for each pod of a run, by host, which runs the pod's own command with the pod's address."""
    started = {}
    try:
        for host, address in hosts.items():
            command = [sys.executable, "-m", "asyncrl.hosts.agent", str(run_dir), host]
            environment = os.environ | {"ASYNCRL_HOST": address}
            environment.pop("MY_API_KEY", None)
            started[host] = subprocess.Popen(command, env=environment, start_new_session=True)
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(LIMIT_S)


RAY_NODES = r"""
import os, sys, time
os.environ["RAY_TMPDIR"] = sys.argv[1]
os.mkdir(os.path.join(sys.argv[1], "ray"))  # it notes its address there, and does not make it
os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # else it kills actors where others have filled the memory
from ray._private import services
from ray.cluster_utils import Cluster

ask_once = services.get_node

def get_node(*node):
    "Ray waits 30 s for a node to register; on a busy machine that takes longer."
    deadline = time.monotonic() + float(sys.argv[3])
    while True:
        try:
            return ask_once(*node)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)

services.get_node = get_node
node = {"num_cpus": 1, "object_store_memory": 80 << 20}  # Ray starts a process a core at once
head = node | {"num_cpus": 0, "include_dashboard": False, "temp_dir": sys.argv[1]}
head |= {"include_log_monitor": False, "no_monitor": True}  # nobody reads logs through Ray or asks for more nodes
cluster = Cluster(initialize_head=True, head_node_args=head)
for number in range(2, 2 + int(sys.argv[2])):
    cluster.add_node(**node, node_ip_address=f"127.0.0.{number}")
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def ray_cluster(nodes: int) -> Iterator[str]:
    """A Ray of a head and so many other nodes, at 127.0.0.2, 127.0.0.3, ...; gives its address."""
    pytest.importorskip("ray", reason="no Ray: pip install 'asyncrl[ray]'")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets must be short
    with (Path(folder) / "log").open("wb") as log:
        command = [sys.executable, "-c", RAY_NODES, folder, str(nodes), str(LIMIT_S)]
        cluster = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    started = [psutil.Process(cluster.pid)]
    try:
        lines = iter(cluster.stdout.readline, "")
        address = next((line.strip() for line in lines if re.fullmatch(r"[\d.]+:\d+\n", line)), None)
        assert address is not None, (Path(folder) / "log").read_text()
        started += started[0].children(recursive=True)
        yield address
    finally:
        cluster.stdin.close()
        _, left = psutil.wait_procs(started, timeout=LIMIT_S)
        for process in left:
            process.kill()
        cluster.wait(LIMIT_S)
        cluster.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def await_that(so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `so`, within a limit."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while not so():
        assert time.monotonic() < deadline, f"did not come up: {what}"
        pause.wait(0.05)
