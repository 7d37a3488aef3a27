"""What the surviving history of a ledger came to, for those who hold the run's other files against it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.comm.ledger_lines import LedgerBooks, RunSettings, Saved, Trained


@dataclass(slots=True)
class StepTotals:
    """What the trained lines of a step add up to."""

    samples: int = 0
    episodes: int = 0
    tokens: int = 0
    reward: float = 0.0
    """Sum over episodes."""
    ages: float = 0.0
    """Sum over those tokens that are within max_head_offpolicyness, of which there are `young_tokens`."""
    young_tokens: int = 0
    oldest_age: int = 0
    whole_tokens: int | None = 0
    """Tokens with those of prompts and environments; None where a rollout was trained before it was told finished."""


@dataclass(frozen=True, slots=True)
class SavedLine:
    """The line that a checkpoint goes on from."""

    line: Saved
    used: int
    """How many prompts of `Outcome.used` were used by then."""


@dataclass(slots=True)
class Outcome:
    """What the history came to."""

    version: int = 0
    """The last step."""
    ended: bool = False
    """Whether the last launch ended by itself."""
    summed_up: bool = False
    """Whether the last launch left a summary, which comes after the end of the ledger."""
    submitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    live: int = 0
    lost: int = 0
    """Rollouts that were under way when a launch ended without a word."""
    lineages: int = 0
    settings: RunSettings | None = None
    steps: dict[int, StepTotals] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    """Prompts trained or dropped for good, in the order in which they were."""
    saved: dict[int, SavedLine] = field(default_factory=dict)
    """By their numbers, the lines of checkpoints."""
    rollouts: dict[str, Trained] = field(default_factory=dict)
    """What was trained, by rollout."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Of rollouts that finished, all their tokens."""
    books_at: dict[int, LedgerBooks | None] = field(default_factory=dict)
    """By step, the books in its line."""
    begun: list[int] = field(default_factory=list)
    """The versions at which the launches began."""
    steps_of_launch: int = 0
    """Steps of the last launch."""
    resumed: bool = False
    """Whether a launch went on from a checkpoint."""
    admitted: bool = False
    """Whether a rollout was admitted to a worker, not read from kept samples."""
    whole: bool = True
    """Whether the ledger has all of the run's history."""

    @property
    def is_over(self) -> bool:
        """Whether the last launch ended by itself, by the ledger or, where that is cut off, by the summary."""
        return self.ended or self.summed_up
