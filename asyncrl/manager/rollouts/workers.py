"""RolloutWorkers and rollouts that outlive a process: `Workers` knows the workers' processes, `PendingReports` gathers
what they hold when a manager begins, and `Suspects` finds the prompts that kill them.

How a manager begins. A run's beginning, a resume and a death of the brain are this one procedure.

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
4. Once the master and every ready worker have reported, `RolloutState.rebuild` makes the state, and the gate opens.
   Workers are awaited for three leases at most (`SystemConfig.silence_s`). A worker whose successor has begun need not
   report.

Reasons. Without the void grants of 2 a rollout would run that the gate does not count. Without the poll of 3, a rollout
that only a rank has would be run again. Without the rollouts that the ledger has as ended, one whose worker had not
heard of its end would end twice. If the gate opened before all have reported, two rollouts of a prompt would run at the
same time. A rollout that its worker has delivered counts only if the trainer has it: a rank may have freed it since the
last step, and then nobody would ever end it (`still_there`).

Lost with a manager are the ends that it heard of since the last step: their prompts are tried once more, and a measured
success may be missing. So are suspicions against prompts, durations for the pacing and idle time; they are learned
again. A rollout that the trainer has is never lost. Only the death of a RolloutWorker at the same time costs
more: its rollouts are run again, as after any death of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass

from asyncrl.manager.messages import FinishedRollout, HeldReport, HeldRollout, RunBegin

CRASH, KILL = 2, 1
"""Points that a death adds to the running suspect."""
ALONE = 2 * CRASH
"""Points at which a suspect runs alone."""
DROPPED = 3 * CRASH
"""Points at which a suspect is dropped. A prompt that crashes its worker uses half the restarts that a process has by
default (`system.restarts_per_process`), one that kills it all of them. So one bad row ends no run.
"""


@dataclass(slots=True)
class Worker:
    """What is known of a worker.

    Attributes:
        incarnation: its newest process.
        reported: the newest process that has reported what it holds; -1: none has.
        called_at: time of its last call, in seconds; None: it has no lease.
        host: address of its host; "" if that is not known.
    """

    incarnation: int = 0
    reported: int = -1
    called_at: float | None = None
    host: str = ""


_UNKNOWN = Worker()


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """A worker's process is over.

    Attributes:
        replaced_by: the incarnation that replaces it; None: the worker is gone, or was only silent.
        killed: it was killed from outside.
    """

    worker: str
    replaced_by: int | None = None
    killed: bool = False


class Workers:
    """The workers' processes and leases. A lease is renewed by every call of its worker, and runs out after `lease_s`
    of silence.

    A worker's process that died is followed by another of the same name, its next incarnation. The first call or status
    of the new process ends the old one. The old one's running rollouts are dropped (`worker_died`), and their prompts
    wait for any worker. Late calls of the old one are refused, but the ends that they report count. So all running
    rollouts of a worker belong to one incarnation.

    Pure state: the caller passes the time, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._workers: dict[str, Worker] = {}

    @property
    def alive(self) -> list[str]:
        """Workers whose lease has not run out."""
        return [name for name, worker in list(self._workers.items()) if worker.called_at is not None]  # any thread

    def of(self, worker: str) -> Worker:
        """Return what is known of the worker."""
        return self._workers.get(worker, _UNKNOWN)

    def see(self, worker: str, incarnation: int) -> bool:
        """Record that this incarnation of the worker exists; return True if it replaces an older one."""
        if incarnation <= self.of(worker).incarnation:
            return False
        self._workers.setdefault(worker, Worker()).incarnation = incarnation
        return True

    def report(self, report: HeldReport, now: float) -> bool:
        """Record that the newest process of a worker has reported. Return True if this is its first report: only that
        counts, since a late copy lacks later grants.
        """
        worker = self._workers.setdefault(report.worker, Worker())
        first = report.incarnation > worker.reported
        worker.reported, worker.called_at, worker.host = max(worker.reported, report.incarnation), now, report.host
        return first

    def is_back(self, ended: EndedProcess) -> bool:
        """True if the worker has reported since that process ended."""
        worker = self.of(ended.worker)
        return worker.called_at is not None if ended.replaced_by is None else worker.reported >= ended.replaced_by

    def renew(self, worker: str, now: float) -> None:
        """Record that `worker` called at `now`."""
        self._workers.setdefault(worker, Worker()).called_at = now

    def keep(self, worker: str, now: float) -> bool:
        """Renew the lease of a worker whose call is held; return False if the lease has ended meanwhile."""
        if self.of(worker).called_at is None:
            return False
        self.renew(worker, now)
        return True

    def expire(self, now: float) -> list[str]:
        """End the leases that have run out; return their workers."""
        called = {name: worker.called_at for name, worker in self._workers.items()}
        late = [name for name, at in called.items() if at is not None and now - at > self._lease_s]
        for name in late:
            self.end(name)
        return late

    def end(self, worker: str) -> None:
        """End the lease of a dead worker."""
        if (known := self._workers.get(worker)) is not None:
            known.called_at, known.host = None, ""


