"""Settings of the processes and of how they find each other, and their checks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.comm.name_resolve import EtcdAccess, NameBackend
from asyncrl.comm.names import GENERATION_SERVER, GSERVER_MANAGER, MASTER_WORKER, MODEL_WORKER, ROLLOUT_WORKER
from asyncrl.config.setting import ConfigError, modules_in, not_a_choice, setting
from asyncrl.runtime.hardware import LOOPBACK, interface_of
from asyncrl.runtime.pod_names import name_faults
from asyncrl.runtime.ray_requests import address_of
from asyncrl.runtime.worker_plan import HOST_VARIABLE

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.

_LAUNCHERS = Path(__file__).parent / "launchers"
_LOCAL, _RAY, _KUBERNETES = "local", "ray", "kubernetes"
PLACED = (MASTER_WORKER, MODEL_WORKER, GSERVER_MANAGER, GENERATION_SERVER, ROLLOUT_WORKER)
"""Kinds of processes that a host of several may run."""
_STAGED = frozenset({GENERATION_SERVER, ROLLOUT_WORKER})
"""Those that may be on hosts that share no folder."""


class Resume(StrEnum):
    """What becomes of a trial that was used before."""

    auto = "auto"
    """It is continued."""
    never = "never"
    """It is refused."""
    restart = "restart"
    """It is wiped."""


@dataclass
class HostConfig:
    """One host of a run on several."""

    name: str = setting(
        "",
        "as system.launcher reaches it: what is given to ssh, the Slurm node, or for ray and kubernetes any name; "
        "empty: the launcher's own host",
    )
    address: str = setting(
        "",
        "its IPv4 address, or a name of it, on which the other hosts reach it; ray: of the node that it must be, empty "
        "for any that has its cpus and gpus free; kubernetes: leave it empty",
    )
    runs: list[str] = setting(help=f"kinds of processes that run there, of {', '.join(PLACED)}", factory=list)
    gpus: list[str] = setting(help="its GPUs, by CUDA's names for them, e.g. ['0', '1']", factory=list)
    cpus: int = setting(0, "ray, kubernetes: cores to reserve; 0: a thread's worth for each that runs there", minimum=0)
    memory: str = setting("", "kubernetes: memory of its pod, which it is ended beyond, e.g. 64Gi; empty: no limit")
    fileroot: str = setting(
        "", "system.shared=false: the folder on its own disk for runs, a whole path; empty: the launcher's fileroot"
    )
    python: str = setting("", "the interpreter there, with asyncrl installed; empty: the same path as the launcher's")


@dataclass
class KubernetesConfig:
    """Pods of a run over several hosts (system.launcher=kubernetes)."""

    image: str = setting("", "their image, with python, asyncrl and, for the launcher's own, kubectl")
    namespace: str = setting("default", "where they and what they need are")
    claims: dict[str, str] = setting(
        help="persistent volume claims and where they are mounted in every pod, e.g. {shared: /data}; fileroot, the "
        "model and the data lie there",
        factory=dict,
    )
    secrets: list[str] = setting(
        help="Secrets whose entries are environment variables of every process, e.g. API keys and HF_TOKEN",
        factory=list,
    )
    folder: str = setting("", "the working directory there, from which your code is imported; empty: the image's")


@dataclass
class EtcdConfig:
    """Who the run is to etcd, and how the connection is encrypted. Secrets are files, the same path on every host."""

    user: str = setting("", "as whom to log in; its role needs readwrite of the prefix /asyncrl/; empty: nobody")
    password_file: str = setting("", "file with the user's password, which nobody else may read")
    ca_file: str = setting("", "PEM file of the authority that signed the servers' certificates; empty: no TLS")
    certificate_file: str = setting("", "PEM file of the run's own certificate, where the servers ask for one")
    key_file: str = setting("", "PEM file of that certificate's key, which nobody else may read")


@dataclass
class SystemConfig:
    """Processes and how they find each other."""

    launcher: str = setting("local", "how processes are started", choices=modules_in(_LAUNCHERS))
    hosts: list[HostConfig] = setting(
        help="all launchers but local: the hosts, each with name, address, runs, gpus, cpus and python; all of them "
        "see the run folder, the model and the data under the same paths, unless system.shared=false; docs/hosts.md",
        factory=list,
    )
    shared: bool = setting(
        True,
        "the hosts see one folder; false: each has a disk of its own. Generation servers and RolloutWorkers alone are "
        "on other hosts than the launcher's then, names are in etcd, and model, versions, data and your files of code "
        "reach each host once, over HTTP, from those that have them",
    )
    launcher_args: list[str] = setting(
        help="further arguments of ssh, srun or kubectl, e.g. ['-F', 'my_ssh_config'] or ['--account=mine']; ray: "
        "['--address=HOST:PORT'], auto or local",
        factory=list,
    )
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    name_resolve: NameBackend = setting(NameBackend.file, "name resolution back end")
    name_resolve_root: str = setting(
        "",
        "file: a folder, which trials may share (empty: a private one); etcd3: host:port, of a cluster all members' "
        "separated by spaces",
    )
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    name_resolve_patience_s: float = setting(
        60.0,
        "name resolution may be away for so long (etcd elects a leader, a file handle is stale, the disk is full): "
        "what fails is tried again, then the process ends",
        unit="s",
        minimum=0.0,
    )
    encrypt: bool = setting(True, "CURVE on every ZMQ socket; TLS and a bearer token on every HTTP request")
    unencrypted_network: bool = setting(
        False, "asks a second time for encrypt=false where processes listen on a network: everybody on it is trusted"
    )
    host: str = setting("127.0.0.1", "address the processes bind to and are reached at")
    start_timeout_s: float = setting(
        120.0,
        "processes that start may make no progress (use no CPU time, read nothing) for so long; with progress they may "
        "take 15 times as long, and 5 times as long to show themselves at all; a process that ends is noticed at once",
        unit="s",
        minimum=1.0,
    )
    heartbeat_s: float = setting(
        10.0, "lease of a worker's entry; it is renewed three times per lease", unit="s", minimum=0.5
    )
    stall_timeout_s: float = setting(
        120.0,
        "no train step for so long, once a generation server and a RolloutWorker have started: say which stage waits "
        "for what, and stop",
        unit="s",
        minimum=5.0,
    )
    stop_patience_s: float = setting(
        30.0,
        "how long a training rank that does not answer is waited for once a stop is asked for (Ctrl-C): without it no "
        "checkpoint can be written, and the run ends with exit code 1",
        unit="s",
        minimum=1.0,
    )
    restarts_per_process: int = setting(
        6,  # a prompt that kills its worker is found with three deaths (`manager/suspects.py`): room for two of them
        "how often each process that died is started again, within restart_window_s: alone, or with all of the "
        "trainer's side; with one more death the whole run goes back to its newest checkpoint, once, then it ends; 0: "
        "it ends at once",
        minimum=0,
    )
    restart_window_s: float = setting(600.0, "after so long a restart is forgotten", unit="s", minimum=1.0)


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    system = config.system
    if system.name_resolve == NameBackend.etcd3:
        yield from etcd_access(system).faults()
        if importlib.util.find_spec("etcd3") is None:
            yield "system.name_resolve='etcd3': etcd3 is not installed; install the `etcd` extra, or use file"
    elif given := [name for name, value in vars(system.etcd).items() if value]:
        yield f"system.etcd.{given[0]}: is for system.name_resolve=etcd3, which is {system.name_resolve}; leave it out"
    if system.launcher == _RAY:
        yield from _ray(system)
    if system.launcher == _KUBERNETES:
        yield from _kubernetes(config)
    if not system.shared:
        yield from _own_disks(config)
    if system.hosts or system.launcher != _LOCAL:
        yield from _hosts(config)
        return
    if not system.encrypt and system.host not in LOOPBACK and not system.unencrypted_network:
        yield (
            f"system.encrypt=false: anybody on the network of system.host={system.host} could read and change what the "
            "processes tell each other; leave it true, or ask twice with system.unencrypted_network=true"
        )
    try:
        interface_of(system.host)
    except ValueError as error:
        yield str(error)


def staging_hosts(config: ExperimentConfig) -> list[HostConfig]:
    """The hosts with a staging server, the launcher's own first: none where all see one folder."""
    hosts = [] if config.system.shared else config.system.hosts
    return sorted((host for host in hosts if not host.name or not _STAGED.isdisjoint(host.runs)), key=lambda h: h.name)


