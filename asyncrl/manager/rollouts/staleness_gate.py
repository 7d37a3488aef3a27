"""The staleness gate: when a new rollout may start.

Mechanism
---------
A rollout is admitted while ``trained + finished + running < (η + version + 1) · B``. ``B`` rollouts make a train step,
``η`` is the greatest lag allowed, and ``version`` is the version that is *served*: the least over the servers that
receive requests. The three counters cover every rollout between the dataset and the optimizer. A rollout that leaves
otherwise (dropped, abandoned) leaves the count.

Life cycle::

    start ─▶ running ─finish─▶ finished ─train─▶ trained
                │                  │
                ├──────drop────────┤──▶ dropped(reason)
                └─────abandon──────┘──▶ abandoned

Every arrow is taken once. What left the count does not come back, and a message about it changes nothing, however late
it comes or however often. So a prompt has one live rollout at most:

- ``finish`` is the trainer's message: it has received the rollout. The gate answers whether the rollout counts, and
  only what counts is trained.
- A rollout is lost if its worker falls silent, or if no process has it when the brain begins again. It is dropped like
  any other, and its prompt is played again. If the trainer receives it after all, it does not count.

Worked example
--------------
B = 2, η = 1, version 0: rollouts 1 to 4 start, the fifth waits (limit 4). 1 and 3 finish and are trained as step 0;
nothing changes for the gate (trained 2 + running 2) until version 1 is served: the limit is now 6, so 5 and 6 start
at version 1. Step 1 must take 2 and 4: at step 2 their tokens would be two versions old.

Derivation of the bound
-----------------------
Let step ``v`` be the one that turns version ``v`` into ``v + 1``; it trains B rollouts, so vB are trained before it.
Requests of a rollout admitted at version ``a`` go only to servers at ``a`` or newer, so all its tokens have versions
``≥ a``.

1. When a rollout is admitted at ``a``, counting itself at most ``(η + a + 1)B`` rollouts are trained or live. If
   rollouts are consumed in the order of their admission, fewer than ``(η + a + 1)B`` are trained before it, so its
   step is at most ``v = η + a``, and its staleness is ``v - a ≤ η``. A drop before it only brings its step forward;
   the place that becomes free goes to a later rollout, which is behind it in the order. ∎
2. ``version`` has to be the served version. With the trained version in its place, rollouts admitted between a train
   step and the servers' update would be counted as of ``a + 1`` while their first tokens are of ``a``: one more than
   η.
3. It never deadlocks: let the trainer of step ``v`` lack rollouts, so ``finished < B``, let nothing run and let the
   servers be at ``v``. Then ``vB + finished < (v + 1)B ≤ (η + v + 1)B`` and a start is granted.

What ``on_stale=wait`` needs
--------------------------
Rollouts that overtake break the order of (1), which is why the trainer checks the age at consumption again. Under
``wait`` it instead holds its step so that nothing expires. A rollout admitted at ``a`` has to be trained by step ``a
+ η``. Holding step ``v`` only while one with ``a ≤ v - η`` runs is too late: with B = 1, η = 2 let 1, 2, 3 start at
version 0; train 1, then 4 (admitted at 1, overtaking 2 and 3); at step 2 both 2 and 3 are due and one must expire.
Write ``N(a)`` for the live rollouts admitted at ``a`` or before, of which ``F(a)`` are finished. The invariant
(Hall's condition for deadlines) is, before each step ``v``,

    N(a) ≤ (a + η - v + 1) · B     for every a ≥ v - η.                                                        (H)

- Admission keeps (H): after a start at version ``a``, all live rollouts and vB trained ones are at most ``(η + a +
  1)B``.
- A step keeps (H) if it takes the oldest finished rollouts and if ``N(a) - min(F(a), B) ≤ (a + η - v) · B`` for every
  a. `blocking` returns the running rollouts that violate this. At ``a = v - η`` it requires that all due rollouts are
  in the batch; by (H) they fit.
- It never deadlocks: if nothing runs, ``F = N`` and the condition follows from (H).

All of this spans the death of a manager: its successor begins with all live rollouts at their versions of admission
(`asyncrl.manager.rollouts.workers`). One that only the trainer has enters at the version of its oldest token, which is
no older than its admission; it expires by that token, so (H) holds with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.comm.ended_rollouts import DropReason, RecentIds, RolloutCounts, ids_remembered

TRAINED, ABANDONED = "trained", "abandoned"
"""Outcomes of rollouts, besides the reasons of drops."""
WORKER_LOST = DropReason.worker_died.value
"""Drop reason of a rollout whose worker is gone."""
GONE = (WORKER_LOST, ABANDONED)
"""Outcomes of rollouts whose workers may not know that they are over."""
LOST_AND_OVER = "lost and over"
"""Outcome of a lost rollout whose worker has reported its end since."""


@dataclass(slots=True)
class LiveRollout:
    """A rollout that runs on the worker `owner`, or is `finished`: its prompt and try, and the version that it was
    admitted at.
    """

    rollout_id: str
    owner: str
    prompt_id: str = ""
    order: int = 0
    attempt: int = 0
    failures: int = 0
    version: int = 0
    finished: bool = False


class LiveRollouts:
    """Indices and counts of the rollouts that joined and have not parted.

    Every method takes time independent of the number of rollouts, except for those that it returns, and `running_at`.

    Attributes:
        running_count: number of running rollouts.
    """

    def __init__(self) -> None:
        self.running_count = 0
        self._by_id: dict[str, LiveRollout] = {}
        self._by_owner: dict[str, dict[str, LiveRollout]] = {}
        self._running_at: Counter[int] = Counter()  # by the version of admission
        self._finished_at: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._by_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def get(self, rollout_id: str) -> LiveRollout | None:
        """Return the rollout; None if it is not live."""
        return self._by_id.get(rollout_id)

    def running(self, rollout_id: str) -> LiveRollout | None:
        """Return a running rollout; None for any other."""
        live = self._by_id.get(rollout_id)
        return None if live is None or live.finished else live

    def running_of(self, owner: str) -> list[LiveRollout]:
        """Return the rollouts that run on worker `owner`."""
        return [live for live in self._by_owner.get(owner, {}).values() if not live.finished]

    def by_version(self) -> list[tuple[int, int, int]]:
        """Return each version of admission, ascending, with the numbers of its running and its finished rollouts."""
        versions = sorted(self._running_at.keys() | self._finished_at.keys())
        return [(version, self._running_at[version], self._finished_at[version]) for version in versions]

    def running_at(self, versions: Collection[int]) -> list[str]:
        """Return the running rollouts that were admitted at these versions, oldest first. Looks at all rollouts."""
        found = [live for live in self._by_id.values() if not live.finished and live.version in versions]
        return [live.rollout_id for live in sorted(found, key=lambda live: live.version)]

    def join(self, live: LiveRollout) -> None:
        """Add a rollout."""
        self._by_id[live.rollout_id] = live
        self._by_owner.setdefault(live.owner, {})[live.rollout_id] = live
        self._count(live, 1)

    def finish(self, live: LiveRollout) -> None:
        """Record that a running rollout is finished."""
        self._count(live, -1)
        live.finished = True
        self._count(live, 1)

    def part(self, rollout_id: str) -> LiveRollout | None:
        """Remove a rollout, and return it; None if it is not live."""
        live = self._by_id.pop(rollout_id, None)
        if live is None:
            return None
        of_owner = self._by_owner[live.owner]
        del of_owner[rollout_id]
        if not of_owner:
            del self._by_owner[live.owner]
        self._count(live, -1)
        return live

    def _count(self, live: LiveRollout, change: int) -> None:
        """Add `change` to the number of rollouts in this state, of this version of admission."""
        counts = self._finished_at if live.finished else self._running_at
        counts[live.version] += change
        if not counts[live.version]:
            del counts[live.version]
        if not live.finished:
            self.running_count += change


class StalenessGate:
    """Counts rollouts from start to optimizer, and decides when another may start. Theory in the module's docstring.

    Pure state: no clock, no sockets. Every method takes time independent of the number of rollouts, except for those
    that it returns or is given. A repeated call with the same arguments has no effect.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        retired_kept: rollouts remembered after they left the count, so that a late or repeated message about them
            changes nothing; about 100 bytes each. A message about a forgotten one is ignored like one about an unknown
            rollout. None: `ids_remembered`.
        most: rollouts that the whole run trains; no more are admitted. None: no limit, and the last steps train those
            that finish first.

    Attributes:
        live: the rollouts that run, or are finished and not trained yet.
    """

    def __init__(
        self, batch_size: int, max_staleness: int, *, retired_kept: int | None = None, most: int | None = None
    ) -> None:
        self.batch_size, self._most = batch_size, math.inf if most is None else most
        self.max_staleness = max_staleness
        self.version = 0
        self.trained_version = 0
        self.closed = False
        self.live = LiveRollouts()
        self._retired: RecentIds[str] = RecentIds(
            ids_remembered(batch_size, max_staleness) if retired_kept is None else retired_kept
        )
        self._submitted = 0
        self._trained = 0
        self._abandoned = 0
        self._dropped: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        """`(η + version + 1) · B`, and at most `most`: rollouts that may be trained or live."""
        return int(min(self._most, (self.max_staleness + self.version + 1) * self.batch_size))

    @property
    def counted(self) -> int:
        """`trained + finished + running`."""
        return self._trained + len(self.live)

    @property
    def finished(self) -> int:
        """Number of rollouts that finished and are not trained yet; those of a running step are among them."""
        return len(self.live) - self.live.running_count

    @property
    def capacity(self) -> int:
        """Number of rollouts that may start now."""
        return 0 if self.closed else max(0, self.limit - self.counted)

    def resume(self, version: int, dropped: Mapping[str, int], ended: RecentIds[str] | None = None) -> None:
        """Continue a run at `version`: `version · B` rollouts count as submitted and trained. Earlier drops, by reason,
        count as submitted too.

        Args:
            ended: rollouts that left the count before, with their outcomes; None: none is known.

        Raises:
            ValueError: rollouts were already submitted.
        """
        if self._submitted:
            raise ValueError(f"cannot resume at version {version}: {self._submitted} rollouts are already submitted")
        self._trained = version * self.batch_size
        self._dropped = Counter(dropped)
        self._submitted = self._trained + self._dropped.total()
        self.trained_version = version
        if ended is not None:
            self._retired = ended

    def enter(self, live: LiveRollout) -> None:
        """Enter a running rollout that an earlier gate admitted at `live.version`. It counts, whatever the limit is."""
        self.live.join(live)
        self._submitted += 1

    def start(self, live: LiveRollout) -> int | None:
        """Admit a rollout; return the version it is admitted at, or None if it has to wait.

        A running rollout gets the same answer again.

        Raises:
            ValueError: a rollout of this id has left the count; each attempt needs an id of its own.
        """
        if (known := self.live.get(live.rollout_id)) is not None:
            return known.version
        if (outcome := self.outcome(live.rollout_id)) is not None:
            raise ValueError(f"rollout_id {live.rollout_id!r} is already {outcome}; give each attempt an id of its own")
        if self.capacity == 0:
            return None
        live.version = self.version
        self.enter(live)
        return self.version

    def finish(self, rollout_id: str) -> LiveRollout | None:
        """Record that the trainer has the rollout; return it if that was not known yet, else None."""
        live = self.live.running(rollout_id)
        if live is not None:
            self.live.finish(live)
        return live

    def drop(self, rollout_id: str, reason: str) -> LiveRollout | None:
        """Remove the rollout from the count for `reason`; return it, None if it is not live."""
        live = self._part(rollout_id, reason)
        if live is not None:
            self._dropped[reason] += 1
        return live

    def refuse(self, rollout_id: str) -> None:
        """Record that the trainer may not train a rollout that is not live. If it was unknown, it is lost from now on:
        its worker may report it later.
        """
        if self.outcome(rollout_id) is None:
            self._retired.put(rollout_id, WORKER_LOST)

    def over(self, rollout_id: str) -> None:
        """Record that the worker of a rollout that is not live has reported its end: late calls of it are void."""
        if rollout_id not in self.live and not self.has_ended(rollout_id):
            self._retired.put(rollout_id, LOST_AND_OVER)

    def train(self, version: int, rollout_ids: list[str]) -> None:
        """Record that the optimizer consumed `rollout_ids`; the trainer's policy is now `version`."""
        self._trained += sum(self._part(rollout_id, TRAINED) is not None for rollout_id in rollout_ids)
        self.trained_version = max(self.trained_version, version)

    def advance(self, version: int) -> bool:
        """Set the least served version, which never decreases; return True if it changed."""
        if version <= self.version:
            return False
        self.version = version
        return True

    def is_blocked(self, step: int) -> bool:
        """True if step `step` has to wait for a running rollout, so that none expires (module docstring).

        Looks only at the versions of admission, a few more than η.
        """
        return bool(self._blocking_versions(step))

    def blocking(self, step: int) -> list[str]:
        """Return the running rollouts that step `step` has to wait for, so that none expires (module docstring); oldest
        first.

        Looks at all live rollouts.
        """
        return self.live.running_at(set(self._blocking_versions(step)))

    def admitted_at(self, rollout_id: str) -> int | None:
        """Return the version that a rollout was admitted at, if it runs; else None."""
        live = self.live.running(rollout_id)
        return None if live is None else live.version

    def outcome(self, rollout_id: str) -> str | None:
        """Return how the rollout left, if that is remembered: `TRAINED`, `ABANDONED`, or the reason for which it was
        dropped.
        """
        return self._retired.get(rollout_id)

    def has_ended(self, rollout_id: str) -> bool:
        """True if the rollout finished or left the count, and its worker knows that it is over."""
        live = self.live.get(rollout_id)
        if live is not None:
            return live.finished
        outcome = self._retired.get(rollout_id)
        return outcome is not None and outcome not in GONE

    def close(self) -> None:
        """Start no rollout from now on."""
        self.closed = True

    def abandon(self) -> list[str]:
        """Close, and count every live rollout as abandoned at exit; return these."""
        self.close()
        abandoned = list(self.live)
        for rollout_id in abandoned:
            self._part(rollout_id, ABANDONED)
        self._abandoned += len(abandoned)
        return abandoned

    def counts(self) -> RolloutCounts:
        """Return the present counters."""
        return RolloutCounts(
            submitted=self._submitted,
            trained=self._trained,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            abandoned=self._abandoned,
            running=self.live.running_count,
            finished_untrained=self.finished,
        )

    def _blocking_versions(self, step: int) -> list[int]:
        """Return the versions of admission whose running rollouts `step` has to wait for, ascending."""
        count = finished = 0  # N(version) and F(version) of (H)
        blocked_to: int | None = None
        by_version = self.live.by_version()
        for version, now_running, now_finished in by_version:
            finished += now_finished
            count += now_running + now_finished
            if count - min(finished, self.batch_size) > max(0, version + self.max_staleness - step) * self.batch_size:
                blocked_to = version
        if blocked_to is None:
            return []
        return [version for version, now_running, _ in by_version if now_running and version <= blocked_to]

    def _part(self, rollout_id: str, outcome: str) -> LiveRollout | None:
        """Remove a live rollout, and remember how it left; None if it is not live."""
        live = self.live.part(rollout_id)
        if live is not None:
            self._retired.put(rollout_id, outcome)
        return live
