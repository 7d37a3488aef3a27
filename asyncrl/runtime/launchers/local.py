"""Start workers as processes on this machine, each below a supervisor (`asyncrl.runtime.supervisor`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from asyncrl.comm.waits.limits import STOP_S
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle
from asyncrl.runtime.planning.worker_plan import WorkerPlan
from asyncrl.runtime.process.process_tree import kill_descendants, supervised
from asyncrl.runtime.supervisor import STOP_SIGNAL, adopt_orphans
from asyncrl.runtime.trials.claim import SAVE_LIMIT_S


class Backend(LauncherBackend):
    """Starts workers on this machine. Orphans of its children become its own, so that `close` finds them."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._launched, self._launches = os.pipe()  # broken once launcher and leading process are gone
        adopt_orphans()

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        with await self.open_log(plan) as log:
            held = [self._launches, *([] if self.lock is None else [self.lock])] if plan.leads else []
            process = await asyncio.create_subprocess_exec(
                *supervised(plan.command(self.run_dir), SAVE_LIMIT_S if plan.leads else 0.0, held),
                # Held open for as long as this process lives; the others' while the leading one does.
                stdin=asyncio.subprocess.PIPE if plan.leads else self._launched,
                pass_fds=held,
                stdout=log,
                stderr=log,
                env=os.environ | plan.environment() | self.mark,
            )
        return _Child(plan, process, Path(log.name))

    async def close(self) -> None:
        kill_descendants(os.getpid(), wait_s=STOP_S)
        os.close(self._launched)
        os.close(self._launches)


class _Child(WorkerHandle):
    def __init__(self, plan: WorkerPlan, process: asyncio.subprocess.Process, log: Path) -> None:
        super().__init__(plan, f"pid {process.pid}", log)
        self._process = process

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> None:
        await self._process.wait()

    def terminate(self) -> None:
        if self.exit_code is None:
            self._process.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        if self.exit_code is None:
            kill_descendants(self._process.pid)
            self._process.kill()

    def kill_process(self) -> None:
        if self.exit_code is None:
            kill_descendants(self._process.pid)