def brings_inputs(config: ExperimentConfig) -> bool:
    """Whether RolloutWorkers read from what staging servers bring: some run on hosts that share no folder."""
    return any(host.name and ROLLOUT_WORKER in host.runs for host in staging_hosts(config))


def _own_disks(config: ExperimentConfig) -> Iterator[str]:
    """What goes through a folder that all hosts see, and has no other way where there is none."""
    system, generation, off = config.system, config.generation, "system.shared=false"
    if not system.hosts:
        yield f"{off}: system.hosts is empty, so that everything is on one host; leave system.shared out"
        return
    if system.launcher == _KUBERNETES:
        yield f"{off}: system.launcher={_KUBERNETES}: the pods share their volume claims; leave system.shared out"
    if system.name_resolve != NameBackend.etcd3:
        yield (
            f"{off}: system.name_resolve={str(system.name_resolve)!r}: names are entries of a folder then, which the "
            "other hosts do not see; use etcd3"
        )
    if all(host.name for host in system.hosts):
        yield f"{off}: system.hosts has no entry without a name: the launcher's own host, where the run's folder is"
    for number, host in enumerate(system.hosts):
        for kind in host.runs if host.name else ():
            if kind in _NEEDS_FOLDER:
                yield (
                    f"{off}: system.hosts[{number}].runs: {kind} {_NEEDS_FOLDER[kind]} in the run's folder, on the "
                    "launcher's host; move it to the entry without a name"
                )
        if host.fileroot and not host.name:
            yield f"system.hosts[{number}].fileroot={host.fileroot!r}: is fileroot on the launcher's host; set that"
        elif host.fileroot and not Path(host.fileroot).is_absolute():
            yield f"system.hosts[{number}].fileroot={host.fileroot!r}: is on another host; give a whole path"
    addresses = [host.address for host in system.hosts if host.address]
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        yield f"{off}: system.hosts has {address!r} {addresses.count(address)} times; each host has its own"
    if config.manager.weight_transport != "disk":
        yield (
            f"{off}: manager.weight_transport={config.manager.weight_transport!r} reaches servers of the trainer's "
            "host alone; use disk, which brings each version to the disk of every host"
        )
    if generation.sglang.urls:
        yield f"{off}: generation.sglang.urls: nothing brings weights to disks of servers that somebody else started"


