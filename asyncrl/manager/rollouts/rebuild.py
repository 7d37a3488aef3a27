"""Rebuild the state of a new GserverManager from what other processes know. None of it is on disk.

The same procedure starts a run, resumes it from a checkpoint, and continues it after a death in the brain, to which the
manager belongs. In the first two cases no process holds anything. All that the manager knows is known elsewhere too:

    state                                             reported by
    ------------------------------------------------  ----------------------------------------------------------------
    used prompts, counters, ended rollouts            the MasterWorker: buffer and ledger
    live rollouts, their prompts and versions         their RolloutWorkers; of earlier ones the ledger's `open` too
    rollouts that wait to be trained                  the MasterWorker, which polls the ranks
    attempts and failures of prompts that wait        the ledger
    version that is served, servers, weights          name resolution and the servers

The protocol

1. The manager registers its address. It has a number. Every call about rollouts names the manager that it is meant for;
   any other manager refuses it. From here on, servers, weights, evaluations and requests of running rollouts are
   served. The gate is shut.
2. A RolloutWorker whose call was refused reports all that it holds (`HeldReport`): running rollouts, and ends that no
   manager has confirmed. A grant of the old manager that the worker reads only now is void: the worker repeats the
   call.
3. The MasterWorker, which begins with the manager, has the ranks load the last step. It polls all ranks, so that its
   buffer has all that they hold. Then it reports all that it knows (`RunReport`), once.
4. Once the master and every ready worker have reported, `rebuild` makes the state, and the gate opens. Workers are
   awaited for `manager.rollout_lease_s` at most. A worker whose successor has begun need not report.
5. The ledger gets a line with the manager's number, then its lines, counted from 1. The first of them adopt rollouts
   that the ledger did not have, and end those that no process has.

Reasons. Without the void grants of 2 a rollout would run that the gate does not count. Without the ledger's open
rollouts, one of them would be admitted twice in the ledger, or have no end there. Without the poll of 3, a rollout that
only a rank has would be run again. If the gate opened before all have reported, two rollouts of a prompt would run at
the same time.

Lost with a manager

- Ends that workers reported since its last report to the master. Rollouts that are open in the ledger end as
  `lost_with_manager`; the others leave no record. Their prompts wait for the same attempt again. So a prompt that was
  dropped for good is run once more, and a measured success may be missing. The loss is at most one step's ends, and
  never a rollout that the trainer has.
- Suspicions against prompts (`suspects`), durations for the pacing, idle time. They are learned again.

Only the death of a RolloutWorker at the same time costs more: its rollouts are run again, as after any death of a
worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted
from asyncrl.manager.messages import FinishedRollout, HeldReport, HeldRollout, RunReport
from asyncrl.manager.rollouts.live_rollouts import RolloutTicket
from asyncrl.manager.rollouts.rollout_state import RolloutState
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts


def rebuild(
    empty: RolloutState,
    run: RunReport,
    workers: Iterable[HeldReport],
    now: Callable[[], float] = time.time,
) -> RolloutState:
    """Rebuild the manager's state, `empty` so far, from the master's report of the `run` and the `workers`' reports of
    what they hold.

    1. Enter the ledger's facts: counters, used prompts, next attempts, ended rollouts.
    2. Enter as live all that any process has: rollouts open in the ledger, held by workers, received by the ranks, or
       trained last. Of two rollouts of a prompt, which only the dead manager could have told apart, the first counts.
    3. Apply the known ends: from the ledger, the ranks, the last step, the workers.
    4. End what no process has. A prompt that is neither used nor live waits, by the definition of the queue.
    """
    used = () if run.used is None else empty.order.orders_of(UsedPrompts.from_json(run.used)).tolist()
    retries = {place: (attempt, failures) for place, attempt, failures in run.retries}
    gate = empty.gate
    books = RolloutState(gate.batch_size, gate.max_staleness, empty.order, used, retries, now, manager=empty.manager)
    books.gate.resume(run.version, run.dropped, run.abandoned)
    for outcome, rollouts in run.ended:
        for rollout in rollouts:
            books.gate.remember(rollout, outcome)

    for admitted in run.open:
        books.enter(*_ticket(admitted), recorded=True)
    for rollout in run.finished:
        books.receive(rollout, 0, recorded=True)
    for received in run.trained:
        books.enter_trained(received)
    books.consume(run.trained_version, [each.rollout_id for each in run.trained])
    for admitted in run.open:
        if books.queue.is_used(admitted.order):
            books.end_unclaimed(admitted.rollout)

    reports = list(workers)
    for report in reports:
        books.adopt(report)
    for received in run.received:
        books.enter_received(received)
        books.receive(received.rollout_id, received.tokens)
    held = {each.granted.rollout_id: each for report in reports for each in report.held}
    for each in held.values():
        if each.end is not None:
            books.finish(each.end)

    spoke = {report.worker for report in reports}
    for worker in sorted(books.gate.live.owners - spoke):
        books.died(worker)
    for rollout in [rollout for worker in sorted(spoke) for rollout in books.gate.live.running_of(worker)]:
        if rollout not in held:
            books.end_unclaimed(rollout)
    books.await_ends_of(held)
    return books


def _ticket(admitted: Admitted) -> tuple[RolloutTicket, int]:
    tries = admitted.order, admitted.attempt, admitted.failures
    return RolloutTicket(admitted.rollout, admitted.worker, admitted.prompt, *tries), admitted.version


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another process has replaced the worker's, which was `killed` from outside or died otherwise."""

    worker: str
    incarnation: int
    killed: bool


