"""Begin the state of a GserverManager. A run's beginning, a resume and a death of the brain are this one procedure.

MasterWorker, GserverManager and ModelWorkers begin together from one checkpoint: of the last step in their hosts'
memory, or from disk, or none. The gate's part of it has the used prompts, the counters, the tries of prompts and the
ledger's line (`GateCheckpoint`); lines after that one no longer count. The live rollouts are known by those who have
them:

    live rollouts                                     reported by
    ------------------------------------------------  ----------------------------------------------------------------
    that run, or whose end no manager has confirmed   their RolloutWorkers
    that wait to be trained                           the ranks, through the MasterWorker
    that nobody reports                               no one: their prompts wait for the same try again

The protocol

1. The manager registers its address. It has a number. Every call about rollouts names the manager that it is meant for;
   any other manager refuses it. From here on, servers, weights, evaluations and requests of running rollouts are
   served. The gate is shut.
2. A RolloutWorker whose call was refused reports all that it holds (`HeldReport`): running rollouts, and ends that no
   manager has confirmed. A grant of the old manager that the worker reads only now is void: the worker repeats the
   call.
3. The MasterWorker has the ranks load the checkpoint, polls them for the rollouts that they hold, and sends both
   (`RunBegin`). The ledger begins a lineage after the checkpoint's line.
4. Once the master and every ready worker have reported, `rebuild` makes the state, and the gate opens. Workers are
   awaited for three leases at most (`SystemConfig.silence_s`). A worker whose successor has begun need not report.

Reasons. Without the void grants of 2 a rollout would run that the gate does not count. Without the poll of 3, a rollout
that only a rank has would be run again. Without the rollouts that the ledger has as ended, one whose worker had not
heard of its end would end twice. If the gate opened before all have reported, two rollouts of a prompt would run at the
same time. A rollout that its worker has delivered counts only if the trainer has it: a rank may have freed it since the
last step, and then nobody would ever end it (`still_there`).

Lost with a manager are the ends that it heard of since the last step: their prompts are tried once more, and a measured
success may be missing. So are suspicions against prompts (`suspects`), durations for the pacing and idle time; they are
learned again. A rollout that the trainer has is never lost. Only the death of a RolloutWorker at the same time costs
more: its rollouts are run again, as after any death of a worker.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from msgspec import structs

from asyncrl.manager.messages import FinishedRollout, HeldReport, HeldRollout, ReceivedRollout, RunBegin
from asyncrl.manager.rollouts.rollout_state import RolloutState


def rebuild(rollouts: RolloutState, received: Iterable[ReceivedRollout], workers: Iterable[HeldReport]) -> None:
    """Enter the live rollouts into the state of a checkpoint: those `received` by the trainer, and those that the
    `workers` hold. Then apply the ends that the workers report.

    Of two rollouts of a prompt, which only a dead manager could have told apart, the first counts; one that its worker
    dropped comes last, as the other may be the next try.
    """
    reports = list(workers)
    for report in reports:
        rollouts.adopt(structs.replace(report, held=[each for each in report.held if not _is_dropped(each)]))
    for each in received:
        rollouts.enter_received(each)
        rollouts.receive(each.rollout_id, each.tokens)
    held = {each.granted.rollout_id: (report.worker, each) for report in reports for each in report.held}
    for worker, known in held.values():
        if _is_dropped(known):
            rollouts.enter_held(worker, known.granted)
        if known.end is not None:
            rollouts.finish(known.end)


def _is_dropped(held: HeldRollout) -> bool:
    return held.end is not None and not held.end.accepted


def still_there(report: HeldReport, received: Container[str] = ()) -> list[HeldRollout]:
    """Return what a worker holds and some process still has: not the rollouts that it has delivered, unless they are
    among those `received`.
    """
    return [
        each for each in report.held if each.end is None or not each.end.accepted or each.granted.rollout_id in received
    ]


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
        self.run: RunBegin | None = None
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
        received = set() if self.run is None else {each.rollout_id for each in self.run.received}
        for (worker, incarnation), report in sorted(self._reports.items(), key=lambda item: item[0]):
            held = [self._held[each.granted.rollout_id] for each in still_there(report, received)]
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
