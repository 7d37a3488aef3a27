"""Rollouts of a ledger's history, and the gate's counters, which are the numbers of their fates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.comm.ended_rollouts.ledger_lines import Begin, RolloutCounts

RUNNING, FINISHED, TRAINED, ABANDONED, DROPPED = "running", "finished", "trained", "abandoned", "dropped"


@dataclass(slots=True)
class AuditedRollout:
    """A rollout as of the current line.

    Attributes:
        place: line of its admission.
        fate: empty before it is counted.
        reason: reason of its drop.
        step: step that trained it.
        tokens: all tokens; None until it is finished.
    """

    prompt: str
    order: int
    version: int
    place: str
    attempt: int = 0
    fate: str = ""
    reason: str = ""
    step: int = -1
    tokens: int | None = None


class Rollouts:
    """Rollouts by id. Each counter is the number of rollouts with its fate, as the gate counts them.

    Attributes:
        by_id: all rollouts of the history, except those that were running or waiting when a launch ended.
        submitted: number of admissions.
        dropped: counts by reason.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, AuditedRollout] = {}
        self.submitted = 0
        self.dropped: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def begin(self, line: Begin) -> set[str]:
        """Begin a lineage; return the rollouts that were live before, and are not unless they are adopted."""
        lost = {key for key, known in self.by_id.items() if known.fate in (RUNNING, FINISHED)}
        for rollout_id in lost:
            self.move(self.by_id.pop(rollout_id), "")
        if line.carried is not None:
            self.dropped = Counter(line.carried.dropped)
        # The gate counts the present train_batch_size per version, even if it was different in earlier launches.
        self._counts[TRAINED] = line.version * line.settings.train_batch_size
        self.submitted = self._counts[TRAINED] + self.dropped.total()
        return lost

    def move(self, rollout: AuditedRollout, fate: str, reason: str = "") -> None:
        """Change the fate of `rollout`, and the counters with it; an empty fate is not counted."""
        if rollout.fate == DROPPED:
            self.dropped[rollout.reason] -= 1
        elif rollout.fate:
            self._counts[rollout.fate] -= 1
        rollout.fate, rollout.reason = fate, reason
        if fate == DROPPED:
            self.dropped[reason] += 1
        elif fate:
            self._counts[fate] += 1

    def count(self, fate: str) -> int:
        """Return the number of rollouts with this fate, other than dropped."""
        return self._counts[fate]

    @property
    def live(self) -> int:
        """Return the number of rollouts without an end."""
        return self._counts[RUNNING] + self._counts[FINISHED]

    def check_books(self, books: RolloutCounts) -> Iterator[str]:
        """Yield a message for each counter in `books` that differs from the total of the lines."""
        added = {
            "submitted": self.submitted,
            "trained": self._counts[TRAINED],
            "dropped": dict(+self.dropped),
            "abandoned": self._counts[ABANDONED],
            "running": self._counts[RUNNING],
            "finished_untrained": self._counts[FINISHED],
        }
        for name, value in added.items():
            if (told := getattr(books, name)) != value:
                yield f"the books have {name} {told}, the lines add up to {value}"