_NEEDS_FOLDER = {
    MASTER_WORKER: "keeps checkpoints' states, books, ledger and metrics",
    MODEL_WORKER: "writes checkpoints and weights",
    GSERVER_MANAGER: "keeps its log, and reads what is published,",
}


def _finds_address(host: HostConfig, launcher: str) -> bool:
    """Whether the host's address is known on the host only."""
    return launcher == _KUBERNETES or (launcher == _RAY and bool(host.name))


def _ray(system: SystemConfig) -> Iterator[str]:
    """What is missing for `system.launcher=ray`."""
    if importlib.util.find_spec("ray") is None:
        yield "system.launcher='ray': Ray is not installed; pip install 'asyncrl[ray]', in the cluster's version"
    try:
        address_of(system.launcher_args)
    except ValueError as error:
        yield f"system.launcher_args={system.launcher_args}: {error}"


def _kubernetes(config: ExperimentConfig) -> Iterator[str]:
    """What is missing for `system.launcher=kubernetes`."""
    settings = config.system.kubernetes
    if not settings.image:
        yield "system.kubernetes.image='': the pods need one; give an image with python, asyncrl and kubectl"
    if not any(Path(config.fileroot).is_relative_to(path) for path in settings.claims.values()):
        yield (
            f"fileroot={config.fileroot!r}: the pods share what a persistent volume claim holds, and none of "
            f"system.kubernetes.claims={dict(settings.claims)} is mounted there; give {{CLAIM: FOLDER}}"
        )
    if config.system.hosts and all(host.name for host in config.system.hosts):
        yield "system.hosts: with kubernetes the launcher needs a pod of its own; add a host without a name"
    for host in config.system.hosts:
        if host.address:
            yield f"system.hosts: {host.address!r}: a pod's address is the cluster's to choose; leave address out"
    yield from name_faults(config)


def check_place(config: ExperimentConfig) -> None:
    """Refuse to start processes where the launcher cannot.

    Raises:
        ConfigError: it has to run in a pod.
    """
    if config.system.launcher == _KUBERNETES and HOST_VARIABLE not in os.environ:
        raise ConfigError(
            "system.launcher='kubernetes': the launcher runs in a pod; --dry-run prints what makes that, for `kubectl "
            "apply -f -`"
        )


def etcd_access(system: SystemConfig) -> EtcdAccess:
    """How etcd is reached."""
    files = {name: str(value) for name, value in vars(system.etcd).items()}
    return EtcdAccess.at(system.name_resolve_root, **files)


def _hosts(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with `system.hosts`."""
    system = config.system
    if system.shared and (given := [host.fileroot for host in system.hosts if host.fileroot]):
        yield f"system.hosts: fileroot={given[0]!r} is for hosts with disks of their own; set system.shared=false"
    if not system.hosts:
        yield f"system.hosts=[]: system.launcher={system.launcher} needs to know the hosts and what runs on each"
        return
    if system.launcher == _LOCAL:
        yield "system.launcher='local': starts processes on this host only; with system.hosts use another"
    for number, host in enumerate(system.hosts):
        setting_name = f"system.hosts[{number}]"
        if not host.address and not _finds_address(host, system.launcher):
            yield f"{setting_name}.address='': the other hosts need one to reach {host.name or 'this host'} at"
        for kind in host.runs:
            if kind not in PLACED:
                yield not_a_choice(f"{setting_name}.runs", kind, PLACED)
        if not host.runs:
            yield f"{setting_name}.runs=[]: nothing runs on {host.name or 'this host'}; take it out, or name kinds"
    names = [host.name for host in system.hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"system.hosts: {name or 'the launcher`s own host'} is there {names.count(name)} times; join the entries"
    addresses = {host.address for host in system.hosts}
    if not system.encrypt and addresses - LOOPBACK and not system.unencrypted_network:
        yield (
            "system.encrypt=false: between hosts anybody on their network could read and change what the processes "
            "tell each other; leave it true, or ask twice with system.unencrypted_network=true"
        )
    placed = [kind for host in system.hosts for kind in host.runs]
    for kind in PLACED:
        if kind not in placed:
            yield f"system.hosts: none runs {kind}; add it to the runs of one"
        elif kind in (MASTER_WORKER, GSERVER_MANAGER) and placed.count(kind) > 1:
            yield f"system.hosts: {placed.count(kind)} hosts run {kind}, of which there is one; leave it to one host"