def still_there(report: HeldReport, received: Container[str] = ()) -> list[HeldRollout]:
    """Return what a worker holds and some process still has: not the rollouts that it has delivered, unless they are
    among those `received`.
    """
    return [
        each for each in report.held if each.end is None or not each.end.accepted or each.granted.rollout_id in received
    ]


class PendingReports:
    """The reports to a manager that is not rebuilt yet. Pure state.

    Args:
        until: time from which no worker is awaited, in seconds of the caller's clock.

    Attributes:
        run: the master's report.
        awaited: processes of workers, by incarnation, that must report; None until they are known.
        ended: processes of workers that ended meanwhile, to be applied to the rebuilt state.
    """

    def __init__(self, until: float = 0.0) -> None:
        self._until = until
        self.run: RunBegin | None = None
        self.awaited: Mapping[str, int] | None = None
        self.ended: list[EndedProcess] = []
        self._reports: dict[str, dict[int, HeldReport]] = {}
        self._held: dict[str, HeldRollout] = {}

    @property
    def reports(self) -> list[HeldReport]:
        """Reports of the workers' processes, with the ends that they reported since.

        Of a process that another has replaced since, only the rollouts that ended count: it may have been the only one
        to know that the trainer has them.
        """
        found: list[HeldReport] = []
        received = set() if self.run is None else {each.rollout_id for each in self.run.received}
        for worker, of_worker in sorted(self._reports.items()):
            for incarnation, report in sorted(of_worker.items()):
                held = [self._held[each.granted.rollout_id] for each in still_there(report, received)]
                if incarnation < max(of_worker):
                    held = [each for each in held if each.end is not None]
                found.append(HeldReport(worker, incarnation, held))
        return found

    @property
    def is_complete(self) -> bool:
        """True if the master and all awaited workers, or later processes of them, have reported."""
        if self.run is None or self.awaited is None:
            return False
        return all(incarnation <= max(self._reports.get(name, [-1])) for name, incarnation in self.awaited.items())

    def await_workers(self, ready: Mapping[str, int], now: float) -> None:
        """Await the reports of these workers' processes, by incarnation; of no worker once the leases are over."""
        self.awaited = ready if now < self._until else {}

    def take(self, report: HeldReport) -> None:
        """Record the rollouts that a worker's process holds; called with its first report only."""
        self._reports.setdefault(report.worker, {})[report.incarnation] = report
        self._held |= {each.granted.rollout_id: each for each in report.held}

    def finish(self, finished: FinishedRollout) -> None:
        """Record an end that a worker reports after its first report."""
        if (held := self._held.get(finished.rollout_id)) is not None:
            self._held[finished.rollout_id] = HeldRollout(held.granted, finished)

    def admitted_at(self, rollout_id: str) -> int:
        """Return the version that a rollout was admitted at if a worker holds it, else 0."""
        held = self._held.get(rollout_id)
        return 0 if held is None else held.granted.version

    def has_ended(self, rollout_id: str) -> bool:
        """True if a worker that held the rollout has reported its end."""
        held = self._held.get(rollout_id)
        return held is not None and held.end is not None


