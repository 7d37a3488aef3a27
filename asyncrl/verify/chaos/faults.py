"""The faults of a chaos run: their plan, made from a seed, the clock that follows it, and the effects of each.

Plan
----
A fault is tied to a train step. So the faults are spread over the run at any speed, and all of them happen before its
end. Fault i of n is due the fraction `offset` of a typical step after `step` steps are done, at the latest when the
next step is done. So faults do not always come at the beginning of a step.

    steps      1     2     3     4     5     6     7     8     9      9 steps, 3 faults
    faults       x           x                  x

Kinds of processes take turns: every len(kinds) kills include each kind once, in a new order. So 20 kills over 6 kinds
are 3 or 4 of each.

Effects
-------
They are read from the run's own files: the time until the run continued, and the costs. Times are seconds since 1970,
as in the files.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from asyncrl.comm import names
from asyncrl.comm.ended_rollouts import Admitted, Begin, Dropped, DropReason, Finished, Step, Trained
from asyncrl.runtime.run_log import BRAIN, WHOLE_RUN
from asyncrl.verify.audit.ledger_files import Entry

FIRST_STEP = 1
"""No fault before this step is done: the plan tests how a running run continues, not how it starts."""
LAST_STEPS = 3
"""Number of last steps without faults: the run must have steps left to show that it continues."""
_STEPS_REMEMBERED = 9


class FaultKind(StrEnum):
    """Kinds of faults."""

    kill = "kill"
    """SIGKILL."""
    pause = "pause"
    """SIGSTOP, and SIGCONT after a while."""
    cut = "cut"
    """All connections to a server are broken, messages in flight are lost, and no connection is accepted for a while.
    """
    delay = "delay"
    """All messages to and from a server are delayed for a while."""
    full_disk = "full_disk"
    """The run's file system is full for a while."""


SECONDS = {
    FaultKind.kill: (0.0, 0.0),
    FaultKind.pause: (2.0, 20.0),  # up to twice the lease of a process
    FaultKind.cut: (0.0, 3.0),
    FaultKind.delay: (2.0, 6.0),
    FaultKind.full_disk: (3.0, 12.0),
}
"""Shortest and longest duration of each kind, in s."""
DELAY_S = 0.2
"""Delay of a message in each direction, in s."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The `number`-th fault, from 1: `kind` hits `target` for `seconds`."""

    number: int
    kind: FaultKind
    target: str
    step: int
    offset: float
    seconds: float


def make_plan(
    targets: Mapping[FaultKind, Mapping[str, Sequence[str]]],
    counts: Mapping[FaultKind, int],
    *,
    steps: int,
    seed: int,
    every: int | None = None,
) -> tuple[Fault, ...]:
    """Return the faults in the order in which they are due.

    Args:
        targets: for each kind of fault and of target (`rollout_worker`), the existing targets (`rollout_worker/0`).
        counts: number of faults of each kind.
        steps: train steps of the run.
        seed: decides the plan.
        every: steps between two faults; None: as many as the run allows.

    Raises:
        ValueError: the faults do not fit in the run, or there is no target.
    """
    chance = random.Random(seed)
    drawn = [(kind, target) for kind in FaultKind for target in _take_turns(kind, targets, counts, chance)]
    chance.shuffle(drawn)
    last = steps - LAST_STEPS
    spacing = max(0.0, last - FIRST_STEP) / max(1, len(drawn) - 1) if every is None else float(every)
    if last < FIRST_STEP or FIRST_STEP + spacing * (len(drawn) - 1) > last + 1e-6:
        needed = FIRST_STEP + LAST_STEPS + (every or 0) * (len(drawn) - 1)
        raise ValueError(
            f"total_train_steps={steps}: {len(drawn)} faults"
            + (f", one every {every} steps," if every is not None else "")
            + f" need {needed} at least; give more steps, or fewer faults"
        )
    return tuple(
        Fault(
            number=number,
            kind=kind,
            target=target,
            step=int(FIRST_STEP + spacing * (number - 1) + 1e-6),
            offset=round(chance.random(), 3),
            seconds=round(chance.uniform(*SECONDS[kind]), 1),
        )
        for number, (kind, target) in enumerate(drawn, 1)
    )


