"""Settings of the processes and of how they find each other; the codes with which they exit."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.comm.name_resolve import NameBackend
from asyncrl.comm.names import (
    ENCODER_SERVER,
    GENERATION_SERVER,
    GSERVER_MANAGER,
    MASTER_WORKER,
    MODEL_WORKER,
    ROLLOUT_WORKER,
)
from asyncrl.config.setting import setting

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.

LAUNCHERS = {
    "kubernetes": "asyncrl.hosts.kubernetes:Backend",
    "local": "asyncrl.runtime.backends:LocalBackend",
    "ray": "asyncrl.hosts.ray:Backend",
    "slurm": "asyncrl.hosts.slurm:Backend",
    "ssh": "asyncrl.hosts.ssh:Backend",
}
"""The launcher back ends by their names in `system.launcher`; only the one in use is imported."""
LOCAL = "local"
HOSTS_CHECK = "asyncrl.hosts.checks:faults"
ETCD_CHECK = "asyncrl.hosts.etcd_access:faults"
"""Checks of `system.hosts` and `system.etcd`. These, the table above and that of name resolution are all that names the
optional package `asyncrl.hosts`."""
PLACED = (MASTER_WORKER, MODEL_WORKER, GSERVER_MANAGER, GENERATION_SERVER, ROLLOUT_WORKER)
"""Kinds of processes that every run has; of several hosts, at least one runs each."""
PLACEABLE = (*PLACED, ENCODER_SERVER)
"""Kinds of processes that a host of several may run."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong; nothing was started."""
EXIT_HELD = 4
"""Another run holds the trial; nothing was started. The same command works once that run has ended."""
EXIT_STATE_LOST = 75
"""The last step is lost: the whole run must begin again with its newest checkpoint. Raised as `StateLost`."""
EXIT_LOST = 255
"""The process is lost, and its end is not known: the connection to its host ended or never existed, or the process
found that another one has taken its name. ssh uses the same code.
"""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C after a checkpoint."""


class Resume(StrEnum):
    """Treatment of a trial that was used before."""

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
        "IP address, or a name of an IPv4 one, at which the other hosts reach it. ray: that of the node to use; empty: "
        "any node with its cpus and gpus free. kubernetes: leave it empty",
    )
    runs: list[str] = setting(help=f"kinds of processes that run there, of {', '.join(PLACEABLE)}", factory=list)
    gpus: list[str] = setting(help="its GPUs, by CUDA's names for them, e.g. ['0', '1']", factory=list)
    cpus: int = setting(0, "ray, kubernetes: cores to reserve; 0: one per thread of its processes", minimum=0)
    memory: str = setting("", "kubernetes: memory limit of its pod, beyond which it is killed, e.g. 64Gi; empty: none")
    fileroot: str = setting(
        "",
        "system.shared_filesystem=false: the folder on its own disk for runs, a whole path; empty: the launcher's "
        "fileroot",
    )
    python: str = setting("", "the interpreter there, with asyncrl installed; empty: the same path as the launcher's")


@dataclass
class KubernetesConfig:
    """Pods of a run over several hosts (system.launcher=kubernetes)."""

    image: str = setting("", "their image, with python and asyncrl")
    pull_secrets: list[str] = setting(help="Secrets by which a private image is pulled", factory=list)
    namespace: str = setting("default", "namespace of the pods, their claims and Secrets")
    claims: dict[str, str] = setting(
        help="persistent volume claims and the folders where every pod mounts them, e.g. {shared: /data}; fileroot, "
        "model and data have to be there",
        factory=dict,
    )
    secrets: list[str] = setting(
        help="Secrets whose entries are environment variables of every process, e.g. API keys and HF_TOKEN",
        factory=list,
    )
    gpu_resource: str = setting("nvidia.com/gpu", "the cluster's name for GPUs, e.g. amd.com/gpu")
    node_selector: dict[str, str] = setting(
        help="labels of the nodes that pods may be on, e.g. {pool: gpus}", factory=dict
    )
    tolerations: list[dict[str, str]] = setting(
        help="taints of nodes that pods tolerate, as Kubernetes writes them, e.g. [{key: gpu, operator: Exists}]",
        factory=list,
    )
    runtime_class: str = setting("", "runtime class of the pods, e.g. nvidia; empty: the cluster's default")
    folder: str = setting("", "the working directory there, from which your code is imported; empty: the image's")


@dataclass
class EtcdConfig:
    """Login to etcd and encryption of the connection. Secrets are files, under the same path on every host."""

    user: str = setting("", "user name; its role needs readwrite of the prefix /asyncrl/; empty: no login")
    password_file: str = setting("", "file with the user's password, which only you may read")
    ca_file: str = setting("", "PEM file of the authority that signed the servers' certificates; empty: no TLS")
    certificate_file: str = setting("", "PEM file of the run's own certificate, where the servers ask for one")
    key_file: str = setting("", "PEM file of that certificate's key, which only you may read")


@dataclass
class SystemConfig:
    """Processes and how they find each other."""

    launcher: str = setting(
        "local",
        "how processes are started: on this machine, or on system.hosts by ssh, srun, Ray or as Kubernetes pods",
        choices=tuple(LAUNCHERS),
    )
    hosts: list[HostConfig] = setting(
        help="all launchers but local: the hosts, each with name, address, runs, gpus, cpus and python; all of them "
        "see the run folder, the model and the data under the same paths, unless system.shared_filesystem=false; "
        "docs/hosts.md",
        factory=list,
    )
    shared_filesystem: bool = setting(
        True,
        "the hosts see one folder; false: each has its own disk. Then only generation servers and RolloutWorkers run "
        "on other hosts than the launcher's, and names are in etcd. Model, versions, data and your files of code are "
        "copied to each host once, over HTTP",
    )
    version_deltas: bool = setting(
        True,
        "system.shared_filesystem=false: send a host only what changed since a version that it has, if weights have 16 "
        "bits or less; false: whole files, which is faster on links of more than about 1 Gb/s",
    )
    launcher_args: list[str] = setting(
        help="further arguments of ssh or srun, e.g. ['-F', 'my_ssh_config'] or ['--account=mine']; ray: "
        "['--address=HOST:PORT'], auto or local",
        factory=list,
    )
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    name_resolve: NameBackend = setting(
        NameBackend.file, "where processes register and find each other: in files of a folder, or in etcd"
    )
    name_resolve_root: str = setting(
        "",
        "file: a folder, which trials may share (empty: a private one); etcd3: host:port, of a cluster all members' "
        "separated by spaces",
    )
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    name_resolve_timeout_s: float = setting(
        60.0,
        "longest outage of name resolution (etcd elects a leader, a file handle is stale, the disk is full): failed "
        "calls are retried for this long, then the process ends",
        unit="s",
        minimum=0.0,
    )
    encrypt: bool = setting(
        True,
        "encrypt and authenticate all messages: CURVE on every ZMQ socket, TLS and a bearer token on every HTTP "
        "request",
    )
    unencrypted_network: bool = setting(
        False, "confirms encrypt=false if processes listen on a network: everybody on that network is trusted"
    )
    host: str = setting("127.0.0.1", "address the processes bind to and are reached at")
    start_timeout_s: float = setting(
        120.0,
        "longest time without progress (CPU time, bytes read) of a process that starts. With progress it may take 15 "
        "times as long, and 5 times as long until its first status. A process that ends is noticed at once",
        unit="s",
        minimum=1.0,
    )
    niceness: int = setting(
        10,
        "if training runs on the CPU: niceness of all other processes. They work ahead, and use the cores while the "
        "trainer waits; a lower value lets them slow it down. 0: normal priority",
        minimum=0,
        maximum=19,
    )
    lease_s: float = setting(
        10.0,
        "lease of a process's entries in name resolution, renewed three times per lease. With a longer one a death is "
        "noticed later; with a shorter one a pause is taken for a death. A worker whose event loop stands still, while "
        "its names are renewed, is given up after three leases; the trial of a silent launcher is free after six",
        unit="s",
        minimum=0.5,
    )
    stall_timeout_s: float = setting(
        120.0,
        "longest time without a sign of life, once a generation server and a RolloutWorker have started; then the run "
        "ends with a message that names the stage that waits, and for what. Signs of life are rollouts within their "
        "limits, servers that load weights, ranks that compute; an answer and a step may take any time. Ranks that "
        "answer but compute nothing have five times as long",
        unit="s",
        minimum=5.0,
    )
    stop_timeout_s: float = setting(
        30.0,
        "after a stop request (Ctrl-C): longest wait for a training rank that does not answer. Then the run ends "
        "without a checkpoint, with exit code 1",
        unit="s",
        minimum=1.0,
    )
    restarts_per_process: int = setting(
        6,  # a prompt that kills its worker is found with three deaths (`workers.py`): room for two such prompts
        "restarts of each crashed process within restart_window_s: alone, or with the whole brain (MasterWorker, "
        "GserverManager and ModelWorkers). One more crash restarts the whole run from its newest checkpoint, once; the "
        "next ends it. 0: the first crash ends the run",
        minimum=0,
    )
    restart_window_s: float = setting(600.0, "time after which a restart no longer counts", unit="s", minimum=1.0)

    @property
    def silence_s(self) -> float:
        """Seconds without a call after which a worker's rollouts are dropped, although its names are renewed: its event
        loop is blocked. A user's code may block it for some seconds.
        """
        return 3 * self.lease_s

    @property
    def claim_s(self) -> float:
        """Lease of the launcher's claim on the trial, in seconds: it may be paused that long without losing the run."""
        return 6 * self.lease_s


def etcd_access(system: SystemConfig) -> dict[str, str]:
    """Return the members, login and certificates that these settings give."""
    return {"addresses": system.name_resolve_root} | {name: str(value) for name, value in vars(system.etcd).items()}