class Suspects:
    """Finds the prompts that kill their worker ("poison messages"), before they use up its restarts. Pure state,
    bounded by the prompts running when workers die.

    A worker runs many prompts at once, and dies with all of them. One of them may be the cause (an environment that
    runs out of memory, a native parser that crashes), or none, if something outside killed the worker. A prompt that
    kills would kill again in the same company, and could not be told from its neighbours. So:

    1. After a death every running prompt is a suspect. A worker runs one suspect at a time, beside prompts that are
       not. A suspect that ends is cleared.
    2. A suspect that was running at a second death runs alone: its worker first finishes what it runs, and begins
       nothing else until the suspect has ended.
    3. A suspect that was running alone at a third death is dropped for good (`crashed_worker`).

    Only the running suspect is blamed for a death. Nothing is blamed if a suspect that should have been alone was not.
    So a prompt that crashes its worker costs three restarts, and each further one of the same company two.

    SIGKILL mostly comes from outside. (`asyncrl.runtime.supervisor` recognises the kernel's kills when memory ran out.)
    It may still be a prompt's doing: code that sends it to itself, or a memory guard other than the kernel. So it
    counts half: a prompt that is running at six such deaths, at the last two of them alone, is dropped. Once no prompt
    was running at all of them, something outside kills workers, and SIGKILL counts nothing for as long as this manager
    lives.

    Example: A, B and C are running when the worker dies. Its successor runs A with D and E: all end well, A is cleared.
    It runs B with F and G, and dies. F, G and C are run; then B, alone. The worker dies once more: B is dropped.

    Suspicions die with the manager: no other process knows how a worker died. A prompt that kills is found again by the
    deaths that follow.

    Args:
        in_hand: returns the prompts that a worker runs now.
    """

    def __init__(self, in_hand: Callable[[str], Collection[str]]) -> None:
        self._in_hand = in_hand
        self._against: dict[str, int] = {}
        self._playing: dict[str, str] = {}
        self._promised: dict[str, str] = {}  # by worker the suspect that it plays next, alone
        self._at_every_kill: frozenset[str] | None = None  # the prompts in hand at all of them; None before the first

    def __bool__(self) -> bool:
        """True if there is a suspect."""
        return bool(self._against)

    def tried_alone(self, prompt_id: str) -> bool:
        """True if `prompt_id` must run alone in its worker."""
        return self._against.get(prompt_id, 0) >= ALONE

    def tries_alone(self, worker: str) -> bool:
        """True if `worker` runs a suspect that must be alone."""
        return worker in self._playing and self.tried_alone(self._playing[worker])

    def promised_to(self, worker: str) -> list[str]:
        """Return the suspects that `worker` may run alone: the one promised to it, or all that are promised to none."""
        if (mine := self._promised.get(worker)) is not None and self.tried_alone(mine):
            return [mine]
        others = {prompt for other, prompt in self._promised.items() if other != worker}
        return [prompt for prompt in self._against if self.tried_alone(prompt) and prompt not in others]

    def promise(self, worker: str, prompt_id: str) -> None:
        """Reserve `prompt_id` for `worker`, which begins no other prompt until all that it runs has ended."""
        self._promised[worker] = prompt_id

    def must_wait(self, worker: str, prompt_id: str) -> bool:
        """True if `worker` may not begin `prompt_id` now, because of what else it runs."""
        playing = self._playing.get(worker, prompt_id)
        if playing != prompt_id:
            return prompt_id in self._against or self.tried_alone(playing)
        return self.tried_alone(prompt_id) and any(other != prompt_id for other in self._in_hand(worker))

    def began(self, worker: str, prompt_id: str) -> None:
        """Record that `worker` runs `prompt_id`."""
        if prompt_id in self._against and self._playing.get(worker) != prompt_id:
            self._playing[worker] = prompt_id

    def ended(self, worker: str, prompt_id: str) -> None:
        """Clear `prompt_id`, which ended on `worker` in some way; another suspect may run there."""
        self._against.pop(prompt_id, None)
        if self._playing.get(worker) == prompt_id:
            self._stop(worker)

    def silent(self, worker: str) -> None:
        """Record that `worker` is silent, which need not be a death; its prompts are played again."""
        self._stop(worker)

    def died(self, worker: str, in_hand: Collection[str], *, killed: bool = False) -> str | None:
        """Record that `worker` died.

        Args:
            in_hand: prompts that it ran.
            killed: the launcher reports that it was killed from outside.

        Returns:
            The prompt that must be dropped for good; None if there is none.
        """
        suspect = self._stop(worker)
        if killed:
            at_this = frozenset(in_hand)
            self._at_every_kill = at_this if self._at_every_kill is None else self._at_every_kill & at_this
            if not self._at_every_kill:
                return None
        count = KILL if killed else CRASH
        if suspect is None or suspect not in self._against:  # or another worker saw it end
            for prompt_id in in_hand:
                self._against.setdefault(prompt_id, count)
            return None
        if self.tried_alone(suspect) and any(other != suspect for other in in_hand):
            return None
        self._against[suspect] += count
        if self._against[suspect] < DROPPED:
            return None
        del self._against[suspect]
        return suspect

    def _stop(self, worker: str) -> str | None:
        """Record that `worker` runs no suspect from now on; return the one that it ran."""
        self._promised.pop(worker, None)
        return self._playing.pop(worker, None)
