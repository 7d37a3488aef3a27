"""The state that the ledger's lines add up to: live and ended rollouts, used prompts, counters, prompts to try again.

It is computed line by line, purely. The ledger keeps it up to date (`asyncrl.master.books.ledger`), and a new
MasterWorker recomputes it from the files. At every line with books it equals them.

The new GserverManager receives this state (`asyncrl.manager.rollouts.rebuild`). Lines that are still in memory would be
lost with the MasterWorker, so the ledger hands all lines to the kernel before any report that follows from them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from asyncrl.comm.ended_rollouts.ledger_lines import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    Finished,
    LedgerBooks,
    Line,
    Manager,
    PromptGoes,
    RolloutLine,
    Step,
    Trained,
)
from asyncrl.comm.ended_rollouts.recent_ids import RecentIds, ids_remembered
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts

TRAINED, ABANDONED = "trained", "abandoned"


class Retry(NamedTuple):
    """The next try of a waiting prompt: its attempt, and how many tries of the prompt have failed."""

    order: int
    attempt: int
    failures: int


class Recorded:
    """The state so far. `take` the lines in order, without those that a later launch ruled out.

    Attributes:
        open: admissions of the rollouts that have not ended, by rollout.
        finished: the open rollouts that the trainer has.
        ended: outcomes of the last rollouts of this launch that ended, by rollout: the reason of a drop, `TRAINED` or
            `ABANDONED`; as many as the gate remembers.
        used: prompts that were trained or dropped for good.
        dropped: counts by reason.
        retries: by prompt, for waiting prompts whose next try is not their first.
        version: number of complete steps.
        manager: number of the GserverManager that wrote the newest lines about rollouts; 0 before the first.
        heard: number of this manager's lines.
    """

    def __init__(self) -> None:
        self.open: dict[str, Admitted] = {}
        self.finished: set[str] = set()
        self.ended: RecentIds[str] = RecentIds(1)
        self.used = UsedPrompts()
        self.dropped: Counter[str] = Counter()
        self.retries: dict[str, Retry] = {}
        self.version = self.manager = self.heard = 0
        self.abandoned = 0
        self._trained = 0

    def take(self, line: Line) -> None:
        """Add one line."""
        self.heard += isinstance(line, RolloutLine)
        match line:
            case Begin():
                self._begin(line)
            case Manager():
                self.manager, self.heard = line.number, 0
            case Admitted():
                if line.rollout not in self.ended:  # else it was trained while the gate could not be asked
                    self.open[line.rollout] = line
                    self.retries.pop(line.prompt, None)
            case Finished():
                self._finish(line.rollout)
            case Dropped():
                self._drop(line)
            case Abandoned() if self._close(line.rollout, ABANDONED):
                self.abandoned += 1
            case Trained():
                self._train(line)
            case Step():
                self.version = line.step

    def books(self) -> LedgerBooks:
        """Return the counters as the gate counts them."""
        dropped, live = dict(+self.dropped), len(self.open)
        submitted = self._trained + sum(dropped.values()) + self.abandoned + live
        finished = len(self.finished)
        return LedgerBooks(submitted, self._trained, dropped, self.abandoned, live - finished, finished)

    def _begin(self, line: Begin) -> None:
        """Begin a launch. All processes are new: open rollouts start again, and nothing more is reported about
        the old ones.
        """
        settings = line.settings
        self.open, self.finished = {}, set()
        self.ended = RecentIds(ids_remembered(settings.train_batch_size, settings.max_head_offpolicyness))
        self.version, self.manager, self.heard = line.version, 0, 0
        self.abandoned = 0
        self._trained = line.version * settings.train_batch_size  # as the gate counts, whatever B was before
        if line.carried is not None:
            self.dropped = Counter(line.carried.dropped)

    def _finish(self, rollout: str) -> None:
        if rollout in self.open:
            self.finished.add(rollout)

    def _drop(self, line: Dropped) -> None:
        admitted = self._close(line.rollout, line.reason)
        if admitted is None:
            return
        self.dropped[line.reason] += 1
        if line.prompt is PromptGoes.given_up:
            self._use(admitted.prompt)
        elif line.prompt is PromptGoes.returned and (line.attempt or line.failures):
            self.retries[admitted.prompt] = Retry(admitted.order, line.attempt or 0, line.failures)

    def _train(self, line: Trained) -> None:
        """Count a trained rollout; this overrides any earlier report about it."""
        if self._close(line.rollout, TRAINED) is None:
            self._undo(line.rollout)
            self.ended.put(line.rollout, TRAINED)
        self._trained += 1
        self._use(line.prompt)

    def _close(self, rollout: str, outcome: str) -> Admitted | None:
        """End an open rollout; return its admission, None if it is not open."""
        admitted = self.open.pop(rollout, None)
        if admitted is not None:
            self.finished.discard(rollout)
            self.ended.put(rollout, outcome)
        return admitted

    def _undo(self, rollout: str) -> None:
        outcome = self.ended.pop(rollout)
        if outcome is None:
            return
        if outcome == ABANDONED:
            self.abandoned -= 1
        else:
            self.dropped[outcome] -= 1

    def _use(self, prompt: str) -> None:
        self.used.add(prompt)
        self.retries.pop(prompt, None)