class RollCall:
    """The reports to a manager that is not rebuilt yet. Pure state.

    Args:
        until: time from which no worker is awaited, in seconds of the caller's clock.

    Attributes:
        run: the master's report.
        awaited: processes of workers, by incarnation, that must report; None until they are known.
        ended: deaths of workers (by name) and replacements seen meanwhile, to be applied to the rebuilt state.
        replaced: by worker, the incarnation that replaced the one before meanwhile.
    """

    def __init__(self, until: float = 0.0) -> None:
        self._until = until
        self.run: RunReport | None = None
        self.awaited: Mapping[str, int] | None = None
        self.ended: list[str | Replaced] = []
        self.replaced: dict[str, int] = {}
        self._reports: dict[tuple[str, int], HeldReport] = {}
        self._newest: dict[str, int] = {}
        self._held: dict[str, HeldRollout] = {}

    @property
    def reports(self) -> list[HeldReport]:
        """Reports of the workers' processes, with the ends that they reported since.

        Of a process that another has replaced since, only the rollouts that ended count: it may have been the only one
        to know that the trainer has them.
        """
        found: list[HeldReport] = []
        for (worker, incarnation), report in sorted(self._reports.items(), key=lambda item: item[0]):
            held = [self._held[each.granted.rollout_id] for each in report.held]
            if incarnation < self._newest[worker]:
                held = [each for each in held if each.end is not None]
            found.append(HeldReport(worker, incarnation, held))
        return found

    @property
    def is_complete(self) -> bool:
        """True if the master and all awaited workers have reported."""
        if self.run is None or self.awaited is None:
            return False
        return all(self._has_spoken(worker, incarnation) for worker, incarnation in self.awaited.items())

    def await_workers(self, ready: Mapping[str, int], now: float) -> None:
        """Await the reports of these workers' processes, by incarnation; of no worker once the leases are over."""
        self.awaited = ready if now < self._until else {}

    def take(self, report: HeldReport) -> None:
        """Record the rollouts that a worker's process holds. Its first report counts."""
        process = report.worker, report.incarnation
        if process not in self._reports:
            self._reports[process] = report
            self._newest[report.worker] = max(report.incarnation, self._newest.get(report.worker, report.incarnation))
            self._held |= {each.granted.rollout_id: each for each in report.held}

    def finish(self, finished: FinishedRollout) -> None:
        """Record an end that a worker reports after its first report."""
        if (held := self._held.get(finished.rollout_id)) is not None:
            self._held[finished.rollout_id] = HeldRollout(held.granted, finished)

    def end(self, ended: str | Replaced) -> None:
        """Record that a worker's process is over."""
        self.ended.append(ended)
        if isinstance(ended, Replaced):
            self.replaced[ended.worker] = ended.incarnation

    def admitted_at(self, rollout_id: str) -> int:
        """Return the version that a rollout was admitted at if a worker holds it, else 0."""
        held = self._held.get(rollout_id)
        return 0 if held is None else held.granted.version

    def has_ended(self, rollout_id: str) -> bool:
        """True if a worker that held the rollout has reported its end."""
        held = self._held.get(rollout_id)
        return held is not None and held.end is not None

    def _has_spoken(self, worker: str, incarnation: int) -> bool:
        """True if this process of the worker, or a later one, has reported."""
        return self._newest.get(worker, -1) >= incarnation
