"""Exits of a run's processes: classify their causes, describe them, and wait for several."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection, Sequence

from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_LOST, EXIT_STATE_LOST
from asyncrl.runtime.launchers import WorkerHandle
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS, Restart
from asyncrl.runtime.supervisor import TOLD_OUT_OF_MEMORY


def is_of_brain(worker: WorkerHandle) -> bool:
    """True if the worker is part of the run's brain, which restarts as a whole."""
    return PROCESS_KINDS[worker.plan.kind].restart is Restart.together


def is_guest(worker: WorkerHandle, guests: Collection[int]) -> bool:
    """True if the worker is one of the generation servers with these indices."""
    return worker.plan.kind == GENERATION_SERVER and worker.plan.index in guests


def cannot_continue(worker: WorkerHandle) -> bool:
    """True if the worker exited because it cannot continue (`Worker.start`)."""
    return worker.exit_code == EXIT_FAILED


def may_follow_another(worker: WorkerHandle | None) -> bool:
    """True if the worker probably ended because another one of the brain died."""
    return worker is not None and is_of_brain(worker) and cannot_continue(worker)


def leads(worker: WorkerHandle) -> bool:
    """True if the end of the worker is the end of the run."""
    return PROCESS_KINDS[worker.plan.kind].leads


def was_killed(worker: WorkerHandle) -> bool:
    """True if the worker was killed, but not for lack of memory, or its host was lost: mostly not its own fault.

    A process that sends itself SIGKILL looks the same as one that is killed from outside.
    """
    return worker.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL, EXIT_LOST)


def describe_exit(ended: WorkerHandle) -> str:
    """Describe how a process ended."""
    code = ended.exit_code
    if code is not None and code < 0:
        return f"was killed by signal {_signal_name(-code)}"
    told = {
        EXIT_STATE_LOST: "found that the last step is lost",
        EXIT_LOST: "was lost with the connection to its host",
        TOLD_OUT_OF_MEMORY: "was killed while the kernel of its host killed processes to free memory",
    }
    return f"exited with {code}" if code is None else told.get(code, f"exited with {code}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


async def wait_for(workers: Sequence[WorkerHandle], limit_s: float) -> list[WorkerHandle]:
    """Wait for the ends of `workers`, `limit_s` at most; returns those that still run."""
    waits = [asyncio.create_task(worker.wait()) for worker in workers if worker.exit_code is None]
    if waits:
        await asyncio.wait(waits, timeout=limit_s)
        for task in waits:
            task.cancel()
    return [worker for worker in workers if worker.exit_code is None]
