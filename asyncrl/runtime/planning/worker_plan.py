"""Description of a process for a launcher back end: plain values, no machinery."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

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
class Resources:
    """Resources of one process.

    Attributes:
        threads: CPU threads of its numeric libraries.
        gpus: GPUs that it sees, by CUDA's names for them.
        niceness: by how much its priority is lowered.
        allocator: settings of torch's GPU allocator (PYTORCH_ALLOC_CONF), unless the user has set some; empty: torch's
            defaults.
    """

    threads: int = 1
    gpus: tuple[str, ...] = ()
    niceness: int = 0
    allocator: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of processes.

    Attributes:
        name: name by which the launcher's back end reaches it; empty for the launcher's own host.
        address: address of processes that run there; empty for the host's own value of `HOST_VARIABLE`, else
            `system.host`.
        python: interpreter on the host; empty for the launcher's own path.
        run_dir: the run's folder on the host; empty for the launcher's own path.
    """

    name: str = ""
    address: str = ""
    python: str = ""
    run_dir: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One process to start: the `index`-th of its `kind`, its resources, its host, and its number of dead
    predecessors.
    """

    kind: str
    index: int
    resources: Resources = field(default_factory=Resources)
    incarnation: int = 0
    host: Host = field(default_factory=Host)
    leads: bool = False
    """True if the process saves before it ends, and needs the other processes for that."""

    @property
    def name(self) -> str:
        """`<kind>/<index>`."""
        return f"{self.kind}/{self.index}"

    def command(self, run_dir: Path) -> list[str]:
        """Return the command line that runs the process, for the run in `run_dir`."""
        command = [self.host.python or sys.executable, "-m", "asyncrl.runtime.main", self.kind, str(self.index)]
        command += ["--incarnation", str(self.incarnation)]
        command += ["--host", self.host.address] if self.host.address else []
        return [*command, "--run-dir", self.host.run_dir or str(run_dir), "--niceness", str(self.resources.niceness)]

    def _malloc(self) -> dict[str, str]:
        """Return the settings of glibc's allocator, unless the user has made some."""
        if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
            return {}
        return {name: value for name, value in MALLOC.items() if name not in os.environ}

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process, in addition to the launcher's own.

        A user's own choice of CUDA_DEVICE_ORDER, of torch's allocator and of glibc's stays.
        """
        threads = str(self.resources.threads)
        allocator: dict[str, str] = {}
        if self.resources.allocator and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            allocator[ALLOCATOR_VARIABLES[0]] = self.resources.allocator
        return (
            self._malloc()
            | allocator
            | {
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "OPENBLAS_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONUNBUFFERED": "1",
                "CUDA_VISIBLE_DEVICES": ",".join(self.resources.gpus),
                # CUDA's default is the fastest first; so its numbers are those of nvidia-smi
                "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            }
        )
