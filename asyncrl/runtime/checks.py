"""Checks of the settings of processes and hosts."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.comm.name_resolve import NameBackend
from asyncrl.comm.names import ENCODER_SERVER, GSERVER_MANAGER, MASTER_WORKER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, not_a_choice
from asyncrl.runtime.hosts.manifests import name_faults
from asyncrl.runtime.planning.worker_plan import HOST_VARIABLE
from asyncrl.runtime.process.hardware import LOOPBACK, interface_of
from asyncrl.runtime.settings import (
    KUBERNETES,
    LOCAL,
    PLACEABLE,
    PLACED,
    RAY,
    HostConfig,
    SystemConfig,
    address_of,
    etcd_access,
)


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    system = config.system
    if system.name_resolve == NameBackend.etcd3:
        yield from etcd_access(system).faults()
        if importlib.util.find_spec("etcd3") is None:
            yield "system.name_resolve='etcd3': etcd3 is not installed; install the `etcd` extra, or use file"
    else:
        if given := [name for name, value in vars(system.etcd).items() if value]:
            yield (
                f"system.etcd.{given[0]}: is for system.name_resolve=etcd3, which is {system.name_resolve}; leave it "
                "out"
            )
        root = Path(system.name_resolve_root).expanduser()
        if system.name_resolve_root and (root.is_file() or not root.is_absolute()):
            yield (
                f"system.name_resolve_root={system.name_resolve_root!r}: names are files below a folder, and this is "
                f"{'a file' if root.is_file() else 'no whole path'}; give a folder, or system.name_resolve=etcd3"
            )
    if system.launcher == RAY:
        yield from _ray(system)
    if system.launcher == KUBERNETES:
        yield from _kubernetes(config)
    if not system.shared_filesystem:
        yield from _own_disks(config)
    if system.hosts or system.launcher != LOCAL:
        yield from _hosts(config)
        return
    if not system.encrypt and system.host not in LOOPBACK and not system.unencrypted_network:
        yield (
            f"system.encrypt=false: anybody on the network of system.host={system.host} could read and change the "
            f"processes' messages; leave it true, or confirm with system.unencrypted_network=true"
        )
    try:
        interface_of(system.host)
    except ValueError as error:
        yield str(error)


def _own_disks(config: ExperimentConfig) -> Iterator[str]:
    """Yield each setting that needs a folder that all hosts see, if there is none."""
    system, generation, off = config.system, config.generation, "system.shared_filesystem=false"
    if not system.hosts:
        yield f"{off}: system.hosts is empty, so that everything is on one host; leave system.shared_filesystem out"
        return
    if system.launcher == KUBERNETES:
        yield (
            f"{off}: system.launcher={KUBERNETES}: the pods share their volume claims; leave "
            "system.shared_filesystem out"
        )
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
    if generation.engine.urls:
        yield f"{off}: generation.sglang.urls: the run cannot copy weights to servers that it did not start"


_NEEDS_FOLDER = {
    MASTER_WORKER: "keeps checkpoints' states, books, ledger and metrics",
    MODEL_WORKER: "writes checkpoints and weights",
    GSERVER_MANAGER: "keeps its log, and reads what is published,",
    ENCODER_SERVER: "reads its encoder, and the settings",
}


def _finds_address(host: HostConfig, launcher: str) -> bool:
    """Return True if the host's address is known on the host only."""
    return launcher == KUBERNETES or (launcher == RAY and bool(host.name))


def _ray(system: SystemConfig) -> Iterator[str]:
    """Yield what is missing for `system.launcher=ray`."""
    if importlib.util.find_spec("ray") is None:
        yield "system.launcher='ray': Ray is not installed; pip install 'asyncrl[ray]', in the cluster's version"
    try:
        address_of(system.launcher_args)
    except ValueError as error:
        yield f"system.launcher_args={system.launcher_args}: {error}"


def _kubernetes(config: ExperimentConfig) -> Iterator[str]:
    """Yield what is missing for `system.launcher=kubernetes`."""
    settings = config.system.kubernetes
    if not settings.image:
        yield "system.kubernetes.image='': the pods need one; give an image with python and asyncrl"
    if not config.system.encrypt:
        yield "system.encrypt=false: the pods start what the run's secret asks for; leave it true with kubernetes"
    if config.system.launcher_args:
        yield f"system.launcher_args={config.system.launcher_args}: kubernetes takes none; leave it out"
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
    if config.system.launcher == KUBERNETES and HOST_VARIABLE not in os.environ:
        raise ConfigError(
            "system.launcher='kubernetes': the launcher runs in a pod; --dry-run prints what makes that, for `kubectl "
            "apply -f -`"
        )


_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F/-]+")
"""A GPU by number or by its UUID, as CUDA_VISIBLE_DEVICES takes them."""


def _gpus(setting_name: str, host: HostConfig) -> Iterator[str]:
    for gpu in dict.fromkeys(host.gpus):
        if not _GPU.fullmatch(gpu):
            yield f"{setting_name}.gpus: {gpu!r} is no GPU; give numbers as in nvidia-smi, for example ['0', '1']"
        elif (count := host.gpus.count(gpu)) > 1:
            yield f"{setting_name}.gpus: {gpu!r} is there {count} times; name each GPU once"


def _hosts(config: ExperimentConfig) -> Iterator[str]:
    """Yield what is wrong with `system.hosts`."""
    system = config.system
    if system.shared_filesystem and (given := [host.fileroot for host in system.hosts if host.fileroot]):
        yield (
            f"system.hosts: fileroot={given[0]!r} is for hosts with disks of their own; set "
            "system.shared_filesystem=false"
        )
    if not system.hosts:
        yield f"system.hosts=[]: system.launcher={system.launcher} needs to know the hosts and what runs on each"
        return
    if system.launcher == LOCAL:
        yield "system.launcher='local': starts processes on this host only; with system.hosts use another"
    for number, host in enumerate(system.hosts):
        setting_name = f"system.hosts[{number}]"
        if not host.address and not _finds_address(host, system.launcher):
            yield f"{setting_name}.address='': the other hosts need one to reach {host.name or 'this host'} at"
        for kind in host.runs:
            if kind not in PLACEABLE:
                yield not_a_choice(f"{setting_name}.runs", kind, PLACEABLE)
        yield from _gpus(setting_name, host)
        if not host.runs:
            yield f"{setting_name}.runs=[]: nothing runs on {host.name or 'this host'}; take it out, or name kinds"
    names = [host.name for host in system.hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"system.hosts: {name or 'the launcher`s own host'} is there {names.count(name)} times; join the entries"
    addresses = {host.address for host in system.hosts}
    if not system.encrypt and addresses - LOOPBACK and not system.unencrypted_network:
        yield (
            "system.encrypt=false: between hosts anybody on their network could read and change the processes' "
            "messages; leave it true, or confirm with system.unencrypted_network=true"
        )
    placed = [kind for host in system.hosts for kind in host.runs]
    if config.rollout.encoder.servers and ENCODER_SERVER not in placed:
        yield f"system.hosts: none runs {ENCODER_SERVER}, and rollout.encoder.servers is above 0; add it to one's runs"
    for kind in PLACED:
        if kind not in placed:
            yield f"system.hosts: none runs {kind}; add it to the runs of one"
        elif kind in (MASTER_WORKER, GSERVER_MANAGER) and placed.count(kind) > 1:
            yield f"system.hosts: {placed.count(kind)} hosts run {kind}, of which there is one; leave it to one host"
