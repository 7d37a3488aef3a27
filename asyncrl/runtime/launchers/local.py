"""The local launcher back end: workers as child processes of this one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY_KEEPER = "torch_shm_manag"  # the kernel keeps 15 characters of a name
_PR_SET_CHILD_SUBREAPER = 36
_LAST_LINES = 12
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(128 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc's allocator in every worker: buffers of up to 32 MiB, the most it allows, are taken from the heap, and the heap
keeps up to 128 MiB that are free. Its defaults give the pages of every trajectory back to the kernel and fault them in
again, which costs more than sending it."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One process to start: which worker, on how many CPU threads, seeing which GPUs (None: as inherited), how nice."""

    kind: str
    index: int
    threads: int
    gpus: tuple[int, ...] | None = None
    niceness: int = 0

    @property
    def name(self) -> str:
        """`<kind>/<index>`."""
        return f"{self.kind}/{self.index}"

    def environment(self) -> dict[str, str]:
        """Environment variables of the process, on top of the launcher's own."""
        threads = str(self.threads)
        variables = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        } | MALLOC
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return variables


class LocalWorker:
    """A started worker: wait for it, ask it to stop, kill it."""

    def __init__(self, plan: WorkerPlan, process: asyncio.subprocess.Process, log_file: Path) -> None:
        self.plan = plan
        self.log_file = log_file
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; negative is the signal that ended it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to stop."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, with everything it started."""
        if self.exit_code is None:
            kill_descendants(self.pid)
            self._process.kill()

    def last_lines(self) -> list[str]:
        """The end of its log."""
        with self.log_file.open(errors="replace") as log:
            return [line.rstrip("\n") for line in deque(log, maxlen=_LAST_LINES)]


async def start_worker(plan: WorkerPlan, run_dir: Path) -> LocalWorker:
    """Start a worker of the run in `run_dir`; its output goes to `<run_dir>/logs/<kind>-<index>.log`."""
    log_file = run_dir / "logs" / f"{plan.kind}-{plan.index}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    argv = ["-m", "asyncrl.runtime.main", plan.kind, str(plan.index)]
    argv += ["--run-dir", str(run_dir), "--parent-pid", str(os.getpid()), "--niceness", str(plan.niceness)]
    with log_file.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | plan.environment(),
        )
    return LocalWorker(plan, process, log_file)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died, so that `kill_descendants` finds them.
    Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int) -> list[str]:
    """Kill everything that process `pid` started, directly or not; returns what was killed, as `pid name`.

    Torch's keeper of shared memory is left to itself: it frees what the others had, and ends once they have.
    """
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    killed = []
    for process in descendants:
        try:
            label = f"{process.pid} {process.name()}"
            keeper = process.name().startswith(_SHARED_MEMORY_KEEPER)
            if process.status() != psutil.STATUS_ZOMBIE and not keeper:
                process.kill()
                killed.append(label)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(descendants, timeout=3)
    return killed
