"""The processes of a run: start them, report their ends, replace and stop them.

The incarnation of a process is the number of its predecessors that were replaced. A process is fenced before its
successor starts, as it may still run on an unreachable host.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, Subtree
from asyncrl.comm.waits.limits import LOOK_S, PATIENCE_S, STOP_S
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS
from asyncrl.runtime.planning.worker_plan import WorkerPlan
from asyncrl.runtime.trials.open_resolver import open_resolver
from asyncrl.runtime.trials.process_exit import cannot_continue, is_of_brain, leads, wait_for, was_killed
from asyncrl.runtime.trials.restart_log import BRAIN, note_restart, note_went_on
from asyncrl.runtime.trials.trial import Trial


class RunProcesses:
    """The processes that run now, the ends that were not handled yet, and the number of deaths by process.

    Args:
        backend: starts the processes.
        trial: fences them.
        note: shows a line to the user.
    """

    def __init__(self, backend: LauncherBackend, trial: Trial, note: Callable[[str], None]) -> None:
        self._backend, self._trial, self._note = backend, trial, note
        self.running: list[WorkerHandle] = []
        """The processes that were started and not removed; some may have ended."""
        self._ends: asyncio.Queue[WorkerHandle | None] = asyncio.Queue()
        self._deaths: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def clear(self) -> None:
        """Forget all processes, and the ends that were not handled."""
        self.running.clear()
        self._ends = asyncio.Queue()

    async def start(self, plan: WorkerPlan) -> None:
        """Start a process, and have its end reported."""
        worker = await self._backend.start(replace(plan, incarnation=self._deaths[plan.name]))
        self.running.append(worker)
        ends = self._ends

        async def report_end() -> None:
            await worker.wait()
            ends.put_nowait(worker)

        self._run_beside(report_end())

    async def ends(self) -> list[WorkerHandle | None]:
        """Wait for the next ends of processes. None among them: `end_now` was called."""
        ends = [await self._ends.get()]
        while not self._ends.empty():
            ends.append(self._ends.get_nowait())
        return ends

    def end_now(self) -> None:
        """Let `ends` report that everything must stop at once."""
        self._ends.put_nowait(None)

    async def await_cause(self, ends: list[WorkerHandle | None]) -> None:
        """Add to `ends` the processes that end soon after: the death of a rank makes its peers and the master exit."""
        deadline = time.monotonic() + STOP_S
        while not any(worker is not None and is_of_brain(worker) and not cannot_continue(worker) for worker in ends):
            try:
                ends.append(await asyncio.wait_for(self._ends.get(), max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                return

    async def restart(self, workers: Sequence[WorkerHandle], what: str, reason: str) -> None:
        """End what still runs of `workers`, and start each again.

        Args:
            what: name of the restart in the log: a process, or `BRAIN`.
            reason: the death that made it necessary.
        """
        began = time.monotonic()
        note_restart(self._trial.run_dir, what, reason)
        for worker in workers:
            worker.kill_process()
        for worker in await wait_for(workers, STOP_S):
            worker.kill()
        await wait_for(workers, STOP_S)
        for worker in workers:
            self.running.remove(worker)
        plans = [worker.plan for worker in workers]
        await self.give_up(workers)
        if what == BRAIN:
            await asyncio.to_thread(self._trial.forget_brain)
        for plan in plans:
            await self.start(plan)
        self._run_beside(self._note_when_ready(plans, what, began))

    async def give_up(self, workers: Sequence[WorkerHandle]) -> None:
        """Fence these processes, which may still run on an unreachable host, and record which of them were killed."""
        for worker in workers:
            self._deaths[worker.plan.name] += 1
        numbers = {(worker.plan.kind, worker.plan.index): self._deaths[worker.plan.name] for worker in workers}
        killed = [(worker.plan.kind, worker.plan.index) for worker in workers if was_killed(worker)]
        await asyncio.to_thread(self._trial.fence, numbers, killed)

    async def _note_when_ready(self, plans: Sequence[WorkerPlan], what: str, began: float) -> None:
        """Show and log how long it took until the restarted processes were ready."""
        incarnations = {plan.name: self._deaths[plan.name] for plan in plans}

        def are_ready(statuses: Subtree) -> bool:
            for plan in plans:
                value = statuses.get(names.status_key(plan.kind, plan.index))
                if value is None:
                    return False
                status = names.WorkerStatus.decode(value)
                if status.incarnation < incarnations[plan.name] or status.state in ("starting", "failed"):
                    return False
            return True

        try:
            with await asyncio.to_thread(open_resolver, self._trial.config, self._trial.run_dir) as resolver:
                statuses = await asyncio.to_thread(resolver.follow, names.STATUSES)
                while time.monotonic() - began < PATIENCE_S:
                    if any(self._deaths[name] != number for name, number in incarnations.items()):
                        return  # it died again before it was ready; the note of that restart follows
                    if are_ready(statuses):
                        seconds = time.monotonic() - began
                        note_went_on(self._trial.run_dir, what, seconds)
                        self._note(f"{what} went on after {seconds:.1f} s")
                        return
                    await asyncio.sleep(LOOK_S)
        except NameResolveError as error:
            self._note(f"{what} was restarted; the launcher cannot see when it is ready: {error}")

    def terminate_leader(self) -> None:
        """Ask the leading process to end."""
        for worker in self.running:
            if leads(worker):
                worker.terminate()

    async def save_and_stop(self) -> None:
        """Have the leading process save, if it still runs, and stop everything."""
        self.terminate_leader()
        await wait_for([worker for worker in self.running if leads(worker)], 2 * STOP_S)
        await self.stop()

    async def stop(self) -> None:
        """Stop all processes, clients before servers, so that no client waits for an answer that never comes."""
        for serves in (False, True):
            workers = [worker for worker in self.running if PROCESS_KINDS[worker.plan.kind].serves == serves]
            for worker in workers:
                worker.terminate()
            for worker in await wait_for(workers, STOP_S):
                limit = f"{STOP_S:.0f} s"
                self._note(f"{worker.plan.name} did not stop within {limit}; killed; see {worker.log}")
                worker.kill()
        await wait_for(self.running, STOP_S)

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self.running:
            worker.kill()

    def _run_beside(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
