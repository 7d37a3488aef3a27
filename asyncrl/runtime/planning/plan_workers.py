"""Processes of a config, with host, threads and GPUs, as plain values for a launcher back end. Pure, so that
`--dry-run` can show them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER, STAGING_SERVER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.planning.process_kinds import (
    PROCESS_KINDS,
    Purpose,
    Resources,
    Share,
    gpus_of_servers,
    staging_hosts,
)
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.runtime.settings import HostConfig

MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(128 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Settings of glibc's allocator in every worker. Buffers of up to 32 MiB, the largest value allowed, come from the
heap, and the heap keeps up to 128 MiB of free memory. With the defaults, the pages of every trajectory are returned to
the kernel and faulted in again, which costs more than sending the trajectory. Larger buffers come from the kernel:
without (`MALLOC_MMAP_MAX_=0`) a training rank has a fifth of its page faults, some 6 % of its time, but its heap falls
apart and grows with every step."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names by which torch takes the settings of its allocator, today's first."""

HOST_VARIABLE = "ASYNCRL_HOST"
"""Environment variable with a host's address, if only processes on the host know it (Ray, Kubernetes)."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One process to start.

    Attributes:
        kind, index: it is the `index`-th of its kind.
        resources: what it may use.
        incarnation: number of its dead predecessors.
        host: its host, as the settings have it. Without an address the process has the host's own value of
            `HOST_VARIABLE`, else `system.host`.
        run_dir: the run's folder on the host's own disk; empty for the launcher's path.
        leads: True if the process saves before it ends, and needs the other processes for that.
    """

    kind: str
    index: int
    resources: Resources = field(default_factory=Resources)
    incarnation: int = 0
    host: HostConfig = field(default_factory=HostConfig)
    run_dir: str = ""
    leads: bool = False

    @property
    def name(self) -> str:
        """`<kind>/<index>`."""
        return f"{self.kind}/{self.index}"

    def command(self, run_dir: Path) -> list[str]:
        """Return the command line that runs the process, for the run in `run_dir`."""
        command = [self.host.python or sys.executable, "-m", "asyncrl.runtime.main", self.kind, str(self.index)]
        command += ["--incarnation", str(self.incarnation)]
        command += ["--host", self.host.address] if self.host.address else []
        return [*command, "--run-dir", self.run_dir or str(run_dir), "--niceness", str(self.resources.niceness)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process, in addition to the launcher's own.

        A user's own choice of CUDA_DEVICE_ORDER, of torch's allocator and of glibc's stays.
        """
        threads = str(self.resources.threads)
        chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        allocator = {} if chosen else {name: value for name, value in MALLOC.items() if name not in os.environ}
        if self.resources.allocator and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            allocator[ALLOCATOR_VARIABLES[0]] = self.resources.allocator
        return allocator | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(self.resources.gpus),
            # CUDA's default is the fastest first; so its numbers are those of nvidia-smi
            "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        }


def plan_workers(
    config: ExperimentConfig, gpus: Sequence[str] | None = None, run: Purpose = Purpose.train
) -> list[WorkerPlan]:
    """Plan every process of the launch, in the order of `PROCESS_KINDS`.

    The processes of a kind are assigned to the hosts that run it in contiguous blocks, in the order of `system.hosts`,
    so the innermost axes of a layout stay on one host. All hosts get the same number; generation servers are assigned
    in proportion to those that fit on the GPUs that training leaves on a host.

    Args:
        config: the experiment.
        gpus: GPUs of the launcher's host that may be assigned; default: the visible ones.
        run: purpose of the launch.
    """
    gpus = visible_gpus() if gpus is None else gpus

    def placed(name: str) -> list[HostConfig]:
        kind = PROCESS_KINDS[name]
        count = kind.count(config) if run in kind.runs else 0
        hosts = _hosts_of(config, kind.placed_as or name)
        if name == GENERATION_SERVER:
            hosts = _by_room(config, hosts, [share_of(host) for host in hosts])
        return [hosts[index * len(hosts) // count] for index in range(count)]

    def share_of(host: HostConfig) -> Share:
        return Share(host.gpus if host.name else host.gpus or gpus, ranks[id(host)])

    ranks = Counter(id(host) for name in PROCESS_KINDS if name == MODEL_WORKER for host in placed(name))
    plans = []
    for name, kind in PROCESS_KINDS.items():
        before: Counter[int] = Counter()
        for index, host in enumerate(placed(name)):
            resources = kind.resources(config, before[id(host)], share_of(host))
            before[id(host)] += 1
            own = Path(host.fileroot, config.experiment_name, config.trial_name) if host.fileroot else ""
            plans.append(WorkerPlan(name, index, resources, host=host, run_dir=str(own), leads=kind.leads))
    return plans


def _hosts_of(config: ExperimentConfig, kind: str) -> list[HostConfig]:
    """Return the hosts that run `kind`: those that name it, or the launcher's own if none does."""
    if kind == STAGING_SERVER:
        return staging_hosts(config)
    return [host for host in config.system.hosts if kind in host.runs] or [_HERE]


def _by_room(config: ExperimentConfig, hosts: list[HostConfig], shares: list[Share]) -> list[HostConfig]:
    """Return the hosts of generation servers, each as often as servers fit on its free GPUs; all once if none fits."""
    each = config.generation.engine.shape.gpus
    fits = [len(gpus_of_servers(config, share)) // each for share in shares]
    return [host for host, count in zip(hosts, fits, strict=True) for _ in range(count)] or hosts


_HERE = HostConfig()


def with_types(config: ExperimentConfig, run: Purpose = Purpose.train) -> ExperimentConfig:
    """Return `config` with `auto` in `model.dtype` and `generation.dtype` replaced by a type.

    The type follows from the plan, so that every process of the run reads the same. The type of servers that the user
    started is not known and stays `auto`.
    """
    plans = plan_workers(config, run=run)

    def device_of(kind: str) -> str:
        return "cuda" if any(plan.resources.gpus for plan in plans if plan.kind == kind) else "cpu"

    model, generation = config.model, config.generation
    if not generation.engine.urls:
        generation = replace(generation, dtype=generation.dtype.on(device_of(GENERATION_SERVER)))
    return replace(config, model=replace(model, dtype=model.dtype.on(device_of(MODEL_WORKER))), generation=generation)
