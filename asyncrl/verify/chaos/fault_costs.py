"""Effects of each fault, from the run's own files: the time until the run continued, and the costs.

Times are seconds since 1970, as in the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.comm import names
from asyncrl.comm.ended_rollouts import Admitted, Begin, Dropped, DropReason, Finished, Step, Trained
from asyncrl.runtime.trials.restarts import BRAIN, WHOLE_RUN
from asyncrl.verify.audit.ledger_files import Entry
from asyncrl.verify.chaos.fault_plan import Fault, FaultKind

LAUNCHER = "launcher"
"""Name of the launcher among the processes."""
_OF_BRAIN = (names.MASTER_WORKER, names.GSERVER_MANAGER, names.MODEL_WORKER)
READY_SEEN_S = 0.5
"""Longest delay, in s, until a ready process is seen to be ready (`launcher.REFRESH_S`, plus the time of the check).
"""
_DEATHS = frozenset({DropReason.worker_died, DropReason.crashed_worker})


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected.

    Attributes:
        fault: the planned fault.
        at: its time.
        after_step: the newest step at that time.
        note: details of the target.
        over: the time of its end; `at` for a kill, the time of the process's resumption for a pause.
        serves: the time at which the successor of a killed GenerationServer got requests.
        overtaken_by: the number of a later kill of the same process that came before it had recovered.
    """

    fault: Fault
    at: float
    after_step: int
    note: str = ""
    over: float | None = None
    serves: float | None = None
    overtaken_by: int | None = None
    ready_s: float | None = None
    """Time from the kill until the replacement was ready."""
    at_work_s: float | None = None
    """Time from the kill until the replacement did its first work."""
    next_step_s: float | None = None
    """Time from the kill, or from the end of a longer fault, until the next train step was done."""
    rollouts: int = 0
    """Number of rollouts that were discarded because of it and repeated."""
    tokens: int = 0
    """Tokens of those of these rollouts that had reached the trainer. Tokens of running rollouts are not recorded."""
    steps_again: int = 0
    """Number of complete steps that were trained again, without the running step."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for a file."""
        return asdict(self)

    @property
    def kind(self) -> str:
        """Return the kind of process that was hit."""
        return self.fault.target.partition("/")[0]


def replaced_as(target: str) -> str:
    """Return the name, in `restarts.jsonl`, of the unit that restarts after the death of `target`."""
    return BRAIN if target.partition("/")[0] in _OF_BRAIN else target


def complete(
    done: Sequence[InjectedFault], steps: Sequence[tuple[float, int]], restarts: Sequence[Mapping[str, Any]]
) -> None:
    """Fill in the times at which the run continued after each fault.

    `steps`: for each row of metrics, the time when it was seen, and its step. `restarts`: lines of `restarts.jsonl`.
    """
    kills = [each for each in done if each.fault.kind is FaultKind.kill]
    for each in kills:
        later = (other for other in kills if other.at > each.at and _covers(other, each))
        next_kill = min(later, key=lambda other: other.at, default=None)
        went_on = _went_on(each, restarts, steps)
        if next_kill is not None and (went_on is None or next_kill.at < went_on):
            each.overtaken_by = next_kill.fault.number
            went_on = _went_on(next_kill, restarts, steps)
        each.ready_s = None if went_on is None else went_on - each.at
    for each in done:
        over = each.over if each.over is not None else each.at
        if each.fault.kind is FaultKind.kill and each.kind in _OF_BRAIN:
            over = max(over, each.at + (each.ready_s or 0.0))
        row = next((seen for seen, _ in steps if seen > over), None)
        origin = each.at if each.fault.kind is FaultKind.kill else over
        each.next_step_s = None if row is None else row - origin


def _covers(later: InjectedFault, earlier: InjectedFault) -> bool:
    """True if the restart after `later` includes the restart that was due after `earlier`."""
    return later.kind == LAUNCHER or replaced_as(later.fault.target) == replaced_as(earlier.fault.target)


