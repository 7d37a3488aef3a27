"""Optional, `rollout.pacing=deadline`: when to start a rollout that the staleness gate would admit, so that it is ready
in time and still young.

The gate bounds the age of tokens. If training is the bottleneck, rollouts fill all the room of the gate and wait,
finished, until they are nearly that old. By Little's law, with W live rollouts and B per step, trained tokens are about
W/B - 1 versions old. `DeadlinePacing` starts as many rollouts as are expected to be needed by the time they finish,
plus a margin, which grows when steps have to wait.

Let D be a rollout's duration and h its median (the horizon). Let T be the time of a step without its wait for data, and
q the share of rollouts that are kept (filters reject the others). In the next h seconds training takes B h/T rollouts.
By then these are ready: those finished now, the running ones that finish in time, each with probability

    p(age) = P(D <= age + h | D > age),

and the share P(D <= h) of those started now. So to have m batches to spare at the horizon, start

    allowance = (B h/T + m B - finished - q sum p(age)) / (q P(D <= h)),          rounded up.

`finished` excludes the batch in training. Both probabilities come from the most recent durations. The margin m adapts:
at each step that waited w of its s seconds,

    m += min(1/4, w/s) - max(1/200, leftover / 4B),          within [0.1, η], from 0.5.

`leftover` is the smallest number of rollouts left beyond a batch in the last eight steps, counted once per eight steps:
these rollouts only age. Rises are limited, since the waits at a run's start do not predict later ones. If generation is
the bottleneck, steps wait, m rises to η, and only the gate decides, as with `eager`.

Why it is safe:

1. It only lowers the gate's room, so the gate's bound and its proof still hold.
2. It never deadlocks. A step begins once B are finished. While no step is under way, allowance >= B - running -
   finished, so the rollouts missing from a batch may start. While one is under way and nothing runs: if fewer than B
   others are finished (as some were dropped), allowance >= m B > 0; if B are, that batch can be taken.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

START_MARGIN = 0.5
LEAST_MARGIN = 0.1
LARGEST_RISE = 0.25
"""Largest rise of the margin at one step, in batches; all margins are in batches."""
DECAY = 0.005
"""Decrease of the margin at each step, so that it finds the smallest margin that suffices. It is also the share of a
step's time that is spent waiting for data in the long run.
"""
DRAIN = 0.25
LEFTOVER_STEPS = 8
DURATIONS_KEPT = 16
"""Number of batches whose durations form the distribution."""
STEPS_KEPT = 8
REFRESHES = 64
"""Number of times that the sum over running rollouts is recomputed per horizon or step, the shorter of the two."""


class RecentRollouts:
    """The most recent rollouts: the distribution of D with its median h, and q. `learn` updates the distribution."""

    def __init__(self, batch_size: int) -> None:
        self._batch = batch_size
        self._durations: deque[float] = deque(maxlen=DURATIONS_KEPT * batch_size)
        self._sorted: NDArray[np.float64] = np.zeros(0)
        self._kept: deque[bool] = deque()
        self._kept_sum = 0

    def __len__(self) -> int:
        """Number of durations in the distribution."""
        return len(self._sorted)

    def ended(self, duration: float, *, kept: bool) -> None:
        """Record a rollout that finished, or was dropped (not `kept`)."""
        self._kept.append(kept)
        self._kept_sum += kept
        if len(self._kept) > DURATIONS_KEPT * self._batch:
            self._kept_sum -= self._kept.popleft()
        if kept:
            self._durations.append(duration)

    def learn(self) -> None:
        """Make the recorded durations the distribution."""
        self._sorted = np.sort(np.array(self._durations))

    @property
    def horizon(self) -> float:
        """h in seconds; the distribution must not be empty."""
        return float(self._sorted[(len(self._sorted) - 1) // 2])

    @property
    def share_kept(self) -> float:
        """q, at least one in a batch: if all were rejected so far, the number of rollouts to start must stay finite."""
        return max(self._kept_sum / len(self._kept), 1.0 / self._batch) if self._kept else 1.0

    @property
    def share_in_time(self) -> float:
        """Share of rollouts starting now that are kept and finished at the horizon: q P(D <= h)."""
        return self.share_kept * float(self._share_by(self.horizon)) if len(self) else self.share_kept

    def finish_in_time(self, ages: NDArray[np.float64]) -> float:
        """Return the number of running rollouts of these ages that are kept and finish in time: q sum p(age)."""
        before, by = self._share_by(ages), self._share_by(ages + self.horizon)
        expected = ((by - before) / np.maximum(1.0 - before, 1.0 / len(self))).sum()
        return self.share_kept * float(expected)

    def _share_by(self, durations: NDArray[np.float64] | float) -> NDArray[np.float64]:
        return np.searchsorted(self._sorted, durations, side="right") / len(self._sorted)


class Margin:
    """m, the batches to spare at the horizon: `value`, learned from the waits and the rollouts left of each step."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch = batch_size
        self._most = max(float(max_staleness), LEAST_MARGIN)
        self._leftover: deque[int] = deque(maxlen=LEFTOVER_STEPS)
        self.value = min(START_MARGIN, self._most)

    def left(self, rollouts: int) -> None:
        """Record the number of rollouts that a step left beyond a batch."""
        self._leftover.append(rollouts)

    def waited(self, share: float) -> None:
        """Adapt to a step that waited for data for this share of its time."""
        leftover = 0
        if len(self._leftover) == LEFTOVER_STEPS and (leftover := min(self._leftover)):
            self._leftover.clear()
        fall = max(DECAY, DRAIN * leftover / self._batch)
        self.value = min(max(self.value + min(LARGEST_RISE, share) - fall, LEAST_MARGIN), self._most)


