"""Checks of the settings of processes and their names; `asyncrl.hosts.checks` has those of several hosts."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from asyncrl.comm.name_resolve import NameBackend
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.process.hardware import LOOPBACK, interface_of
from asyncrl.runtime.settings import ETCD_CHECK, HOSTS_CHECK, LOCAL, etcd_access


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    system = config.system
    if system.name_resolve == NameBackend.etcd3:
        yield from pkgutil.resolve_name(ETCD_CHECK)(etcd_access(system))
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
    backend = backend_class(system.launcher)
    yield from backend.faults(config)
    if not system.shared_filesystem and not system.hosts:
        yield (
            "system.shared_filesystem=false: system.hosts is empty, so that everything is on one host; leave "
            "system.shared_filesystem out"
        )
    if system.hosts or system.launcher != LOCAL:
        yield from pkgutil.resolve_name(HOSTS_CHECK)(config, backend)
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
