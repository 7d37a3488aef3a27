"""Checks of the settings of a run over several hosts; `asyncrl.runtime.checks` calls them for such a run alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.comm.name_resolve import NameBackend
from asyncrl.comm.names import ENCODER_SERVER, GSERVER_MANAGER, MASTER_WORKER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import not_a_choice
from asyncrl.runtime.backends import LauncherBackend
from asyncrl.runtime.process.hardware import LOOPBACK
from asyncrl.runtime.settings import LOCAL, PLACEABLE, PLACED, HostConfig

_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F/-]+")
"""A GPU by number or by its UUID, as CUDA_VISIBLE_DEVICES takes them."""
_NEEDS_FOLDER = {
    MASTER_WORKER: "keeps checkpoints' states, rollout counts, ledger and metrics",
    MODEL_WORKER: "writes checkpoints and weights",
    GSERVER_MANAGER: "keeps its log, and reads what is published,",
    ENCODER_SERVER: "reads its encoder, and the settings",
}
"""What these kinds of processes do in the run's folder."""


def faults(config: ExperimentConfig, backend: type[LauncherBackend]) -> Iterator[str]:
    """Yield an error message for each setting with which `backend` cannot start a run on `system.hosts`."""
    system = config.system
    if not system.shared_filesystem and system.hosts:
        yield from _own_disks(config)
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
        if not host.address and not backend.finds_address(host):
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


def _own_disks(config: ExperimentConfig) -> Iterator[str]:
    """Yield each setting that needs a folder that all hosts see where they see none."""
    system, generation, off = config.system, config.generation, "system.shared_filesystem=false"
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
        yield f"{off}: {generation.engine.named('urls')}: the run cannot copy weights to servers that it did not start"


def _gpus(setting_name: str, host: HostConfig) -> Iterator[str]:
    for gpu in dict.fromkeys(host.gpus):
        if not _GPU.fullmatch(gpu):
            yield f"{setting_name}.gpus: {gpu!r} is no GPU; give numbers as in nvidia-smi, for example ['0', '1']"
        elif (count := host.gpus.count(gpu)) > 1:
            yield f"{setting_name}.gpus: {gpu!r} is there {count} times; name each GPU once"
