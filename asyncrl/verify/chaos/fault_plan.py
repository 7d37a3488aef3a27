"""Plan of faults made from a seed, and the clock that follows it. Pure.

A fault is tied to a train step. So the faults are spread over the run at any speed, and all of them happen before its
end. Fault i of n is due the fraction `offset` of a typical step after `step` steps are done, at the latest when the
next step is done. So faults do not always come at the beginning of a step.

    steps      1     2     3     4     5     6     7     8     9      9 steps, 3 faults
    faults       x           x                  x

Kinds of processes take turns: every len(kinds) kills include each kind once, in a new order. So 20 kills over 6 kinds
are 3 or 4 of each.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