class DeadlinePacing:
    """Limits how many rollouts start. Pure state: times are the caller's, in seconds of one clock.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
    """

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch = batch_size
        self.margin = Margin(batch_size, max_staleness)
        self._recent = RecentRollouts(batch_size)
        self._started: dict[str, float] = {}
        self._training: deque[float] = deque(maxlen=STEPS_KEPT)
        self._asked_at: float | None = -math.inf
        self._begun_at: float | None = None
        self._wanted = self._refresh_at = 0.0

    @property
    def training(self) -> bool:
        """True if a train step is running, judged by counts: its batch is among the finished rollouts."""
        return self._asked_at is None

    def started(self, rollout_id: str, now: float) -> None:
        """Record that the rollout was admitted; a repeated call changes nothing."""
        if rollout_id not in self._started:
            self._started[rollout_id] = now
            self._wanted -= self._recent.share_in_time

    def ended(self, rollout_id: str, now: float, *, kept: bool) -> None:
        """Record that the rollout finished, or was dropped (not `kept`)."""
        begun = self._started.pop(rollout_id, None)
        if begun is None:
            return
        self._recent.ended(now - begun, kept=kept)
        if not kept:
            self._refresh_at = -math.inf

    def asked(self, finished: int, now: float) -> None:
        """Record that a step is over and its rollouts left the count: the trainer asks for a batch of the `finished`
        ones.
        """
        self._asked_at = now
        self.margin.left(max(0, finished - self._batch))
        self._refresh_at = -math.inf
        self.observe(finished, now)

    def observe(self, finished: int, now: float) -> None:
        """Record that `finished` rollouts wait for training; the step begins once they make a batch."""
        if self._asked_at is None or finished < self._batch:
            return
        if self._begun_at is not None:
            step = max(now - self._begun_at, 1e-9)
            wait = min(now - self._asked_at, step)
            self._training.append(max(step - wait, 1e-9))
            self.margin.waited(wait / step)
        self._asked_at, self._begun_at = None, now
        self._recent.learn()
        self._refresh_at = -math.inf

    def allowance(self, finished: int, now: float) -> int:
        """Return how many rollouts should start now; `finished` as in `observe`."""
        running, batch = len(self._started), self._batch
        spare = finished - batch if self.training else finished
        least = 0 if self.training else batch - running - finished
        if len(self._recent) < batch or not self._training:
            return max(0, least, 2 * batch - running - spare)
        if now >= self._refresh_at:
            self._refresh(now)
        missing = self._wanted - spare
        return max(0, least, math.ceil(missing / self._recent.share_in_time))

    def _refresh(self, now: float) -> None:
        """Recompute the number of rollouts wanted at the horizon beyond the running ones, before subtracting finished
        ones.
        """
        horizon, step = self._recent.horizon, sum(self._training) / len(self._training)
        ages = now - np.fromiter(self._started.values(), np.float64, len(self._started))
        self._wanted = self._batch * (horizon / step + self.margin.value) - self._recent.finish_in_time(ages)
        self._refresh_at = now + min(horizon, step) / REFRESHES