def _went_on(
    each: InjectedFault, restarts: Sequence[Mapping[str, Any]], steps: Sequence[tuple[float, int]]
) -> float | None:
    """Return the time when the replacement was ready. After the death of a launcher, only the next step shows this."""
    if each.kind == LAUNCHER:
        return next((seen for seen, _ in steps if seen > each.at), None)
    what = (replaced_as(each.fault.target), WHOLE_RUN)
    return next((line["time"] for line in restarts if line.get("went_on") in what and line["time"] > each.at), None)


def find_work(done: Sequence[InjectedFault], entries: Sequence[Entry]) -> None:
    """Fill in the time of each replacement's first work, by the ledger's lines.

    - RolloutWorker: its first admitted rollout.
    - The brain, and a launcher: the next step.
    - GenerationServer: its first requests, which were observed during the run.
    """
    for each in done:
        if each.fault.kind is not FaultKind.kill or each.ready_s is None:
            continue
        if each.kind == names.GENERATION_SERVER:
            each.at_work_s = None if each.serves is None else each.serves - each.at
        elif each.kind in (*_OF_BRAIN, LAUNCHER):
            each.at_work_s = each.next_step_s
        else:
            ready = each.at + each.ready_s - READY_SEEN_S  # earlier grants were to the dead process
            admitted = (entry.line for entry in entries if isinstance(entry.line, Admitted))
            began = (line.at for line in admitted if line.at > ready and line.worker == each.fault.target)
            work = min(began, default=None)
            each.at_work_s = None if work is None else work - each.at


def add_costs(done: Sequence[InjectedFault], entries: Sequence[Entry]) -> None:
    """Fill in the cost of each fault: the rollouts and steps that the ledger shows were discarded because of it.

    A rollout that was dropped because its worker died counts for the last kill of that worker, if there was a kill.
    Lines that a lineage ruled out count for the last kill of the launcher or the brain, but for rollouts that went on.
    All others count for the last fault before them.
    """
    workers = {line.rollout: line.worker for line in (entry.line for entry in entries) if isinstance(line, Admitted)}
    drops, tokens = _drops(entries)
    for rollout, at in drops.items():
        if (cause := _last_before(done, at, workers.get(rollout))) is not None:
            cause.rollouts += 1
            cause.tokens += tokens.get(rollout, 0)
    adopted = {
        line.rollout for line in (entry.line for entry in entries) if isinstance(line, Admitted) and line.adopted
    }
    for begin, forgotten in _forgotten(entries):
        if (cause := _last_before(done, begin.at, LAUNCHER, *_OF_BRAIN)) is None:
            continue
        lines = [entry.line for entry in forgotten]
        lost = {line.rollout for line in lines if isinstance(line, Admitted | Trained | Finished)} - adopted
        cause.rollouts += len(lost)
        cause.tokens += sum(line.tokens for line in lines if isinstance(line, Finished) and line.rollout in lost)
        cause.steps_again += sum(isinstance(line, Step) for line in lines)


def _drops(entries: Sequence[Entry]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the times of drops because of a death, and the tokens of rollouts that reached the trainer."""
    lines = [entry.line for entry in entries]
    drops = {line.rollout: line.at for line in lines if isinstance(line, Dropped) and line.reason in _DEATHS}
    return drops, {line.rollout: line.tokens for line in lines if isinstance(line, Finished)}


def _forgotten(entries: Sequence[Entry]) -> list[tuple[Begin, list[Entry]]]:
    """Return the entries of earlier launches that each launch ruled out."""
    kept: list[Entry] = []
    found = []
    for entry in entries:
        if isinstance(entry.line, Begin):
            lost = []
            while kept and kept[-1].number > entry.line.after:
                lost.append(kept.pop())
            if lost:
                found.append((entry.line, lost))
        kept.append(entry)
    return found


def _last_before(done: Sequence[InjectedFault], at: float, *targets: str | None) -> InjectedFault | None:
    """Return the last kill of one of `targets`, processes or kinds, before `at`; the last fault if there was none."""
    before = [each for each in done if each.at <= at]
    kills = [
        each for each in before if each.fault.kind is FaultKind.kill and {each.fault.target, each.kind} & set(targets)
    ]
    return max(kills or before, key=lambda each: each.at, default=None)