def _take_turns(
    kind: FaultKind,
    targets: Mapping[FaultKind, Mapping[str, Sequence[str]]],
    counts: Mapping[FaultKind, int],
    chance: random.Random,
) -> Iterator[str]:
    """Yield targets; their kinds take turns."""
    groups = {name: of_kind for name, of_kind in targets.get(kind, {}).items() if of_kind}
    count = counts.get(kind, 0)
    if count and not groups:
        raise ValueError(f"{count} of {str(kind)!r}: this run has no target for this fault")
    turn: list[str] = []
    for _ in range(count):
        if not turn:
            turn = sorted(groups)
            chance.shuffle(turn)
        yield chance.choice(groups[turn.pop()])


class PlanClock:
    """Decides which faults of a plan are due; the caller provides the time and the completed steps."""

    def __init__(self, plan: Sequence[Fault]) -> None:
        self._left = deque(plan)
        self._step = 0
        self._step_at_s: float | None = None
        self._lengths_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._reached_s: float | None = None  # when the step of the next fault was done

    @property
    def left(self) -> tuple[Fault, ...]:
        """Return the faults that were not due yet."""
        return tuple(self._left)

    def step_done(self, step: int, now_s: float) -> None:
        """Record that train step `step` is done. Steps may repeat after the death of a launch."""
        if self._step_at_s is not None and step == self._step + 1:
            self._lengths_s.append(now_s - self._step_at_s)
        self._step, self._step_at_s = step, now_s
        self._look(now_s)

    def due(self, now_s: float) -> Fault | None:
        """Return the next fault if it is due; the caller must then inject it."""
        if not self._left or self._reached_s is None:
            return None
        typical_s = statistics.median(self._lengths_s) if self._lengths_s else 0.0
        if self._step <= self._left[0].step and now_s < self._reached_s + self._left[0].offset * typical_s:
            return None
        fault = self._left.popleft()
        self._reached_s = None
        self._look(now_s)
        return fault

    def _look(self, now_s: float) -> None:
        if self._left and self._reached_s is None and self._step >= self._left[0].step:
            self._reached_s = now_s


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

    @property
    def kind(self) -> str:
        """Return the kind of process that was hit."""
        return self.fault.target.partition("/")[0]


def replaced_as(target: str) -> str:
    """Return the name, in `restarts.jsonl`, of the unit that restarts after the death of `target`."""
    return BRAIN if target.partition("/")[0] in _OF_BRAIN else target


def complete(
    done: Sequence[InjectedFault],
    steps: Sequence[tuple[float, int]],
    restarts: Sequence[Mapping[str, Any]],
    launches: Sequence[float] = (),
) -> None:
    """Fill in the times at which the run continued after each fault.

    Args:
        steps: for each row of metrics, the time when it was seen, and its step.
        restarts: lines of `restarts.jsonl`.
        launches: times at which a launcher had started all processes. Those of a killed launcher may end their step.
    """

    def resumed(each: InjectedFault) -> float | None:
        if each.kind != LAUNCHER:
            what = (replaced_as(each.fault.target), WHOLE_RUN)
            ends = (line["time"] for line in restarts if line.get("went_on") in what and line["time"] > each.at)
            return next(ends, None)
        began = next((at for at in launches if at > each.at), None)
        return None if began is None else next((seen for seen, _ in steps if seen > began), None)

    kills = [each for each in done if each.fault.kind is FaultKind.kill]
    for each in kills:
        later = (other for other in kills if other.at > each.at and _covers(other, each))
        next_kill = min(later, key=lambda other: other.at, default=None)
        resumed_at = resumed(each)
        if next_kill is not None and (resumed_at is None or next_kill.at < resumed_at):
            each.overtaken_by = next_kill.fault.number
            resumed_at = resumed(next_kill)
        each.ready_s = None if resumed_at is None else resumed_at - each.at
    for each in done:
        over = each.over if each.over is not None else each.at
        if each.fault.kind is FaultKind.kill and each.kind in _OF_BRAIN:
            over = max(over, each.at + (each.ready_s or 0.0))
        row = next((seen for seen, _ in steps if seen > over), None)
        if each.kind == LAUNCHER:
            row = None if each.ready_s is None else each.at + each.ready_s
        origin = each.at if each.fault.kind is FaultKind.kill else over
        each.next_step_s = None if row is None else row - origin


def _covers(later: InjectedFault, earlier: InjectedFault) -> bool:
    """True if the restart after `later` includes the restart that was due after `earlier`."""
    return later.kind == LAUNCHER or replaced_as(later.fault.target) == replaced_as(earlier.fault.target)


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
