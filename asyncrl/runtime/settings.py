"""Settings of the processes and of how they find each other, and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.comm.name_resolve import NameBackend
from asyncrl.config.setting import modules_in, setting
from asyncrl.runtime.hardware import interface_of

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.

_LAUNCHERS = Path(__file__).parent / "launchers"


class Resume(StrEnum):
    """What becomes of a trial that was used before."""

    auto = "auto"
    """It is continued."""
    never = "never"
    """It is refused."""
    restart = "restart"
    """It is wiped."""


@dataclass
class SystemConfig:
    """Processes and how they find each other."""

    launcher: str = setting("local", "how processes are started", choices=modules_in(_LAUNCHERS))
    name_resolve: NameBackend = setting(NameBackend.file, "name resolution back end")
    name_resolve_root: str = setting(
        "", "file: a folder, which trials may share (empty: a private one); etcd3: host:port"
    )
    name_resolve_patience_s: float = setting(
        60.0,
        "name resolution may be away for so long (etcd elects a leader, a file handle is stale, the disk is full): "
        "what fails is tried again, then the process ends",
        unit="s",
        minimum=0.0,
    )
    encrypt: bool = setting(True, "CURVE on every ZMQ socket; TLS and a bearer token on every HTTP request")
    host: str = setting("127.0.0.1", "address the processes bind to and are reached at")
    start_timeout_s: float = setting(120.0, "limit for all processes to become ready", unit="s", minimum=1.0)
    heartbeat_s: float = setting(
        10.0, "lease of a worker's entry; it is renewed three times per lease", unit="s", minimum=0.5
    )
    stall_timeout_s: float = setting(
        120.0, "no train step for so long: say which stage waits for what, and stop", unit="s", minimum=5.0
    )
    restarts_per_process: int = setting(
        3,
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
        if not system.name_resolve_root:
            yield "system.name_resolve_root='': name_resolve=etcd3 needs the server's address; give host:port"
        if importlib.util.find_spec("etcd3") is None:
            yield "system.name_resolve='etcd3': etcd3 is not installed; install the `etcd` extra, or use file"
    try:
        interface_of(system.host)
    except ValueError as error:
        yield str(error)
